"""How long a client's local epoch takes, against a plain PyTorch loop over clients that trains the same batches.

    python benchmarks/speed.py --device cuda --json speed.json          every model, cohort and way
    python benchmarks/speed.py --device cpu --models cnn2 --cohorts 10  one model, one cohort
    python benchmarks/speed.py --device cuda --methods fedavg mapo      methods against each other (CNN-2, cohort 10)
    python benchmarks/speed.py --device cuda --whole 500                a whole run, evaluated every 10 rounds
    python benchmarks/speed.py --device cuda --profile                  where the time of a round goes
    python benchmarks/speed.py --table speed.json                       write what was found into docs/benchmarks.md

Times are wall clock of whole rounds, messages and server included (the plain loop has neither): the median of a few
rounds after two that are not counted. The pictures are random numbers of the shapes of Fashion-MNIST and CIFAR-10, but
for the whole run, which reads the real ones from the folder that THINWIRE_DATA names. Each way must reach the averaged
weights of the plain loop after one round: "off" is the length of the difference, as a share of that of their change.
Rounding moves some activations across the kink of ReLU, most of all in 16 bits; a step left out, or one too many, moves
the weights by about as much as the plain loop's last step. So "off" must stay below half of that ("one_step").
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import math
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_part
from thinwire.core.registry import lookup
from thinwire.data.examples import Images
from thinwire.data.losses import cross_entropy
from thinwire.data.partitions.base import Assignment
from thinwire.data.task import Task
from thinwire.experiments.build import build_job
from thinwire.experiments.config import method_from, resolve
from thinwire.experiments.presets import preset
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.runtime.job import Job
from thinwire.simulation.engine import LocalEngine
from thinwire.simulation.simulation import Simulation
from thinwire.training import Local

# model, its options, channels, size, examples of a client
MODELS: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "cnn2": ("cnn2", {}, 1, 28, 600),
    "cnn-cifar": ("cnn-cifar", {}, 3, 32, 500),
    "resnet20-gn": ("resnet20", {"norm": "gn"}, 3, 32, 500),
    "vgg16-gn": ("vgg16-gn", {}, 3, 32, 500),
}
BATCH = 32
# backend, conv, precision
WAYS = {
    "cuda": [
        ("graph", "fused", "float32"),
        ("graph", "fused", "tf32"),
        ("graph", "fused", "bf16"),
        ("graph", "im2col", "float32"),
        ("graph", "im2col", "tf32"),
        ("graph", "im2col", "bf16"),
        ("graph", "grouped", "float32"),
        ("graph", "grouped", "tf32"),
        ("vmap", "im2col", "tf32"),
        ("loop", "auto", "tf32"),
    ],
    "cpu": [
        ("graph", "im2col", "float32"),
        ("vmap", "grouped", "float32"),
        ("vmap", "im2col", "float32"),
        ("loop", "auto", "float32"),
        ("threads", "auto", "float32"),
    ],
}


def make_task(name: str, clients: int) -> Task:
    """Random pictures, dealt to clients; the pool is as large as the real one."""
    kind, options, channels, size, each = MODELS[name]
    torch.manual_seed(0)
    pool = each * 100

    def images(n: int) -> Images:
        pixels = torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8)
        return Images(pixels, torch.randint(0, 10, (n,)), (0.5,) * channels, (0.5,) * channels)

    assignment = Assignment(np.arange(clients * each) % pool, np.arange(clients + 1) * each)
    return Task(lookup("model", kind).make(**options), images(pool), assignment)


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
    """Until the device has done all it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain(
    simulation: Simulation, cohort: tuple[int, ...], lr: float, last: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], int]:
    """What anybody would write: one model, one optimiser, one client after another. The mean weights, and the steps.

    What the last step of each client adds to the mean is noted in `last`.
    """
    work = simulation.federation.sampler.workload(0, cohort)
    start = copy.deepcopy(simulation.federation.model.module).train()
    total = {name: torch.zeros_like(p) for name, p in start.named_parameters()}
    steps = 0
    for i in range(len(cohort)):
        model = copy.deepcopy(start)
        optimiser = torch.optim.SGD(model.parameters(), lr)
        for s, rows in enumerate(work.rows[i].tolist()):
            x, y = work.gather(work.index[i, s, :rows])
            optimiser.zero_grad(set_to_none=True)
            cross_entropy(model(x), y).mean().backward()
            optimiser.step()
            steps += 1
        for name, p in model.named_parameters():
            total[name] += p.detach() / len(cohort)
            if last is not None and p.grad is not None:
                last[name] = last.get(name, 0) - lr * p.grad / len(cohort)
    return total, steps


def compare(model: str, cohort: int, device: torch.device, rounds: int, ways: list[tuple[str, str, str]]) -> list[dict]:
    """The plain loop, and each way against it."""
    lr = 0.01  # at larger ones rounding grows so fast that a way could not be told from one that leaves out a step
    task = make_task(model, max(100, cohort))
    job = Job(task, Method(client_opt=SGD(lr)), rounds=10**6, cohort=cohort, local=Local(batch=BATCH), eval_every=10**6)
    clients = min(cohort, 10)  # the plain loop's time is the same for every client
    base = LocalEngine(str(device), "loop").prepare(job)
    chosen = tuple(base.key.fold("cohort", 0).choice(len(task.clients), cohort))
    plain(base, chosen[:1], lr)
    plain_ms = clock(lambda: plain(base, chosen[:clients], lr), device, 2) / clients * 1e3
    with base.kernels(None):
        last: dict[str, torch.Tensor] = {}
        expected, steps = plain(base, chosen, lr, last)
    first = {name: p.detach() for name, p in base.model.module.named_parameters()}
    change = distance(expected, first)
    rows = []
    for backend, conv, precision in ways:
        row: dict[str, Any] = {"model": model, "cohort": cohort, "way": f"{backend}/{conv}/{precision}"}
        row |= {"plain_ms": plain_ms, "steps": steps, "one_step": length(last) / change}
        try:
            engine = LocalEngine(str(device), backend, precision=precision, conv=conv)  # type: ignore[arg-type]
            simulation = engine.prepare(job)
            began = time.perf_counter()
            states = [simulation.round(simulation.start())[0]]
            row["first_round_s"] = time.perf_counter() - began
            got = simulation.federation.weights(states[0].server.public)
            row["off"] = distance(got, expected) / change
            row["same_steps"] = row["off"] < row["one_step"] / 2
            states[0] = simulation.round(states[0])[0]

            def one(states: list = states, simulation: Simulation = simulation) -> None:
                states[0] = simulation.round(states[0])[0]

            row["ms"] = clock(one, device, rounds) / cohort * 1e3
            row["times"] = plain_ms / row["ms"]
            if device.type == "cuda":
                row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
                torch.cuda.reset_peak_memory_stats(device)
        except Exception as error:  # one way that fails must not hide the others
            row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        rows.append(row)
        show(row)
    return rows


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The length of the difference."""
    return length({name: a[name] - b[name] for name in a})


def length(tree: dict[str, torch.Tensor]) -> float:
    """The length of all numbers as one vector."""
    return math.sqrt(sum(float(block.double().square().sum()) for block in tree.values()))


def methods(names: list[str], device: torch.device, rounds: int, engine: LocalEngine) -> list[dict]:
    """Methods against each other, by presets, on CNN-2 with ten clients."""
    rows = []
    for name in names:
        method = method_from(preset("methods", name).table.get("method", {}))
        job = Job(make_task("cnn2", 100), method, rounds=10**6, cohort=10, local=Local(batch=BATCH), eval_every=10**6)
        row: dict[str, Any] = {"method": name, "model": "cnn2", "cohort": 10}
        try:
            simulation = engine.prepare(job)
            states = [simulation.start()]

            def one(states: list = states, simulation: Simulation = simulation) -> None:
                states[0] = simulation.round(states[0])[0]

            one()
            one()
            row["ms"] = clock(one, device, rounds) / 10 * 1e3
            row["backend"], row["why"] = states[0].backend, states[0].why
            row["share_of_first"] = rows[0]["ms"] / row["ms"] if rows else 1.0
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        rows.append(row)
        show(row)
    return rows


def whole(rounds: int, device: torch.device, engine: LocalEngine) -> dict[str, Any]:
    """A whole run on Fashion-MNIST: 100 clients of two classes, cohort 10, CNN-2, tested every 10 rounds."""
    settings = {"rounds": rounds, "eval.every": 10, "cohort.size": 10, "local.batch": BATCH}
    job = build_job(resolve("fedavg", on="fashion-mnist", overrides=settings))
    wait(device)
    began = time.perf_counter()
    records = list(engine.run(job))
    row = {"whole": rounds, "precision": engine.precision, "seconds": time.perf_counter() - began}
    took = [record.seconds for record in records[2:]]
    row |= {"first_rounds_s": sum(record.seconds for record in records[:2]), "ms_round": statistics.median(took) * 1e3}
    row |= {"warm_s": sum(took), "pictures": "Fashion-MNIST", "accuracy": records[-1].accuracy}
    show(row)
    return row


def profile(device: torch.device, engine: LocalEngine, cohort: int, model: str) -> None:
    """Where the time of a round goes: functions on the host, kernels on the device."""
    job = Job(make_task(model, 100), rounds=10**6, cohort=cohort, local=Local(batch=BATCH), eval_every=10**6)
    simulation = engine.prepare(job)
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
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        with record(activities=[ProfilerActivity.CUDA]) as seen:
            simulation.round(state)
            wait(device)
        print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


def show(row: dict[str, Any]) -> None:
    """One line."""
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


# what the project asks of a GPU: model, clients, least times the plain loop
BARS = (("cnn2", 10, 30), ("cnn2", 100, 55), ("cnn-cifar", 10, 8))


def page(files: list[str]) -> str:
    """What several runs with --json found, as tables."""
    facts = [json.loads(Path(name).read_text()) for name in files]
    rows = [row for fact in facts for row in fact["rows"]]
    text = [" / ".join(dict.fromkeys(f"{fact['device']}, torch {fact['torch']}" for fact in facts)), ""]
    if ways := [row for row in rows if "way" in row]:
        text += _table(
            ["model", "clients", "way", "ms a client", "plain loop", "times faster", "off", "peak GiB"], ways, _way
        )
        found = []
        for model, cohort, least in BARS:
            mine = [r for r in ways if (r["model"], r["cohort"]) == (model, cohort) and r.get("same_steps")]
            if mine:
                best = max(mine, key=lambda row: row["times"])
                verdict = "pass" if best["times"] >= least else "**missed**"
                found.append(
                    f"| {model}, {cohort} clients | {least} | {best['times']:.1f} ({best['way']}) | {verdict} |"
                )
        text += ["| bar | at least, times the plain loop | best | |", "|---|---|---|---|", *found, ""]
    if others := [row for row in rows if "method" in row]:
        head = ["method", "model", "clients", "ms a client", "% of the speed of the first", "backend"]
        text += _table(head, others, _method)
    if runs := [row for row in rows if "whole" in row]:
        head = [
            "whole run, rounds",
            "pictures",
            "precision",
            "seconds",
            "of them the first two rounds",
            "seconds after warm-up",
            "ms a round",
        ]
        text += _table(head, runs, _whole)
    return "\n".join(text)


def _table(head: list[str], rows: list[dict], cells: Callable[[dict], list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        made = (
            cells(row)
            if "error" not in row
            else [str(row.get("model", "")), row.get("way", row.get("method", "")), row["error"]]
        )
        lines.append("| " + " | ".join([*made, *["-"] * (len(head) - len(made))]) + " |")
    return [*lines, ""]


def _way(row: dict) -> list[str]:
    off = f"{row['off']:.4f}" + ("" if row["same_steps"] else " (too far)")
    peak = f"{row['peak_gib']:.1f}" if "peak_gib" in row else "-"
    times = [f"{row['ms']:.2f}", f"{row['plain_ms']:.1f}", f"{row['times']:.1f}"]
    return [row["model"], str(row["cohort"]), row["way"], *times, off, peak]


def _method(row: dict) -> list[str]:
    share = f"{100 * row['share_of_first']:.0f}"
    return [row["method"], row["model"], str(row["cohort"]), f"{row['ms']:.2f}", share, row["backend"]]


def _whole(row: dict) -> list[str]:
    first, whole = row["first_rounds_s"], row["seconds"]
    return [
        str(row["whole"]),
        row.get("pictures", "random"),
        row["precision"],
        f"{whole:.2f}",
        f"{first:.2f}",
        f"{row['warm_s']:.2f}",
        f"{row['ms_round']:.2f}",
    ]


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cohorts", nargs="*", type=int, default=[10, 32, 100])
    parser.add_argument("--ways", nargs="*", help="such as graph/im2col/tf32; all of the device's by default")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed")
    parser.add_argument("--methods", nargs="*", help="compare these presets instead")
    parser.add_argument("--whole", type=int, default=0, help="time a whole run of so many rounds instead")
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    parser.add_argument("--engine", default="auto/auto/float32", help="backend/conv/precision of the last three")
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="measure nothing; write what --json left to --docs")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    if options.table:
        command = "python benchmarks/speed.py --device cuda --json speed.json, then --table speed.json"
        write_part(options.docs / "benchmarks.md", "speed", page(options.table), command)
        return
    device = torch.device(options.device)
    backend, conv, precision = options.engine.split("/")
    engine = LocalEngine(options.device, backend, precision=precision, conv=conv)
    rows: list[dict] = []
    if options.methods:
        rows = methods(options.methods, device, options.rounds, engine)
    elif options.whole:
        rows = [whole(options.whole, device, engine)]
    elif options.profile:
        profile(device, engine, options.cohorts[0], options.models[0])
    else:
        ways = [tuple(way.split("/")) for way in options.ways or ()] or WAYS[device.type]
        for model in options.models:
            for cohort in options.cohorts:
                rows += compare(model, cohort, device, options.rounds, ways)  # type: ignore[arg-type]
    if options.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        facts = {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)


if __name__ == "__main__":
    main()
