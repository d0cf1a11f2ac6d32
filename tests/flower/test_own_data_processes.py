"""Three sites with tables and a module of their own, by the commands of docs/own-data.md, as real processes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.own_sites import SIZES, write_stays
from thinwire.flower import with_path
from thinwire.flower.local import Processes, free_ports, listens
from thinwire.runs.records import read_clients

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs/own-data.md").read_text()
(TASK,) = re.findall(r"^`federated/task.py`:\n\n```python\n(.*?)^```", PAGE, re.S | re.M)
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
BLOCKS = [block.replace("\\\n", " ") for kind, block in FENCED if not kind]
LINES = [line for block in BLOCKS if not block.startswith("[") for line in block.splitlines()]
(CONFIG,) = (block for block in BLOCKS if block.startswith("["))
PLACES = ("/data", "/states", "/runs")
PORTS = ("8000", "9101", "9102", "9103")


def words(line: str) -> list[str]:
    """A command as a list; `thinwire` is the package of this test."""
    first, *rest = shlex.split(line)
    return [sys.executable, "-m", "thinwire", *rest] if first == "thinwire" else [first, *rest]


def test_three_sites_with_their_own_tables_and_module_equal_the_simulation(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    write_stays(tmp_path / "data")
    folders = {"/data": tmp_path / "data", "/states": home / "states", "/runs": tmp_path / "runs"}
    ports = dict(zip(PORTS, map(str, free_ports(4)), strict=True))

    def here(text: str) -> str:
        text = re.sub("|".join(f'{place}(?=[/ "])' for place in PLACES), lambda found: str(folders[found[0]]), text)
        return re.sub("|".join(PORTS), lambda found: ports[found[0]], text)

    (home / "config.toml").write_text(here(CONFIG))
    with Processes(home, None) as processes:

        def call(line: str) -> None:
            done = subprocess.run(
                with_path(words(here(line))),
                capture_output=True,
                text=True,
                env=processes.env,
                cwd=tmp_path,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"

        app, check, simulation, superlink, *nodes, run = LINES
        call(app)
        (tmp_path / "my-app/federated/task.py").write_text(TASK)
        call(check)
        processes.start("superlink", shlex.split(here(superlink)))
        while not listens(int(ports["8000"])):
            assert processes.running[0].poll() is None, processes.log_tail("superlink")
            time.sleep(0.1)
        for i, line in enumerate(nodes):
            variable, command = here(line).split(" ", 1)
            Path(variable.split("=")[1]).mkdir(parents=True)
            processes.start(f"node-{i}", words(command), dict([variable.split("=", 1)]))
        call(simulation)
        assert all(process.poll() is None for process in processes.running), processes.log_tail("node-0")
        call(run)
        logs = [processes.log_tail(f"node-{i}") for i in range(len(nodes))]
    deployed, simulated = tmp_path / "runs/deployed", tmp_path / "simulated"
    assert (deployed / "model.safetensors").read_bytes() == (simulated / "model.safetensors").read_bytes(), logs
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (deployed, simulated)
    )
    means = ("loss", "accuracy", "test_loss", "metrics", "client_accuracy", "client_loss", "clients_eval", "bytes_up")
    assert [{key: row[key] for key in means} for row in ours] == [{key: row[key] for key in means} for row in theirs]
    assert [row["clients"] for row in ours] == [3] * 5
    last = ours[-1]
    assert set(last["sites_eval"]) == {"client 0", "client 1", "client 2"}
    assert [one["examples"] for one in last["sites_eval"].values()] == [round(0.2 * n) for n in SIZES.values()]
    assert last["accuracy"] > 0.4
    known, seen = (sorted(read_clients(folder), key=lambda one: one["client"]) for folder in (deployed, simulated))
    trained = [one.pop("training_examples") for one in seen]
    assert trained == [n - round(0.2 * n) for n in SIZES.values()]
    assert [one | {"client": ""} for one in known] == [one | {"client": ""} for one in seen]
