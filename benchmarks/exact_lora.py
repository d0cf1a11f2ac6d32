"""Bytes of a client in a round of federated LoRA, by the number of clients of the round.

    python benchmarks/exact_lora.py                  # print the table
    python benchmarks/exact_lora.py --docs docs      # write it into docs/methods/lora.md

The matrices are those of query and value in 6 layers of width 384, as in MiniLM, without anything else. Two rounds are
run on random examples, and the lengths of the messages of the second are counted; all clients take part in both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import thinwire as tw

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.page import write_part

COMMAND = "python benchmarks/exact_lora.py --docs docs"
CLIENTS = (1, 2, 5, 10, 20)
LAYERS, WIDTH = 12, 384
METHODS = {
    "fedavg": tw.methods.fedavg(),
    "lora": tw.methods.lora(rank=16),
    "ffa-lora": tw.methods.ffa_lora(rank=16),
    "fed-sb": tw.methods.fed_sb(rank=64),
    "flexlora": tw.methods.flexlora(rank=16),
    "fedex-lora": tw.methods.fedex_lora(rank=16),
    "flora-stack": tw.methods.flora_stack(rank=16),
}


def lengths(method: tw.Method, clients: int, width: int = WIDTH) -> tuple[int, int]:
    """The length of an upload and of a download in the second round.

    >>> lengths(tw.methods.fed_sb(rank=2), clients=2, width=8)
    (203, 208)
    """
    key, sent = tw.Key(0), dict[str, int]()
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    data = [(key.fold("x", i).normal(2, width), key.fold("y", i).integers(2, width)) for i in range(clients)]

    def count(number: int, direction: str, client: int, message: bytes) -> None:
        if number == 2:
            sent[direction] = max(sent.get(direction, 0), len(message))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tw.simulate(model, data, method, rounds=2, local=tw.Local(steps=1), backend="loop", on_message=count)
    return sent["up"], sent["down"]


def table() -> str:
    """The table of all methods."""
    head = " | ".join(f"down, {m} client{'s' * (m > 1)}" for m in CLIENTS)
    lines = [f"| preset | rank | up | {head} |", "|---" * (3 + len(CLIENTS)) + "|"]
    for name, method in METHODS.items():
        found = [lengths(method, clients) for clients in CLIENTS]
        rank = getattr(method.space, "rank", "")
        downs = " | ".join(f"{down:,}" for _, down in found)
        lines.append(f"| `{name}` | {rank} | {found[0][0]:,} | {downs} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or with --docs write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the documentation folder")
    docs = parser.parse_args().docs
    write_part(docs / "methods" / "lora.md", "exact-lora", table(), COMMAND) if docs else print(table())


if __name__ == "__main__":
    main()
