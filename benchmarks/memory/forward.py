"""Memory of a client that trains without a backward pass (DeComFL), against SGD, on a CPU.

    python benchmarks/memory/forward.py --docs docs

A perceptron of 32 hidden layers of 64 units, one client, one local step on all of its examples. Each measurement is a
process of its own: resident memory at its peak during one round, above that before the round. SGD keeps the inputs of
all layers for the backward pass, DeComFL those of one layer at a time. Linux only: /proc tells the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import thinwire as tw
from benchmarks.memory.language_model import resident
from benchmarks.page import write_part
from thinwire.core.text import human_bytes

LAYERS, WIDTH, EXAMPLES = 32, 64, (4096, 16384, 65536)
METHODS = {"fedavg": tw.methods.fedavg, "decomfl": lambda: tw.methods.decomfl(p=10, directions=10)}
COMMAND = "python benchmarks/memory/forward.py --docs docs"


def measure(method: str, examples: int) -> int:
    """Bytes by which the resident memory grows at most during the second of two rounds."""
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
    data = (torch.randn(examples, WIDTH), torch.randint(10, (examples,)))
    before = 0

    def begin(record: tw.RoundRecord) -> None:
        nonlocal before
        if record.round == 1:  # the first round allocates what is kept, such as the buffers of threads
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here

    local = tw.Local(batch=examples, steps=1)
    tw.simulate(model, [data], METHODS[method](), rounds=2, local=local, backend="loop", on_round=begin, progress=False)
    return resident("VmHWM") - before


def in_process(method: str, examples: int) -> int:
    """A measurement in a new process, whose allocator returns what is freed to the system."""
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = [sys.executable, __file__, "--one", method, str(examples)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True, env=own).stdout)


def table(found: dict[str, list[int]]) -> str:
    """Peaks by method and number of examples, beside the inputs of one layer and of all."""
    layer = [4 * examples * WIDTH for examples in EXAMPLES]
    rows = [["inputs of one layer", *layer], ["inputs of all hidden layers", *(LAYERS * size for size in layer)]]
    rows += [[f"`{method}`", *peaks] for method, peaks in found.items()]
    lines = [["peak of a round", *(f"{examples:,} examples" for examples in EXAMPLES)], ["---"] * (1 + len(EXAMPLES))]
    lines += [[str(row[0]), *(human_bytes(int(size)) for size in row[1:])] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure, print, and with --docs write the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "EXAMPLES"), help="one measurement in this process")
    parser.add_argument("--docs", type=Path, help="the documentation folder; its methods/evofed.md gets the table")
    options = parser.parse_args()
    if options.one:
        print(measure(options.one[0], int(options.one[1])))
        return
    found = {method: [in_process(method, examples) for examples in EXAMPLES] for method in METHODS}
    print(json.dumps(found))
    print(table(found))
    if options.docs:
        write_part(options.docs / "methods/evofed.md", "forward-memory", table(found), COMMAND)


if __name__ == "__main__":
    main()
