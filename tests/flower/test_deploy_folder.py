"""The folder deploy: units that systemd accepts, and commands that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from thinwire.cli.app import app

ROOT = Path(__file__).parent.parent.parent
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))


def commands(unit: Path) -> list[str]:
    """The words of the command of a unit."""
    text = unit.read_text().replace("\\\n", " ")
    return shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_commands_of_units_exist(unit):
    program, *words = commands(unit)
    assert Path(program).parent == Path("/opt/thinwire/bin")
    if Path(program).name != "thinwire":
        return
    verb = get_command(app).commands[words[0]]
    verb = verb.commands[words[1]] if words[0] == "site" else verb
    known = {option for parameter in verb.params for option in parameter.opts}
    if words[1] != "start":  # its options are Flower's
        assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_units_are_valid(tmp_path):
    assert len(UNITS) == 3
    for unit in UNITS:  # its programs are not installed here
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/thinwire/bin/", "/bin/true ", 1))
    files = [str(tmp_path / unit.name) for unit in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_secrets_are_private_and_the_server_is_stopped_before_the_superlink():
    texts = {unit.name: unit.read_text() for unit in UNITS}
    for name in ("thinwire-superlink.service", "thinwire-server@.service", "thinwire-node.service"):
        assert "UMask=0077\n" in texts[name]
        assert "StateDirectoryMode=0700\n" in texts[name]
    assert "After=thinwire-superlink.service\n" in texts["thinwire-server@.service"]


def test_the_image_uses_no_index():
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert "--no-index --find-links /wheelhouse" in text
    assert "\nUSER thinwire\n" in text
