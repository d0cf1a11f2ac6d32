"""Message sizes in the pages of methods: of every preset in a round, and of federated LoRA by the number of clients.

    python -m papers sizes --docs docs        # write the tables into docs/methods; without --docs they are printed

The model of the presets is that of the digits (64-64-10, 4,810 weights). Sizes are those of `thinwire check PRESET --on
digits` if they do not depend on the values; otherwise those of the third round of `thinwire run PRESET --on digits`, as
means over its clients, marked by a tilde. Catch-up is not included.

The matrices of LoRA are those of query and value in 6 layers of width 384, as in MiniLM. Two rounds are run on random
examples, and the lengths of the messages of the second are counted; all clients take part in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import thinwire as tw
from benchmarks.page import write_part
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.check import check
from thinwire.runs.config import resolve
from thinwire.runs.presets import presets

HEAD = "| preset | trained parameters | bytes up | bytes down | total, % of FedAvg |\n|---|---|---|---|---|"


class Cost(NamedTuple):
    """Trained parameters, upload and download of a client in a round; exact or measured."""

    trained: int
    up: int
    down: int
    exact: bool


@cache
def cost(name: str, measure: bool = True) -> Cost | None:
    """The cost of a preset; None if it depends on the values and `measure` is False."""
    experiment = resolve(name, "digits", {"engine.backend": "vmap"})
    facts = check(experiment)
    up, down, trained = facts["bytes_up_per_client"], facts["bytes_down_per_client"], facts["trainable"]
    if not facts["lengths_depend_on_values"]:
        return Cost(trained, up, down, True)
    if not measure:
        return None
    federation = make_simulation(experiment.engine, build_job(experiment))
    state = federation.start()
    for _ in range(3):
        state, third = federation.round(state)
    return Cost(trained, round(third.bytes_up / third.clients), round(third.bytes_down / third.clients), False)


def line(name: str, found: Cost, plain: Cost) -> str:
    """The row of a preset."""
    about = "" if found.exact else "~ "
    share = (found.up + found.down) / (plain.up + plain.down)
    return f"| `{name}` | {found.trained:,} | {about}{found.up:,} | {about}{found.down:,} | {100 * share:.1f} % |"


def described(page: str) -> list[str]:
    """The presets in the headings of a page."""
    heads = re.findall(r"^#{2,3} .*$", page, re.M)
    known = presets("methods")
    return [name for head in heads for name in re.findall(r"`([a-z0-9-]+)`", head) if name in known]


def table(names: Sequence[str]) -> str:
    """The table of some presets."""
    plain = cost("fedavg")
    assert plain
    return "\n".join([HEAD, *(line(name, found, plain) for name in names if (found := cost(name)))])


CLIENTS = (1, 2, 5, 10, 20)
LAYERS, WIDTH = 12, 384
METHODS = {
    "fedavg": tw.methods.fedavg(),
    "lora": tw.methods.lora(rank=16),
    "ffa-lora": tw.methods.ffa_lora(rank=16),
    "fed-sb": tw.methods.fed_sb(rank=64),
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


def lora_table() -> str:
    """Bytes of a client in a round of federated LoRA, by the number of clients of the round."""
    head = " | ".join(f"down, {m} client{'s' * (m > 1)}" for m in CLIENTS)
    lines = [f"| preset | rank | up | {head} |", "|---" * (3 + len(CLIENTS)) + "|"]
    for name, method in METHODS.items():
        found = [lengths(method, clients) for clients in CLIENTS]
        rank = getattr(method.space, "rank", "")
        downs = " | ".join(f"{down:,}" for _, down in found)
        lines.append(f"| `{name}` | {rank} | {found[0][0]:,} | {downs} |")
    return "\n".join(lines)


def sizes(docs: Path | None = None) -> Iterator[str]:
    """The tables; with a documentation folder they are also written."""
    command = "python -m papers sizes --docs docs"
    for page in sorted(((docs or Path("docs")) / "methods").glob("*.md")):
        if names := described(page.read_text()):
            text = table(names)
            yield f"{page.stem}\n\n{text}\n"
            if docs:
                write_part(page, "costs", text, command)
    text = lora_table()
    yield text
    if docs:
        write_part(docs / "methods" / "lora.md", "exact-lora", text, command)
