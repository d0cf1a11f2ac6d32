"""Simulated time to a target accuracy with slow clients: synchronous rounds against FedBuff.

    python benchmarks/stragglers.py --seeds 1 2 3 --docs docs

A share of the clients takes ten times as long for a local step as the others. All methods have the same clients,
batches and learning rate; a run ends in the first evaluated round that reaches the target. Time is that of the
simulated clock (`thinwire/federation/speed.py`), in units of the local training of an ordinary client in a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_part
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve

METHODS: dict[str, tuple[str, float]] = {  # a method, and its cohort in units of that of the task
    "fedavg": ("fedavg", 1.0),
    "fedavg with twice the cohort": ("fedavg", 2.0),  # as many clients train at the same time as with FedBuff
    "fedbuff": ("fedbuff", 1.0),
}
SHARES = (0.0, 0.1)  # of slow clients
STEP = 0.1  # seconds of a local step
TASKS: dict[str, tuple[float, dict[str, Any]]] = {  # target accuracy, settings
    "digits": (0.9, {"task.clients": 50, "cohort.size": 10, "rounds": 200}),
    "fashion-mnist": (
        0.75,
        {"task.model": "mlp", "task.model.inputs": 784, "cohort.size": 10, "rounds": 300, "local.steps": 5},
    ),
}


class Reached(NamedTuple):
    """A run up to its target."""

    seconds: float
    rounds: int
    sent: int
    staleness: float


def reach(name: str, task: str, share: float, seed: int, data: Path | None = None) -> Reached | None:
    """Train until the target; None if the rounds end before."""
    (method, cohort), (target, settings) = METHODS[name], TASKS[task]
    settings = {**settings, "cohort.size": round(cohort * settings["cohort.size"])}
    speed = {"speed.step_seconds": STEP, "speed.slow_fraction": share, "speed.slow_factor": 10.0}
    chosen = resolve(method, task, {**settings, **speed, "seed": seed})
    runner = make_simulation(chosen.engine, build_job(chosen, data))
    steps = statistics.fmean(runner.clients.speeds.steps(i) for i in range(len(runner.job.task.clients)))
    state, sent, stale = runner.start(), 0, []
    for _ in range(chosen.rounds):
        state, record = runner.round(state)
        sent += record.bytes_up + record.bytes_down + record.bytes_catchup
        stale.append(record.staleness or 0.0)
        if record.accuracy is not None and record.accuracy >= target:
            return Reached(state.clock / (STEP * steps), record.round, sent, statistics.fmean(stale))
    return None


def table(found: Mapping[str, Sequence[Reached | None]]) -> str:
    """A Markdown table; a row is named `task, share, method`."""
    lines = [
        "| task, target | slow clients | method | time: mean (range) | rounds | bytes | mean staleness |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        task, share, method = name.split(", ")
        head = f"| {task}, {100 * TASKS[task][0]:.0f} % | {100 * float(share):.0f} % | {method} |"
        done = [run for run in runs if run is not None]
        if len(done) < len(runs):
            lines.append(f"{head} reached by {len(done)} of {len(runs)} seeds | | | |")
            continue
        times = [run.seconds for run in done]
        rounds, sent, stale = (
            statistics.fmean(getattr(run, field) for run in done) for field in ("rounds", "sent", "staleness")
        )
        lines.append(
            f"{head} {statistics.fmean(times):.1f} ({min(times):.1f} to {max(times):.1f}) | {rounds:.1f} | "
            f"{sent / 1e6:.2f} MB | {stale:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and with --docs write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--data", type=Path, help="the folder of datasets")
    parser.add_argument("--docs", type=Path, help="write the table into methods/fedavg.md of this folder")
    given = parser.parse_args()
    found: dict[str, list[Reached | None]] = {}
    for task in given.tasks:
        for share in SHARES:
            for method in METHODS:
                name = f"{task}, {share}, {method}"
                found[name] = [reach(method, task, share, seed, given.data) for seed in given.seeds]
                print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    text = table(found)
    print(text)
    if given.docs:
        words = " ".join(map(str, given.seeds))
        tasks = "" if given.tasks == list(TASKS) else f" --tasks {' '.join(given.tasks)}"
        command = f"python benchmarks/stragglers.py --seeds {words}{tasks} --docs docs"
        write_part(given.docs / "methods/fedavg.md", "stragglers", text, command)
    slow = {method: [runs for name, runs in found.items() if name.endswith(f"0.1, {method}")] for method in METHODS}
    for ours, theirs in zip(slow["fedbuff"], slow["fedavg"], strict=True):
        if None in ours or (None not in theirs and _mean(ours) >= _mean(theirs)):
            sys.exit("FedBuff needs as much simulated time as synchronous rounds with a tenth of slow clients")


def _mean(runs: Sequence[Reached | None]) -> float:
    return statistics.fmean(run.seconds for run in runs if run is not None)


if __name__ == "__main__":
    main()
