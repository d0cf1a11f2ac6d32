"""Files and functions of thinwire that one round enters, after two warm-up rounds.

    python benchmarks/round_profile.py                 FedAvg with a perceptron on digits, backend vmap
    python benchmarks/round_profile.py mapo --list     another method, with all functions

Lambdas and comprehensions are not counted, nor generated code such as constructors of dataclasses. The model is a plain
torch module, and the round is not evaluated.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dataclasses import replace

import thinwire
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve

PACKAGE = str(Path(thinwire.__file__).parent)


def profile(method: str) -> Counter[tuple[str, str]]:
    """The functions that the third round calls, by file and name, with the number of calls."""
    job = build_job(resolve(method, on="digits", overrides={"rounds": 1000, "eval.every": 1000}))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    simulation = make_simulation(Engine(backend="vmap"), replace(job, task=replace(job.task, model=model)))
    state = simulation.start()
    for _ in range(2):
        state, _ = simulation.round(state)
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            calls[code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname] += 1

    sys.setprofile(note)
    simulation.round(state)
    sys.setprofile(None)
    return calls


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", default="fedavg")
    parser.add_argument("--list", action="store_true", help="print all functions")
    options = parser.parse_args()
    calls = profile(options.method)
    files = {file for file, _ in calls}
    print(f"{options.method}: {len(files)} files, {len(calls)} functions, {calls.total()} calls")
    for (file, name), count in sorted(calls.items()) if options.list else ():
        print(f"{file:32} {name:48} {count}")


if __name__ == "__main__":
    main()
