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
from thinwire.flower.app_folder import _PYPROJECT
from thinwire.flower.policy import RoundPolicy
from thinwire.runs.toml import loads

ROOT = Path(__file__).parent.parent.parent
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))


def commands(unit: Path) -> list[str]:
    """The words of the command of a unit."""
    text = unit.read_text().replace("\\\n", " ")
    return shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])


def on_page(page: str, *start: str) -> list[list[str]]:
    """The words of the commands of a page that begin with these."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.S | re.M)
    lines = [line for kind, block in blocks if not kind for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(" ".join(start))]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_commands_of_units_exist_and_are_those_of_the_pages(unit):
    program, *words = [word.replace("%i", "first") for word in commands(unit)]
    assert Path(program).parent == Path("/opt/thinwire/bin")
    assert " FLWR_HOME=/var/lib/thinwire/flwr\n" in unit.read_text().replace("Environment=", " ")
    if Path(program).name != "thinwire":
        assert [Path(program).name, *words] in on_page("deployment.md", "flower-superlink")
        return
    assert ["thinwire", *words] in on_page("three-hospitals.md", "thinwire", *words[:2])
    verb = get_command(app).commands[words[0]].commands[words[1]]
    known = {option for parameter in verb.params for option in parameter.opts}
    if words[1] != "start":  # its options are Flower's
        assert {word for word in words if word.startswith("-")} <= known
        config = loads(words[words.index("-c") + 1].replace(" ", "\n"), "-c")
        assert config.keys() <= {*re.findall(r"^([a-z-]+) =", _PYPROJECT.partition("app.config]")[2], re.M)}
        assert RoundPolicy.of(config).grace == 10.0
    else:
        config = loads(words[words.index("--node-config") + 1].replace(" ", "\n"), "--node-config")
        assert config.keys() == {"site", "data-dir", "state-dir"}


def test_flower_parses_the_commands_of_units():
    supernode = pytest.importorskip("flwr.supernode.cli.flower_supernode")
    superlink = pytest.importorskip("flwr.superlink.cli.flower_superlink")
    parsers = {"start": supernode._parse_args_run_supernode, "flower-superlink": superlink._parse_args_run_superlink}
    for unit in UNITS:
        program, *words = commands(unit)
        if parser := parsers.get(Path(program).name) or parsers.get(words[1]):
            options = words if Path(program).name == "flower-superlink" else words[4:]  # after site start --app APP
            parser().parse_args(options)


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
