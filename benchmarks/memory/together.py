"""GPU memory of training several clients of a pretrained model together, compared with one client.

    python benchmarks/memory/together.py --clients 10 --data sst2
    python benchmarks/memory/together.py --backend graph --precision bf16
    python benchmarks/memory/together.py --table memory.json       write earlier output to docs/benchmarks.md

One round of LoRA (rank 16 on query and value, full head) on MiniLM with the standard engine, in a separate process for
each number of clients: `held` is the memory before the round (the model, the data), `peak` the maximum during it. The
activations of a client are measured as twice the difference between a full and a half batch. The rest of the peak is
the backbone, and for each client its factors, their gradients and the optimizer state.

Prints one JSON object. Limit: peak of n clients <= 2 x (peak of one client - its activations) + n x activations.
`--merged` materializes W0 + B A for each client instead, to show the savings of unmerged adapters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from thinwire.core.text import human_bytes
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve

FACTOR = 2.0


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one round of some clients; returns the bytes before it and at its peak."""
    settings = {
        "task.data": options.data,
        "task.length": options.length,
        "task.clients": 16,
        "task.partition": {"kind": "iid"},
        "cohort.size": options.clients,
        "local.batch": options.batch,
        "local.steps": 2,
        "rounds": 1,
        "method.space": {
            "kind": "lora",
            "rank": 16,
            "alpha": 16.0,
            "target_modules": ["*query.weight", "*value.weight"],
            "modules_to_save": ["*classifier.*"],
        },
        "method.client_opt": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
    }
    experiment = resolve("lora", on="text-classification", overrides=settings)
    job = build_job(experiment)
    job = replace(job, task=replace(job.task, test=None))
    simulation = make_simulation(Engine("cuda", options.backend, precision=options.precision), job)
    if options.merged:
        vars(simulation.contract)["training_space"] = simulation.contract.method.space
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    state, record = simulation.round(simulation.start())
    torch.cuda.synchronize()
    return {
        "clients": options.clients,
        "batch": options.batch,
        "held": held,
        "peak": torch.cuda.max_memory_allocated(),
        "backend": state.backend,
        "because": state.backend_reason,
        "loss": record.loss,
        "weights": 4 * simulation.model.parameters(),
        "trainable": simulation.contract.coords.size,
    }


def page(files: list[Path]) -> str:
    """A table of several measurements."""
    head = ["device", "backend", "clients", "peak", "one client", "its activations", "without activations", "limit", ""]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for file in files:
        found = json.loads(file.read_text())
        many = found["many"]
        sizes = (many["peak"], found["one"]["peak"], found["activations_of_one"])
        cells = [f"{found['device']}, torch {found['torch']}", many["backend"], str(many["clients"])]
        cells += [*map(human_bytes, sizes), f"{found['ratio_without_activations']:.2f} x one client's"]
        cells += [human_bytes(found["limit"]), "pass" if found["passed"] else "**FAIL**"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--data", default="20newsgroups")
    parser.add_argument("--backend", default="vmap")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--merged", action="store_true", help="materialize W0 + B A for each client")
    parser.add_argument("--one", action="store_true", help="run one measurement in this process and print it")
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="FILE", help="do not measure; write the section of the page"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    if options.table:
        command = "python benchmarks/memory/together.py > memory.json, then --table memory.json"
        write_part(options.docs / "benchmarks.md", "memory", page(options.table), command)
        return
    if options.one:
        print(json.dumps(measure(options)))
        return

    def measure_in_process(clients: int, batch: int, *more: str) -> dict[str, float]:
        words = ["--one", "--clients", str(clients), "--batch", str(batch), "--length", str(options.length)]
        words += ["--data", options.data, "--backend", options.backend, "--precision", options.precision, *more]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    merged = ("--merged",) if options.merged else ()
    many, one, half = (
        measure_in_process(clients, batch, *merged)
        for clients, batch in (
            (options.clients, options.batch),
            (1, options.batch),
            (1, options.batch // 2),
        )
    )
    activations = 2 * (one["peak"] - half["peak"])
    alone = one["peak"] - activations
    limit = FACTOR * alone + options.clients * activations
    out = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "merged": options.merged,
        "many": many,
        "one": one,
        "half_batch": half,
        "activations_of_one": activations,
        "one_without_activations": alone,
        "many_without_activations": many["peak"] - options.clients * activations,
        "ratio_without_activations": (many["peak"] - options.clients * activations) / alone,
        "ratio_of_peaks": many["peak"] / one["peak"],
        "limit": limit,
        "passed": many["peak"] <= limit,
    }
    print(json.dumps(out, indent=1))
    raise SystemExit(0 if out["passed"] else 1)


if __name__ == "__main__":
    main()
