"""Time of a round with a thousand and with a million registered clients, cohort 100.

    python benchmarks/speed/scale.py                        FedAvg on a small MLP
    python benchmarks/speed/scale.py --sampled              every client has participated before
    python benchmarks/speed/scale.py --method scaffold      any preset; stateful methods keep a state per participant

Each federation runs in a separate process. The time of a round is the median CPU time of a few rounds after a warm-up
round, memory is the peak of the process. All clients share one pool of examples, so that only the number of clients
differs. "ratio" is the time with more clients divided by that with fewer.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POOL, EACH, BATCH = 100_000, 20, 10


def measure(clients: int, cohort: int, rounds: int, method: str, sampled: bool) -> dict[str, float]:
    """Seconds of the partition and of a round, seconds and bytes of a checkpoint, peak megabytes."""
    import numpy as np
    import torch
    from torch import nn

    from thinwire.core.key import Key
    from thinwire.data.examples import Arrays
    from thinwire.data.partition import IID, Assignment
    from thinwire.data.task import Task
    from thinwire.federation.engine import Engine
    from thinwire.federation.job import Job
    from thinwire.federation.simulation import make_simulation
    from thinwire.protocol.method import Method
    from thinwire.protocol.state import ClientState, ClientStates
    from thinwire.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from thinwire.runs.config import update
    from thinwire.runs.presets import preset
    from thinwire.training import Local

    torch.manual_seed(0)
    began = time.process_time()
    dealt = IID().assign(np.zeros(clients * EACH, np.int64), clients, Key(0))
    split = time.process_time() - began
    pool = Arrays(torch.randn(POOL, 64), torch.randint(0, 10, (POOL,)))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    task = Task(model, pool, Assignment(dealt.order % POOL, dealt.offsets))
    table = preset("methods", method).table
    job = Job(task, update(Method(), table.get("method", {})), 10**6, cohort, Local(batch=BATCH), eval_every=10**6)
    simulation = make_simulation(Engine("cpu", "vmap"), job)
    state, _ = simulation.round(simulation.start())
    if sampled:
        seen = ClientState(state.server.public.version)
        state = state._replace(clients=ClientStates.updated({}, dict.fromkeys(range(clients), seen).items()))
    took = []
    for _ in range(rounds):
        began = time.process_time()
        state, _ = simulation.round(state)
        took.append(time.process_time() - began)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10 if sys.platform == "linux" else 1 << 20)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        save_checkpoint(Path(folder), Checkpoint(state), "")
        saved = time.process_time() - began
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        began = time.process_time()
        load_checkpoint(Path(folder), "")
        loaded = time.process_time() - began
    out = {"clients": clients, "split_s": split, "round_s": statistics.median(took), "memory_mb": memory}
    return out | {"checkpoint_s": saved, "checkpoint_mb": size / 1e6, "resume_s": loaded}


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs=2, type=int, default=[1_000, 1_000_000], help="the two numbers of clients")
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=41, help="number of timed rounds")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--sampled", action="store_true", help="every client has participated before")
    parser.add_argument("--one", type=int, help="measure this number of clients in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.cohort, options.rounds, options.method, options.sampled)))
        return
    rows = []
    for clients in options.clients:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", str(clients)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print("  ".join(f"{key}={value:.4g}" for key, value in rows[-1].items()), flush=True)
    few, many = rows
    print(f"ratio={many['round_s'] / few['round_s']:.3f}  more_memory_mb={many['memory_mb'] - few['memory_mb']:.0f}")


if __name__ == "__main__":
    main()
