"""Milliseconds of the host in a round: everything but local training, whose result is put in its place.

    python benchmarks/speed/host.py                              CNN-2 and the CIFAR CNN with ten clients
    python benchmarks/speed/host.py --models cnn2 --cohort 100   another cohort
    python benchmarks/speed/host.py --models cnn2 --profile      the functions that take the time
    python benchmarks/speed/host.py --threads 16                 messages made on several cores; then see "wall_ms"

On a GPU the host draws cohorts and batches, makes and decodes the messages and makes the next version while the GPU
trains, so a round takes at least as long as this. Here all of it runs on a CPU, in the order of a round on a GPU: the
next cohort is trained in advance (`federation/pipeline.py`). "Training" adds one update per client, drawn once, to its
coordinates. What a GPU adds (launches of kernels, transfers, waiting) is not included; what it does itself is: the
difference to the start, the check of all values and the prediction of the next version.

The time is the processor time of the main thread, with messages made on one core by default, so that other processes on
the machine change little: the median and the smallest of all rounds; "wall_ms" is the median by the clock. "Calls" are
the calls of Python and C functions in one round, which other processes do not change.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.speed import BATCH, MODELS, make_task, show
from thinwire.core.parallel import on_one_core
from thinwire.core.tree import Spec, Vector
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation
from thinwire.federation.job import Job
from thinwire.federation.pipeline import PipelinedClients
from thinwire.training import Local
from thinwire.training.inputs import TrainingInputs, TrainingOutcome


class GivenUpdates:
    """A trainer that adds to all coordinates an update drawn once; the outcome is one matrix, as on a GPU."""

    def __init__(self) -> None:
        self.spec: Spec | None = None

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """The outcome of a workload of which no step was taken."""
        if self.spec is None:
            torch.manual_seed(0)
            self.spec = Spec.of({name: block[0] for name, block in inputs.start.items()})
            self.updates = 1e-3 * torch.randn(len(inputs.work.samples), self.spec.size)
        start = inputs.common_start
        if start is None:
            start = torch.cat([block.reshape(len(block), -1) for block in inputs.start.values()], 1)
        assert start is not None
        coords = Vector(start + self.updates, self.spec)
        return TrainingOutcome(coords, {}, torch.ones(len(inputs.work.samples)), {})


def prepare(model: str, cohort: int) -> Any:
    """A simulation that trains nothing, in the order of a round on a GPU."""
    job = Job(make_task(model, 100), rounds=10**6, cohort=cohort, local=Local(batch=BATCH), eval_every=10**6)
    simulation: Any = Federation(Engine(backend="graph"), job, PipelinedClients)
    simulation.clients.backends.trainers["graph"] = GivenUpdates()
    return simulation


def measure(model: str, cohort: int, rounds: int, profile: bool) -> dict:
    """The time of the host in a round."""
    simulation = prepare(model, cohort)
    state, took, watch = simulation.start(), [], cProfile.Profile()
    for number in range(rounds + 3):
        if profile and number == 3:
            watch.enable()
        began, clock = time.thread_time(), time.perf_counter()
        with on_one_core():  # as on a GPU; `each` uses all
            state, _ = simulation.round(state)
        took.append((time.thread_time() - began, time.perf_counter() - clock))
    watch.disable()
    if profile:
        pstats.Stats(watch).sort_stats("cumulative").print_stats(60)
        pstats.Stats(watch).sort_stats("tottime").print_stats(25)
    calls = Counter[str]()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_qualname if event == "call" else getattr(called, "__qualname__", "")] += 1

    sys.setprofile(note)
    simulation.round(state)
    sys.setprofile(None)
    for name, count in calls.most_common(60) if profile else ():
        print(f"{count:6} {name}")
    assert simulation.clients._next is not None, "no cohort was trained in advance"
    ms, wall = ([1e3 * seconds for seconds in column] for column in zip(*took[3:], strict=True))
    row = {"model": model, "cohort": cohort, "uploads_mb": cohort * simulation.contract.code.nbytes / 1e6}
    return row | {
        "ms": statistics.median(ms),
        "least_ms": min(ms),
        "wall_ms": statistics.median(wall),
        "calls": calls.total(),
    }


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["cnn2", "cnn-cifar"], choices=list(MODELS))
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="cores that make and decode messages")
    parser.add_argument("--profile", action="store_true", help="print the functions that take the time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for model in options.models:
        show(measure(model, options.cohort, options.rounds, options.profile))


if __name__ == "__main__":
    main()
