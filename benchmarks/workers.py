"""What a round costs with Ray workers: bytes and seconds of its parts, and from them a plan for more machines.

    python benchmarks/workers.py --docs docs          needs Ray

Two workers of one core each train the cohort in two groups on this machine. Measured are the round, the training of a
group, and what passes between the processes: the public state (once for each machine), the task of a group and its
result, pickled as Ray does. The rest of a round is the host: cohort, decoding, averaging, and Ray itself. The plan
multiplies these parts; nothing of it was run on several machines.
"""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_part

COHORT, BATCH, LR, EXAMPLES, ROUNDS = 10, 32, 0.01, 100, 7
LINK = 10e9 / 8  # bytes per second between machines
PLANS = ((1, 8), (16, 8))  # machines, GPUs of each


def measure(model: str, folder: Path) -> dict[str, float]:
    """Median seconds of a round and its parts, and bytes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks.frameworks import job_of
    from benchmarks.peers import write_inputs
    from thinwire.simulation.engine import LocalEngine

    write_inputs(model, EXAMPLES, 1, folder)
    simulation: Any = LocalEngine("cpu", "chain", chunk=COHORT // 2, workers=2).prepare(
        job_of(model, LR, BATCH, COHORT, folder)
    )
    tasks: list[Any] = []
    results: list[Any] = []
    train = simulation._results

    def seen(state: Any, opened: Any, given: Any, trained: Any) -> Any:
        tasks[:] = given
        results[:] = list(train(state, opened, given, trained))
        yield from results

    simulation._results = seen
    state, ray = simulation.start(), simulation.ray
    rounds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        state, _ = simulation.round(state)
        rounds.append(time.perf_counter() - start)
    rest, public = tasks[0]._replace(group=tasks[0].group._replace(public=None)), tasks[0].group.public
    sent = ray.put(public)
    worker = simulation.workers[0]
    both = median(lambda: ray.get([w.train.remote(rest, sent) for w in simulation.workers]))
    return {
        "round": statistics.median(rounds[1:]),
        "groups": both,
        "ping": median(lambda: ray.get(worker.schema.remote())),
        "put": median(lambda: ray.get(ray.put(public))),
        "public": len(pickle.dumps(public)),
        "task": len(pickle.dumps(rest)) / len(rest.cohort),
        "result": len(pickle.dumps(results[0])) / len(results[0].messages),
    }


def median(call: Callable[[], object]) -> float:
    """Median seconds of a few calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def host_seconds(part: dict[str, float]) -> float:
    """Seconds of the host for a client; 0 where it is less than the noise of the training."""
    return max(0.0, part["round"] - part["groups"]) / COHORT


def page(found: dict[str, dict[str, float]]) -> str:
    """Tables of the parts and of the plan."""
    text = [
        f"{platform.machine()}, {os.cpu_count()} cores; {COHORT} clients a round, {EXAMPLES} examples each, two "
        f"workers; load of the machine {os.getloadavg()[0]:.1f}.",
        "",
        "| model | round, s | both groups, s | host, ms a client | call of a worker, ms | public state, bytes "
        "| put and get, ms | task, bytes a client | result, bytes a client |",
        "|" + "---|" * 9,
    ]
    for model, part in found.items():
        host = host_seconds(part)
        text.append(
            f"| {model} | {part['round']:.3f} | {part['groups']:.3f} "
            f"| {f'{1e3 * host:.2f}' if host else '-'} | {1e3 * part['ping']:.2f} "
            f"| {part['public']:,.0f} | {1e3 * part['put']:.2f} | {part['task']:,.0f} | {part['result']:,.0f} |"
        )
    text += [
        "",
        f"The plan, from these parts: {COHORT} clients for each GPU, {LINK * 8 / 1e9:.0f} Gbit/s between machines.",
        "",
        "| model | machines | GPUs | clients | MB out | MB back | link, s | host, s |",
        "|" + "---|" * 8,
    ]
    for model, part in found.items():
        host = host_seconds(part)
        for machines, gpus in PLANS:
            clients, away = (
                COHORT * machines * gpus,
                (machines - 1) / machines,
            )  # the share that leaves the first machine
            out = (machines - 1) * part["public"] + away * clients * part["task"]
            back = away * clients * part["result"]
            text.append(
                f"| {model} | {machines} | {machines * gpus} | {clients:,} | {out / 1e6:.1f} | {back / 1e6:.1f} "
                f"| {(out + back) / LINK:.3f} | {f'{host * clients:.2f}' if host else '-'} |"
            )
    return "\n".join(text)


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["cnn2", "cnn-cifar"])
    parser.add_argument("--docs", type=Path, help="the documentation folder; its benchmarks.md is updated")
    options = parser.parse_args()
    found = {}
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="thinwire-workers-") as folder:
            found[model] = measure(model, Path(folder))
    text = page(found)
    print(text)
    if options.docs:
        write_part(options.docs / "benchmarks.md", "workers", text, "python benchmarks/workers.py --docs docs")


if __name__ == "__main__":
    main()
