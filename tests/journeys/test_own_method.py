"""The page "Your method" from the first file to the last command, in an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.own_code import forgotten

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/your-method.md").read_text()
FILE = re.compile(r"^`([\w/.-]+)`:\n\n```\w+\n(.*?)^```\n", re.S | re.M)


def test_a_method_and_a_codec_of_ones_own_from_the_page_to_the_comparison(thinwire, tmp_path, monkeypatch, capsys):
    for name, content in FILE.findall(PAGE):
        (tmp_path / name).write_text(content)
    blocks = [inside for kind, inside in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M) if not kind]
    lines = "".join(blocks).splitlines()
    assert len(lines) == 6
    assert all(line.startswith("PYTHONPATH=. ") for line in lines)
    few = "--rounds 1 --clients 4 --cohort 2 --set local.epochs=1"
    smaller = [f"{line} {few}" if re.search(r"thinwire (run|compare) ", line) else line for line in lines]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "150")
    shown = []
    with forgotten():
        for line in smaller:
            words = shlex.split(line.removeprefix("PYTHONPATH=. "))
            if words[0] == "pytest":
                code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words[1:]])
                out = capsys.readouterr().out
            elif words[:2] == ["python", "-c"]:
                exec(words[2])
                code, out = 0, capsys.readouterr().out
            else:
                code, out, _ = thinwire(*words[1:])
            assert code == 0, line
            shown.append(out)
    for name in ("my_method", "test_my_method"):
        sys.modules.pop(name, None)
    tested, resolved, listed, checked, compared, trained = shown
    assert "1 passed" in tested
    assert "up=BFloat16()" in resolved
    assert re.search(r"bf16\s+Send each float32 as bfloat16", listed)
    assert "thrifty" in checked
    assert re.search(r"^ *thrifty ", compared, re.M)
    assert "bytes total" in trained
    assert "thrifty" in (tmp_path / "runs/compare.html").read_text()
