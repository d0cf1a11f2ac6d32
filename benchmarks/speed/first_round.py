"""A process that ends after its first round on Fashion-MNIST, and prints how long each part of its start took.

    python benchmarks/speed/first_round.py cuda auto/auto/bf16

`python benchmarks/speed/speed.py --startup` starts it, and passes the time at which it did.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(device: str, engine: str, began: float) -> None:
    """The first round; imports are made here, so that they are timed.

    Args:
        device: the device.
        engine: backend, convolutions and precision, such as auto/auto/bf16.
        began: when the process was started, in seconds of `time.time()`.
    """
    row: dict[str, float] = {}
    last = [time.perf_counter()]

    def mark(name: str) -> None:
        row[name], last[0] = time.perf_counter() - last[0], time.perf_counter()

    import torch

    mark("import_torch_s")
    from thinwire.federation.engine import Engine
    from thinwire.federation.simulation import make_simulation
    from thinwire.runs.build import build_job
    from thinwire.runs.config import resolve

    mark("import_thinwire_s")
    torch.zeros(1, device=device).sum().item()
    mark("device_s")
    settings = {"rounds": 2, "eval.every": 10, "cohort.size": 10, "local.batch": 32}
    job = build_job(resolve("fedavg", on="fashion-mnist", overrides=settings))
    mark("data_s")
    backend, conv, precision = engine.split("/")
    simulation = make_simulation(Engine(device, backend, precision=precision, conv=conv), job)  # type: ignore[arg-type]
    mark("prepare_s")
    simulation.round(simulation.start())
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    mark("first_round_s")
    row["seconds"] = time.time() - began
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], float(sys.argv[3]) if len(sys.argv) > 3 else time.time())  # type: ignore[call-arg,arg-type]
