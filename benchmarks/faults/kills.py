"""`kill -9` of the server, the SuperLink and nodes of a deployment at random, seeded moments.

    python benchmarks/faults/kills.py --kills 30 --docs docs

A SuperLink with a database and nodes are real processes that are started again a second after they die, as by a service
manager; `thinwire site supervise` runs the server. Nothing else is done by hand. Then the final model must be that of
the simulation, bit for bit, and the accepted messages, replayed from round 1 on, must give it too: each was applied
exactly once. Needs `pip install 'thinwire[flower]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults.deployment import machine
from benchmarks.faults.faults import MessageLog, replayed
from benchmarks.page import write_part
from thinwire.core.key import Key
from thinwire.federation.settings import Settings
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable
from thinwire.flower.local import CONNECTION, Processes, SuperLink, start_nodes, start_superlink
from thinwire.flower.supervisor import server_process
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

TARGETS = ("server", "SuperLink", "node")
RESTART = 1.0  # seconds after which a dead process is started again
GAPS = (1.0, 12.0)  # seconds between two kills

_SERVER = """
from pathlib import Path
from benchmarks.faults.faults import MessageLog
from federated.jobs import EXPERIMENT, job
from thinwire.flower.apps import server_app
app = server_app(EXPERIMENT, job, MessageLog(Path({accepted!r})))
"""


class Services:
    """The SuperLink and the nodes; those that died are started again."""

    def __init__(self, processes: Processes, link: SuperLink, nodes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        homes = [{}, *({"FLWR_HOME": str(processes.home / f"node-{i}.home")} for i in range(len(nodes)))]
        self.running = {f"service-{i}": one for i, one in enumerate((link.process, *nodes))}
        self.environments = dict(zip(self.running, homes, strict=True))
        self.died: dict[str, float] = {}
        self.starts = 0

    def tend(self) -> None:
        """Start the processes again that have been dead for a second."""
        for name, process in self.running.items():
            if process.poll() is None:
                continue
            if time.monotonic() > self.died.setdefault(name, time.monotonic()) + RESTART:
                del self.died[name]
                self.starts += 1
                command = [str(word) for word in process.args]  # type: ignore[union-attr]
                self.running[name] = self.processes.start(f"{name}-{self.starts}", command, self.environments[name])

    def kill(self, index: int) -> bool:
        """Kill a process and its session, if it runs; 0 is the SuperLink."""
        process = self.running[f"service-{index}"]
        if process.poll() is not None:
            return False
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def kill_one(services: Services, run: Path, target: str, node: int) -> bool:
    """Kill what the seed says; returns whether it ran."""
    if target == "SuperLink":
        return services.kill(0)
    if target == "node":
        return services.kill(1 + node)
    process = server_process(run)
    if process is None:
        return False
    os.kill(process, signal.SIGKILL)
    return True


def killed_run(folder: Path, *, kills: int, nodes: int, rounds: int, seed: int) -> dict[str, Any]:
    """Run the deployment with kills, and check its result.

    Args:
        folder: an empty folder.
        kills: number of kills; fewer if the run is finished before.
        nodes: number of nodes, with one client each.
        rounds: number of rounds.
        seed: of targets and moments.
    """
    options = {"task.clients": nodes, "cohort.size": nodes, "local.epochs": 1, "rounds": rounds}
    experiment = deployable(resolve("scaffold", "digits", options))
    quiet = execute(experiment, folder / "quiet")
    run, accepted, home = folder / "run", folder / "accepted", folder / "home"
    home.mkdir()
    done: Counter[str] = Counter()
    key, began = Key(seed).fold("kills"), time.monotonic()
    with Processes(home, None) as processes:
        write_app(experiment, home / "app")
        (home / "app/federated/server_app.py").write_text(_SERVER.format(accepted=str(accepted)))
        link = start_superlink(processes, nodes, home / "superlink.db")
        services = Services(processes, link, start_nodes(processes, link, link.port, folder / "states"))
        words = ["site", "supervise", str(home / "app"), CONNECTION, "--run-dir", str(run), "--restarts", "60"]
        config = ["-c", "quorum=1.0 seconds=20.0 tries=30"]
        supervisor = processes.start("supervisor", [sys.executable, "-m", "thinwire", *words, *config])
        while not (run / "metrics.jsonl").is_file() and supervisor.poll() is None:
            time.sleep(0.1)  # until the server has begun
        after, rounds_then = time.monotonic(), 0
        while supervisor.poll() is None:
            services.tend()
            i = sum(done.values())
            low, high = GAPS
            due = after + low + (high - low) * float(key.fold("gap", i).uniform(1))
            # every second kill waits for a new round; the others may hit processes that are being started
            if i < kills and time.monotonic() > due and (i % 2 or _rounds(run) > rounds_then):
                after, rounds_then = time.monotonic(), _rounds(run)
                which, node = (
                    int(key.fold(one, i).integers(1, most)) for one, most in (("target", 3), ("node", nodes))
                )
                while not kill_one(services, run, TARGETS[which], node):  # it is being started: the next kind
                    which = (which + 1) % len(TARGETS)
                    services.tend()
                done[TARGETS[which]] += 1
                print(f"{time.monotonic() - began:6.0f} s  kill {i + 1}: {TARGETS[which]}", file=sys.stderr)
            time.sleep(0.1)
        log = "\n".join(processes.log("supervisor"))
        assert supervisor.returncode == 0, log[-3000:]
    restarts = log.count("starting again in")
    return {
        "kills": dict(sorted(done.items())),
        "nodes": nodes,
        "rounds": rounds,
        "seed": seed,
        "restarts": restarts,
        "accuracy": quiet["final_accuracy"],
        "minutes": (time.monotonic() - began) / 60,
        **check(experiment, folder),
    }


def _rounds(run: Path) -> int:
    """The rounds that are done."""
    return (run / "metrics.jsonl").read_bytes().count(b"\n")


def check(experiment: Settings, folder: Path) -> dict[str, Any]:
    """Compare the run with the simulation; raises AssertionError if they differ."""
    run, quiet = folder / "run", folder / "quiet"
    assert (run / "model.safetensors").read_bytes() == (quiet / "model.safetensors").read_bytes()
    messages = MessageLog(folder / "accepted").read()
    assert sorted(messages) == list(range(1, experiment.rounds + 1))
    assert all(len(uploads) == experiment.cohort.size for uploads in messages.values())
    replayed(experiment, messages, run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    same = [json.loads(line) for line in (quiet / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in same]
    return {"accepted": sum(map(len, messages.values()))}


def text_of(entry: dict[str, Any]) -> str:
    """The section of the page."""
    found = entry["found"]
    kills = ", ".join(f"{name} {count}" for name, count in found["kills"].items())
    rows = (
        ("kills", f"{sum(found['kills'].values())}: {kills}"),
        ("nodes, rounds, seed", f"{found['nodes']}, {found['rounds']}, {found['seed']}"),
        ("starts by the supervisor", str(1 + found["restarts"])),
        ("updates accepted", f"{found['accepted']} of {found['nodes'] * found['rounds']}, each applied once"),
        ("final model", f"that of the simulation, bit for bit; accuracy {found['accuracy']:.4f}"),
        ("minutes", f"{found['minutes']:.0f}"),
    )
    table = "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)
    load = f"load {entry['load'][0]:.1f} before and {entry['load'][1]:.1f} after"
    return f"{table}\n\n" + textwrap.fill(f"*{entry['machine']}; flwr {entry['flwr']}; {load}.*", 120)


def command_of(entry: dict[str, Any]) -> str:
    """The command that repeats a measurement."""
    found = entry["found"]
    options = {"kills": sum(found["kills"].values()), **{name: found[name] for name in ("nodes", "rounds", "seed")}}
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    return f"python benchmarks/faults/kills.py {words} --docs docs"


def main() -> None:
    """Run it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docs", type=Path, help="the documentation folder to write to")
    given = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="thinwire-kills-") as folder:
        found = killed_run(Path(folder), kills=given.kills, nodes=given.nodes, rounds=given.rounds, seed=given.seed)
    load = (round(before, 2), round(os.getloadavg()[0], 2))
    entry = {"machine": machine(), "flwr": metadata.version("flwr"), "load": load, "found": found}
    print(text_of(entry))
    if given.docs:
        (given.docs / "operation.json").write_text(json.dumps({"kills": entry}, indent=1) + "\n")
        write_part(given.docs / "operation.md", "kills", text_of(entry), command_of(entry))


if __name__ == "__main__":
    main()
