"""The page "Your method" from the first file to the last command, in an empty folder and a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/your-method.md").read_text()
FILE = re.compile(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)^```\n", re.S | re.M)

# One process runs all commands, as starting Python and torch six times would take most of the time of the test.
RUN_ALL = """
import json, shlex, sys
import pytest
from thinwire.cli.app import main

for line in json.load(sys.stdin):
    sys.argv = shlex.split(line.removeprefix("PYTHONPATH=. "))
    print("command:", line, flush=True)
    if sys.argv[0] == "pytest":
        assert pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]) == 0, line
    elif sys.argv[:2] == ["python", "-c"]:
        exec(sys.argv[2])
    else:
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, line
"""


def test_a_method_and_a_codec_of_ones_own_from_the_page_to_the_comparison(tmp_path):
    for name, content in FILE.findall(PAGE):
        (tmp_path / name).write_text(content)
    blocks = [inside for kind, inside in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M) if not kind]
    lines = "".join(blocks).splitlines()
    assert len(lines) == 6
    assert all(line.startswith("PYTHONPATH=. ") for line in lines)
    few = "--rounds 1 --clients 4 --cohort 2 --set local.epochs=1"
    smaller = [f"{line} {few}" if re.search(r"thinwire (run|compare) ", line) else line for line in lines]
    environment = {**os.environ, "PYTHONPATH": f".{os.pathsep}{ROOT}", "THINWIRE_PROBE": "off", "COLUMNS": "150"}
    command = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(
        command, input=json.dumps(smaller), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    by_command = dict(part.split("\n", 1) for part in done.stdout.split("command: ")[1:])
    tested, resolved, listed, checked, compared, trained = (by_command[line] for line in smaller)
    assert "1 passed" in tested
    assert "up=BFloat16()" in resolved
    assert re.search(r"bf16\s+Send each float32 as bfloat16", listed)
    assert "thrifty" in checked
    assert re.search(r"^ *thrifty ", compared, re.M)
    assert "bytes total" in trained
    assert "thrifty" in (tmp_path / "runs/compare.html").read_text()
