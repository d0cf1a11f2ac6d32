"""Time of a local epoch per client, compared with a plain PyTorch loop over clients on the same batches.

    python benchmarks/speed/speed.py --device cuda --page --json speed.json   everything that is in docs/benchmarks.md
    python benchmarks/speed/speed.py --device cpu --models cnn2 --cohorts 10  one model, one cohort
    python benchmarks/speed/speed.py --device cuda --methods fedavg mapo   a comparison of methods (CNN-2, cohort 10)
    python benchmarks/speed/speed.py --device cuda --whole 500             a complete run, evaluated every 10 rounds
    python benchmarks/speed/speed.py --device cuda --evaluate              one evaluation on Shakespeare
    python benchmarks/speed/speed.py --device cuda --startup               process start to the end of the first round
    python benchmarks/speed/speed.py --device cuda --profile               a profile of a round
    python benchmarks/speed/speed.py --table speed.json                    write the results to docs/benchmarks.md

Times are wall-clock times of complete rounds, including messages and server (the plain loop has neither): the median of
a few rounds after two warm-up rounds. Images and text are random, with the shapes of Fashion-MNIST, CIFAR-10 and
Shakespeare, except in complete runs and evaluations, which read data from the folder THINWIRE_DATA. The plain loop
trains an LSTM as `nn.LSTM`, with the kernels of cuDNN. After one round each variant must have the
averaged weights of the plain loop: "difference" is the norm of the difference, relative to the norm of the change.
Rounding moves some activations across the kink of ReLU, most often in 16 bits; one missing or additional step changes
the weights by about as much as the last step of the plain loop. So "difference" must stay below half of that
("one_step"). In deep networks rounding alone changes more: there the plain loop is run once more, rounded as the
variant is (autocast for bf16, TF32 for tf32, weights that are one bit off for float32), and "difference" must stay
below 1.5 times what that changes ("rounding").
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from benchmarks.speed.plain_loop import plain
from benchmarks.speed.speed_page import page
from thinwire.core.registry import lookup
from thinwire.data.examples import Examples, Images, TextWindows
from thinwire.data.partition import Assignment
from thinwire.data.task import Task
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve, update
from thinwire.runs.presets import preset
from thinwire.training import Local
from thinwire.training.evaluation import evaluate

# model, its options, channels, size, examples of a client
MODELS: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "cnn2": ("cnn2", {}, 1, 28, 600),
    "cnn-cifar": ("cnn-cifar", {}, 3, 32, 500),
    "resnet20-gn": ("resnet20", {"norm": "gn"}, 3, 32, 500),
    "vgg16-gn": ("vgg16-gn", {}, 3, 32, 500),
    "resnet18-gn": ("resnet18", {"norm": "gn"}, 3, 32, 500),
    "wrn16-4-gn": ("wrn16-4", {"classes": 10}, 3, 32, 500),
    "lstm-shakespeare": ("lstm80", {}, 0, 80, 500),  # 0 channels: text
}
BATCH = 32
WARM_UP = 20  # rounds of a complete run that are not counted, with two evaluations
# backend, conv, precision
VARIANTS = {
    "cuda": [
        ("graph", "fused", "float32"),
        ("graph", "fused", "tf32"),
        ("graph", "fused", "bf16"),
        ("graph", "grouped", "float32"),
        ("graph", "grouped", "tf32"),
        ("loop", "auto", "tf32"),
    ],
    "cpu": [
        ("graph", "grouped", "float32"),
        ("vmap", "grouped", "float32"),
        ("loop", "auto", "float32"),
        ("threads", "auto", "float32"),
    ],
}


# what the page has: model, cohort, variants; the most important first
F32, TF32, BF16 = (("graph", "fused", precision) for precision in ("float32", "tf32", "bf16"))
PAGE = (
    ("cnn2", 10, [BF16, F32]),
    ("cnn-cifar", 10, [BF16, TF32, F32]),
    ("vgg16-gn", 10, [BF16, TF32, F32]),
    ("cnn-cifar", 100, [BF16]),
    ("lstm-shakespeare", 10, [BF16, F32]),
    ("cnn2", 100, [BF16, F32]),
    ("resnet20-gn", 10, [BF16, TF32, F32]),
    ("resnet18-gn", 10, [BF16, TF32]),
    ("wrn16-4-gn", 10, [BF16, TF32]),
    ("resnet20-gn", 100, [BF16]),
    ("vgg16-gn", 100, [BF16]),
)
METHODS = ["fedavg", "mapo", "fedpara", "lora", "scaffold"]


def make_task(name: str, clients: int) -> Task:
    """Random images or text partitioned among clients; the pool has the size of the real dataset."""
    kind, options, channels, size, each = MODELS[name]
    torch.manual_seed(0)
    pool = each * 100

    def examples(n: int) -> Examples:
        if not channels:
            return TextWindows(torch.randint(0, 80, (n + size,), dtype=torch.uint8), torch.arange(n), size)
        pixels = torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8)
        return Images(pixels, torch.randint(0, 10, (n,)), (0.5,) * channels, (0.5,) * channels)

    assignment = Assignment(np.arange(clients * each) % pool, np.arange(clients + 1) * each)
    return Task(lookup("model", kind).make(**options), examples(pool), assignment)


def clock(fn: Callable[[], Any], device: torch.device, times: int) -> float:
    """Median seconds of a call."""
    took = []
    for _ in range(times):
        wait(device)
        began = time.perf_counter()
        fn()
        wait(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fresh_peak(device: torch.device) -> None:
    """Begin to measure the peak of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def compare(
    model: str, cohort: int, device: torch.device, rounds: int, variants: list[tuple[str, str, str]]
) -> list[dict]:
    """Compare each variant with the plain loop."""
    lr = 0.01  # with larger ones rounding errors grow to the size of a missing step
    task = make_task(model, max(100, cohort))
    job = Job(task, Method(client_opt=SGD(lr)), rounds=10**6, cohort=cohort, local=Local(batch=BATCH), eval_every=10**6)
    clients = min(cohort, 10)  # the plain loop's time is the same for every client
    base = make_simulation(Engine(str(device), "loop"), job)
    chosen = tuple(base.key.fold("cohort", 0).choice(len(task.clients), cohort))
    plain(base, chosen[:1], lr)
    plain_ms = clock(lambda: plain(base, chosen[:clients], lr), device, 2) / clients * 1e3
    with base.compute():
        last: dict[str, torch.Tensor] = {}
        expected, steps = plain(base, chosen, lr, last)
    first = {name: p.detach() for name, p in base.model.module.named_parameters()}
    change = distance(expected, first)
    rows = []
    for backend, conv, precision in variants:
        row: dict[str, Any] = {"model": model, "cohort": cohort, "variant": f"{backend}/{conv}/{precision}"}
        row |= {"plain_ms": plain_ms, "steps": steps, "one_step": norm(last) / change}
        try:
            fresh_peak(device)
            engine = Engine(str(device), backend, precision=precision, conv=conv)  # type: ignore[arg-type]
            simulation = make_simulation(engine, job)
            began = time.perf_counter()
            states = [simulation.round(simulation.start())[0]]
            row["first_round_s"] = time.perf_counter() - began
            got = simulation.weights(states[0].server.public)
            row["difference"] = distance(got, expected) / change
            row["same_steps"] = row["difference"] < row["one_step"] / 2
            if not row["same_steps"]:
                with base.compute():
                    row["rounding"] = distance(plain(base, chosen, lr, None, precision)[0], expected) / change
                row["same_steps"] = row["difference"] < 1.5 * row["rounding"]
            states[0] = simulation.round(states[0])[0]

            def one(states: list = states, simulation: Federation = simulation) -> None:
                states[0] = simulation.round(states[0])[0]

            row["ms"] = clock(one, device, rounds) / cohort * 1e3
            row["times"] = plain_ms / row["ms"]
            if device.type == "cuda":
                row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        except Exception as error:  # a failing variant must not hide the others
            row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        rows.append(row)
        show(row)
    return rows


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The norm of the difference."""
    return norm({name: a[name] - b[name] for name in a})


def norm(tree: dict[str, torch.Tensor]) -> float:
    """The norm of all values as one vector."""
    return math.sqrt(sum(float(block.double().square().sum()) for block in tree.values()))


def methods(names: list[str], device: torch.device, rounds: int, engine: Engine) -> list[dict]:
    """Compare presets on CNN-2 with ten clients."""
    rows = []
    for name in names:
        method = update(Method(), preset("methods", name).table.get("method", {}))
        job = Job(make_task("cnn2", 100), method, rounds=10**6, cohort=10, local=Local(batch=BATCH), eval_every=10**6)
        row: dict[str, Any] = {"method": name, "model": "cnn2", "cohort": 10}
        try:
            simulation = make_simulation(engine, job)
            states = [simulation.start()]

            def one(states: list = states, simulation: Federation = simulation) -> None:
                states[0] = simulation.round(states[0])[0]

            one()
            one()
            row["ms"] = clock(one, device, rounds) / 10 * 1e3
            row["backend"], row["backend_reason"] = states[0].backend, states[0].backend_reason
            row["share_of_first"] = rows[0]["ms"] / row["ms"] if rows else 1.0
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        rows.append(row)
        show(row)
    return rows


def whole(rounds: int, device: torch.device, engine: Engine) -> dict[str, Any]:
    """Rounds on Fashion-MNIST after a warm-up: 100 clients of two classes, cohort 10, CNN-2, evaluated every 10 rounds.

    The warm-up is the first rounds of the same run: until the second evaluation everything was loaded and compiled.
    """
    fresh_peak(device)
    settings = {"rounds": WARM_UP + rounds, "eval.every": 10, "cohort.size": 10, "local.batch": BATCH}
    job = build_job(resolve("fedavg", on="fashion-mnist", overrides=settings))
    wait(device)
    began = time.perf_counter()
    federation, records = make_simulation(engine, job), []
    state = federation.start()
    for _ in range(job.rounds):
        state, record = federation.round(state)
        records.append(record)
    row = {"whole": rounds, "precision": engine.precision, "seconds": time.perf_counter() - began}
    took = [record.seconds for record in records[WARM_UP:]]
    row["warm_up_s"] = sum(record.seconds for record in records[:WARM_UP])
    row["with_loading_s"] = sum(record.seconds for record in records[2:rounds])
    row["ms_round"] = statistics.median(took) * 1e3
    row |= {"warm_s": sum(took), "images": "Fashion-MNIST", "accuracy": records[-1].accuracy}
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    show(row)
    return row


def evaluation(device: torch.device, engine: Engine) -> dict[str, Any]:
    """One evaluation of the LSTM on the test examples of Shakespeare: the first, and the median of three more."""
    fresh_peak(device)
    simulation = make_simulation(engine, build_job(resolve("fedavg", on="shakespeare", overrides={"rounds": 1})))
    state, federation = simulation.start(), simulation
    test, metrics = federation.test, federation.job.all_metrics
    assert test is not None

    def one() -> None:
        with federation.compute():
            evaluate(federation.model, *federation.final(state), test, metrics=metrics)

    first = clock(one, device, 1)
    row = {"evaluation": "shakespeare", "precision": engine.precision, "examples": len(test), "first_s": first}
    row["seconds"] = clock(one, device, 3)
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    show(row)
    return row


def startup(device: torch.device, engine: str) -> dict[str, Any]:
    """Seconds from the start of a process (`first_round.py`) to the end of its first round on Fashion-MNIST.

    Twice, with one new folder for Python's bytecode and one for compiled kernels: both are empty for the first process,
    as on a new machine, and full for the second, as for an installed package. Bytecode that the machine has cached is
    not used.
    """
    row: dict[str, Any] = {"startup": "fashion-mnist", "precision": engine.split("/")[-1]}
    command = [sys.executable, str(Path(__file__).parent / "first_round.py"), str(device), engine]
    with tempfile.TemporaryDirectory() as folder:
        bytecode = Path(folder) / "bytecode"
        env = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode), "TRITON_CACHE_DIR": f"{folder}/kernels"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for name in ("new_machine_s", "seconds"):
            row["bytecode"] = "cached" if any(bytecode.rglob("torch/__init__*.pyc")) else "not cached"
            began = time.time()
            done = subprocess.run([*command, str(began)], env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")
            parts = json.loads(done.stdout.splitlines()[-1])
            row[name] = parts.pop("seconds")
        row |= parts
        row["ours_s"] = row["seconds"] - row["import_torch_s"]
    show(row)
    return row


def profile(device: torch.device, engine: Engine, cohort: int, model: str) -> None:
    """Profile a round: functions on the host, kernels on the device."""
    job = Job(make_task(model, 100), rounds=10**6, cohort=cohort, local=Local(batch=BATCH), eval_every=10**6)
    simulation = make_simulation(engine, job)
    state = simulation.start()
    for _ in range(3):
        state, _ = simulation.round(state)
    wait(device)
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(20):
        state, _ = simulation.round(state)
    watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(18)
    if device.type == "cuda":
        from torch.profiler import ProfilerActivity, profile as record

        with record(activities=[ProfilerActivity.CUDA]) as seen:
            simulation.round(state)
            wait(device)
        print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


def show(row: dict[str, Any]) -> None:
    """Print a row on one line."""
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def whole_page(device: torch.device, rounds: int, save: Callable[[list[dict]], None]) -> list[dict]:
    """Everything that is in docs/benchmarks.md; saved after each part."""
    bf16, exact = "auto/auto/bf16", "auto/auto/float32"

    def engine(how: str) -> Engine:
        backend, conv, precision = how.split("/")
        return Engine(str(device), backend, precision=precision, conv=conv)  # type: ignore[arg-type]

    parts: list[Callable[[], list[dict]]] = [
        lambda model=model, cohort=cohort, variants=variants: compare(model, cohort, device, rounds, variants)  # type: ignore[misc]
        for model, cohort, variants in PAGE
    ]
    parts[1:1] = [lambda: [whole(500, device, engine(bf16))]]
    parts[4:4] = [lambda how=how: [evaluation(device, engine(how))] for how in ("auto/auto/tf32", exact)]  # type: ignore[misc]
    parts[4:4] = [lambda: [startup(device, bf16)]]
    parts.append(lambda: methods(METHODS, device, rounds, engine(bf16)))
    rows: list[dict] = []
    for part in parts:
        try:
            rows += part()
        except Exception as error:  # a failing part must not hide the others
            print(f"{type(error).__name__}: {error}", flush=True)
        save(rows)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cohorts", nargs="*", type=int, default=[10, 32, 100])
    parser.add_argument(
        "--variants", nargs="*", help="backend/conv/precision, such as graph/fused/tf32; default: all of the device"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of timed rounds")
    parser.add_argument("--methods", nargs="*", help="compare these presets")
    parser.add_argument("--whole", type=int, default=0, help="time a complete run of this many rounds")
    parser.add_argument("--page", action="store_true", help="measure everything that is in docs/benchmarks.md")
    parser.add_argument("--evaluate", action="store_true", help="time one evaluation on Shakespeare")
    parser.add_argument("--startup", action="store_true", help="time a process until its first round ends")
    parser.add_argument("--profile", action="store_true", help="profile a round")
    parser.add_argument(
        "--engine", default="auto/auto/float32", help="backend/conv/precision for --methods, --whole and --profile"
    )
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument(
        "--table", nargs="+", metavar="FILE", help="do not measure; write the results of --json to --docs"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    if options.table:
        command = "python benchmarks/speed/speed.py --device cuda --page --json speed.json, then --table speed.json"
        write_part(options.docs / "benchmarks.md", "speed", page(options.table), command)
        return
    device = torch.device(options.device)
    backend, conv, precision = options.engine.split("/")
    engine = Engine(options.device, backend, precision=precision, conv=conv)
    rows: list[dict] = []

    def save(rows: list[dict]) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        facts = {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}
        if options.json:
            Path(options.json).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    if options.page:
        rows = whole_page(device, options.rounds, save)
    elif options.methods:
        rows = methods(options.methods, device, options.rounds, engine)
    elif options.whole:
        rows = [whole(options.whole, device, engine)]
    elif options.evaluate:
        rows = [evaluation(device, engine)]
    elif options.startup:
        rows = [startup(device, options.engine)]
    elif options.profile:
        profile(device, engine, options.cohorts[0], options.models[0])
    else:
        variants = [tuple(variant.split("/")) for variant in options.variants or ()] or VARIANTS[device.type]
        for model in options.models:
            for cohort in options.cohorts:
                rows += compare(model, cohort, device, options.rounds, variants)  # type: ignore[arg-type]
    save(rows)


if __name__ == "__main__":
    main()
