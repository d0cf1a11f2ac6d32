"""A long deployment on one machine: seconds per round, memory and disk; and data that take long to load.

`endurance` measures after every round the memory of all processes of the deployment and the size of all files that they
write. Memory is the sum of proportional set sizes: a page that several processes share is counted once.

`loading` edits the app so that a node needs 8 more seconds to load its data, and counts how often it does.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from thinwire.federation.job import RoundRecord
from thinwire.federation.settings import Settings
from thinwire.flower.local import NODE, deploy

Found = dict[str, Any]
LOAD_SECONDS = 8.0


class Watch:
    """Samples of a deployment: memory and disk after each round.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.home = run, Path()
        self.nodes: set[int] = set()
        self.records: list[RoundRecord] = []
        self.samples: list[dict[str, int]] = []

    def start(self, processes: Sequence[Popen[bytes]]) -> None:
        """Note the processes: the SuperLink and the nodes, each the first of its session."""
        self.nodes = {process.pid for process in processes[1:]}
        variables = Path(f"/proc/{processes[0].pid}/environ").read_bytes().split(b"\0")
        self.home = Path(next(v for v in variables if v.startswith(b"FLWR_HOME=")).split(b"=", 1)[1].decode())

    def round(self, record: RoundRecord) -> None:
        """Sample memory and disk after a round."""
        self.records.append(record)
        memory = {"nodes": 0, "server": 0}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                if f"FLWR_HOME={self.home}".encode() in (process / "environ").read_bytes():
                    kind = "nodes" if os.getsid(int(process.name)) in self.nodes else "server"
                    memory[kind] += _proportional(process)
        self.samples.append({**memory, "disk": size_of(self.run) + size_of(self.home)})


def _proportional(process: Path) -> int:
    """The proportional set size of a process in bytes."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def size_of(folder: Path) -> int:
    """The size of all files of a folder."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was replaced meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def endurance(experiment: Settings, nodes: int) -> Found:
    """Deploy an experiment and sample memory and disk."""
    with tempfile.TemporaryDirectory(prefix="thinwire-endurance-") as folder:
        watch = Watch(Path(folder) / "run")
        began = time.monotonic()
        deploy(experiment, watch.run, nodes=nodes, on_start=watch.start, on_round=watch.round)
        seconds = time.monotonic() - began
    return {
        "nodes": nodes,
        "rounds": len(watch.records),
        "lost": sum(record.absent + record.refused for record in watch.records),
        "seconds": [record.seconds for record in watch.records],
        "samples": watch.samples,
        "all": seconds,
    }


def endurance_table(found: Found) -> str:
    """The section of the page: the first and the last quarter of the rounds."""
    samples, seconds = found["samples"], found["seconds"][1:]
    quarter = max(1, len(samples) // 4)
    rows = ["| | after the first quarter of the rounds | at the end |", "|---|---|---|"]
    for name, label in (("nodes", "memory of all nodes"), ("server", "memory of SuperLink and server")):
        early, late = (
            statistics.median(row[name] for row in part)
            for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        rows.append(f"| {label} | {early / 1e6:,.0f} MB | {late / 1e6:,.0f} MB |")
    rows.append(f"| files | {samples[quarter]['disk'] / 1e6:.1f} MB | {samples[-1]['disk'] / 1e6:.1f} MB |")
    middle, high = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
    return "\n".join(rows) + (
        f"\n\n{found['nodes']} nodes, {found['rounds']} rounds of FedAvg on digits: {middle:.2f} s per round (median; "
        f"95% of them at most {high:.2f} s), {found['lost']} updates lost, {found['all']:.0f} s in total. Memory is "
        "the median over a quarter of the rounds; *files* are the run directory, client states and logs."
    )


_SLOW = '''

_load, _log = job, {log!r}


def job(node_config):
    """The job of a node, whose data take long to load."""
    if node_config is not None:
        import time

        time.sleep({seconds})
        with open(_log, "a") as file:
            file.write("loaded\\n")
    return _load(node_config)
'''


def loading(experiment: Settings, nodes: int) -> Found:
    """Deploy an app whose data take long to load, with nodes that load them once and with others."""
    found: Found = {"nodes": nodes, "rounds": experiment.rounds, "load": LOAD_SECONDS}
    for kind, node in (("once", ()), ("every message", NODE)):
        with tempfile.TemporaryDirectory(prefix="thinwire-loading-") as folder:
            log, records = Path(folder) / "loads", list[RoundRecord]()

            def edit(app: Path, log: Path = log) -> None:
                task = app / "federated/jobs.py"
                task.write_text(task.read_text() + _SLOW.format(log=str(log), seconds=LOAD_SECONDS))

            deploy(
                experiment,
                Path(folder) / "run",
                nodes=nodes,
                on_round=records.append,
                edit_app=edit,
                node=node,
            )
            found[kind] = {
                "loads": len(log.read_text().splitlines()),
                "seconds": [record.seconds for record in records],
            }
    return found


def loading_table(found: Found) -> str:
    """The section of the page."""
    rows = ["| node | loads of the data, all nodes | seconds per round: median |", "|---|---|---|"]
    for kind, name in (("once", "`thinwire site start --app`"), ("every message", "`thinwire site start`")):
        seconds = statistics.median(found[kind]["seconds"][1:])
        rows.append(f"| {name} | {found[kind]['loads']} | {seconds:.2f} |")
    return "\n".join(rows) + (
        f"\n\n{found['nodes']} nodes, {found['rounds']} rounds of FedAvg on digits; the data of a node take "
        f"{found['load']:.0f} s to load."
    )
