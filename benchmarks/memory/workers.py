"""Memory of Ray workers that map the examples, which Ray holds once a machine, and of workers with copies.

    python benchmarks/memory/workers.py --workers 2 --docs docs

One round of FedAvg on CIFAR-10 in each case. `own` is what a worker alone holds, `shared` what it maps together with
others (Linux, /proc/PID/smaps_rollup). Limit: all workers with the map need less than with copies, by more than
half a copy for each.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from thinwire.core.text import human_bytes
from thinwire.federation import ray_workers
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.federation.transfer import values_of
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve


def copied(parts: Any) -> Any:
    """A tensor with memory of its own."""
    values, dtype, shape = parts
    return torch.from_numpy(values.copy()).view(dtype).view(shape)


def held(_: Any) -> tuple[int, int]:
    """Bytes of this process alone, and those that it maps with others."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()][1:]
    sizes = {name: 1024 * int(size) for name, size, *_ in lines}
    own = sizes["Private_Clean:"] + sizes["Private_Dirty:"]
    return own, sizes["Rss:"] - own


def measure(job: Job, workers: int) -> list[tuple[int, int]]:
    """The bytes of each worker after a round."""
    simulation = make_simulation(Engine(chunk=2, workers=workers), job)
    simulation.round(simulation.start())
    clients: Any = simulation.clients
    return clients.ray.get([worker.__ray_call__.remote(held) for worker in clients.workers])


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--on", default="cifar10")
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    settings = {"task.clients": 20, "cohort.size": 4, "local.steps": 2, "rounds": 1}
    job = build_job(resolve("fedavg", on=options.on, overrides=settings))
    sent: dict[int, int] = {}  # the tensors of the job

    def counted(tensor: Tensor) -> Any:
        sent[tensor.data_ptr()] = tensor.nbytes
        return values_of(tensor)

    ray_workers.values_of = counted
    lines = ["| examples in a worker | own | shared with other processes | all workers together |", "|---|---|---|---|"]
    totals = []
    for name, load in (("copies", copied), ("mapped", ray_workers.shared)):
        ray_workers.shared = load
        found = measure(job, options.workers)
        gc.collect()
        totals.append(sum(own for own, _ in found) + max(together for _, together in found))
        cells = [f"{human_bytes(min(sizes))} to {human_bytes(max(sizes))}" for sizes in zip(*found, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} | {human_bytes(totals[-1])} |")
    examples = sum(sent.values())
    lines += ["", f"{options.workers} workers, {options.on}: {human_bytes(examples)} of examples and weights."]
    print("\n".join(lines))
    if options.docs:
        command = f"python benchmarks/memory/workers.py --workers {options.workers} --docs docs"
        write_part(options.docs / "benchmarks.md", "worker-memory", "\n".join(lines), command)
    raise SystemExit(0 if totals[0] - totals[1] > 0.5 * options.workers * examples else 1)


if __name__ == "__main__":
    main()
