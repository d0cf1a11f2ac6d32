"""What a round costs with Ray workers: bytes and seconds of its parts, and from them a plan for more machines.

    python benchmarks/speed/workers.py --docs docs                        two workers on this machine; needs Ray
    python benchmarks/speed/workers.py --device cuda --json workers.json  two and four workers that share one GPU
    python benchmarks/speed/workers.py --table workers.json --docs docs   write the latter results to the page

Workers train the cohort in as many groups on this machine. Measured are the round, that of one process without workers,
the training of a group, and what passes between the processes: the public state (once for each machine), the task of a
group and its result, as Ray gets them. The rest of a round is the host: cohort, decoding, averaging, and Ray itself.
"Same bits" compares the model after the rounds with that of one process that trains the same groups. The plan
multiplies the parts; nothing of it was run on several machines.

On a GPU the workers take turns, or run beside each other if NVIDIA's multi-process service (MPS) was started before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part

COHORT, BATCH, LR = 12, 32, 0.01
EXAMPLES = {"cpu": 100, "cuda": 500}  # of a client
WORKERS = {"cpu": (2,), "cuda": (2, 4)}
LINK = 10e9 / 8  # bytes per second between machines
PLANS = ((1, 8), (16, 8))  # machines, GPUs of each
FOR_GPU = 10  # clients for each GPU in the plan


def measure(model: str, folder: Path, device: str, workers: int, times: int) -> dict[str, Any]:
    """Median seconds of a round and its parts, and bytes."""
    from benchmarks.speed.frameworks import job_of
    from thinwire.federation.engine import Engine
    from thinwire.federation.simulation import make_simulation
    from thinwire.federation.transfer import pack, unpack

    how: dict[str, Any] = {"backend": "chain"} if device == "cpu" else {"precision": "bf16"}
    job = job_of(model, LR, BATCH, COHORT, folder)
    _, alone, _ = play(make_simulation(Engine(device, **how), job), times)
    _, _, expected = play(make_simulation(Engine(device, **how, chunk=COHORT // workers), job), times)
    simulation: Any = make_simulation(Engine(device, **how, chunk=COHORT // workers, workers=workers), job)
    tasks: list[Any] = []
    results: list[Any] = []
    clients = simulation.clients
    answers = clients.answers

    def seen(given: Any, got: Any, states: Any) -> Any:
        tasks[:] = given
        results[:] = list(answers(given, got, states))
        yield from results

    clients.answers = seen
    state, rounds, weights = play(simulation, times)
    ray, task = clients.ray, tasks[0]
    rest, public = pack(task._replace(group=task.group._replace(public=None))), pack(task.group.public)
    sent = ray.put(public)
    worker = clients.workers[0]
    return {
        "model": model,
        "workers": workers,
        "backend": state.backend,
        "alone": alone,
        "round": rounds,
        "same": all(bool((weights[name] == block).all()) for name, block in expected.items()),
        "groups": median(
            lambda: list(map(unpack, ray.get([w.train.remote(rest, sent) for w in clients.workers]))), times
        ),
        "ping": median(lambda: ray.get(worker.schema.remote()), times),
        "put": median(lambda: unpack(ray.get(ray.put(pack(task.group.public)))), times),
        "public": public.nbytes,
        "task": rest.nbytes / len(task.group.clients),
        "result": pack([one._replace(message=memoryview(one.message)) for one in results[0]]).nbytes / len(results[0]),
    }


def play(simulation: Any, times: int) -> tuple[Any, float, dict[str, Any]]:
    """The state after some rounds, the median of their seconds without the first two, and the weights."""
    state, seconds = simulation.start(), []
    for _ in range(times + 2):
        start = time.perf_counter()
        state, _ = simulation.round(state)
        seconds.append(time.perf_counter() - start)
    weights = {name: block.cpu() for name, block in simulation.weights(state.server.public).items()}
    return state, statistics.median(seconds[2:]), weights


def median(call: Callable[[], object], times: int) -> float:
    """Median seconds of a few calls."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def measured(models: list[str], device: str, times: int) -> dict[str, Any]:
    """The results of all models, and of what they were measured on."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks.speed.peers import write_inputs

    rows = []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="thinwire-workers-") as folder:
            write_inputs(model, EXAMPLES[device], 1, Path(folder))
            for workers in WORKERS[device]:
                rows.append(measure(model, Path(folder), device, workers, times))
                print(json.dumps(rows[-1]), flush=True)
                _stop_workers()
    return {"where": _where(device), "examples": EXAMPLES[device], "load": os.getloadavg()[0], "rows": rows}


def _stop_workers() -> None:
    """End Ray, and with it all workers."""
    import ray

    ray.shutdown()


def _where(device: str) -> str:
    """The machine, in words."""
    if device == "cpu":
        return f"{platform.machine()}, {os.cpu_count()} cores"
    import torch

    shared = "with" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "without"
    return f"{torch.cuda.get_device_name()}, {shared} MPS, {platform.machine()}, {os.cpu_count()} cores"


def host_seconds(part: dict[str, float]) -> float:
    """Seconds of the host for a client; 0 where it is less than 1 % of the round: the noise of the training."""
    rest = part["round"] - part["groups"]
    return rest / COHORT if rest > 0.01 * part["round"] else 0.0


def parts_table(found: dict[str, Any]) -> str:
    """The table of a machine."""
    text = [
        f"{found['where']}; {COHORT} clients a round, {found['examples']} examples each; load of the machine "
        f"{found['load']:.1f}.",
        "",
        "| model | backend | workers | round, s | one process, s | same bits | all groups, s | host, ms a client "
        "| call of a worker, ms | public state, bytes | put and get, ms | task, bytes a client "
        "| result, bytes a client |",
        "|" + "---|" * 13,
    ]
    for part in found["rows"]:
        host = host_seconds(part)
        text.append(
            f"| {part['model']} | {part['backend']} | {part['workers']} | {part['round']:.3f} | {part['alone']:.3f} "
            f"| {'yes' if part['same'] else '**no**'} "
            f"| {part['groups']:.3f} | {f'{1e3 * host:.2f}' if host else '-'} | {1e3 * part['ping']:.2f} "
            f"| {part['public']:,.0f} | {1e3 * part['put']:.2f} | {part['task']:,.0f} | {part['result']:,.0f} |"
        )
    return "\n".join(text)


def plan_table(found: dict[str, Any]) -> str:
    """The plan for more machines."""
    text = [
        f"The plan, from the parts with most workers in the last table: {FOR_GPU} clients for each GPU, "
        f"{LINK * 8 / 1e9:.0f} Gbit/s between machines.",
        "",
        "| model | machines | GPUs | clients | MB out | MB back | link, s | host, s |",
        "|" + "---|" * 8,
    ]
    for part in (row for row in found["rows"] if row["workers"] == max(WORKERS["cuda"])):
        host = host_seconds(part)
        for machines, gpus in PLANS:
            clients, away = FOR_GPU * machines * gpus, (machines - 1) / machines  # the share that leaves the first
            out = (machines - 1) * part["public"] + away * clients * part["task"]
            back = away * clients * part["result"]
            text.append(
                f"| {part['model']} | {machines} | {machines * gpus} | {clients:,} | {out / 1e6:.1f} "
                f"| {back / 1e6:.1f} | {(out + back) / LINK:.3f} | {f'{host * clients:.2f}' if host else '-'} |"
            )
    return "\n".join(text)


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["cnn2", "cnn-cifar"])
    parser.add_argument("--device", default="cpu", choices=list(WORKERS))
    parser.add_argument("--rounds", type=int, default=3, help="number of timed rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="results of --json; nothing is measured")
    parser.add_argument("--docs", type=Path, help="the documentation folder; its benchmarks.md is updated")
    options = parser.parse_args()
    facts = [json.loads(file.read_text()) for file in options.table or ()]
    if not facts:
        facts = [measured(options.models, options.device, options.rounds)]
        if options.json:
            options.json.write_text(json.dumps(facts[0], indent=1))
    text = "\n\n".join(map(parts_table, facts))
    name, command = "workers-cuda", "python benchmarks/speed/workers.py --device cuda --json FILE, then --table FILE..."
    if options.device == "cpu" and not options.table:
        name, command = "workers", "python benchmarks/speed/workers.py --docs docs"
    else:
        text += "\n\n" + plan_table(facts[-1])
    print(text)
    if options.docs:
        write_part(options.docs / "benchmarks.md", name, text + "\n", command)


if __name__ == "__main__":
    main()
