"""Tables that need no training: how many numbers make a weight or a model in a space, and of which rank a weight is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.experiments.parts import build, named
from thinwire.experiments.toml import Table


def count(row: Table, what: str, options: Table) -> int:
    """One cell.

    Args:
        row: a `space`, and the `shape` of a weight or a `model`.
        what: `numbers`, or the `rank` of a weight as a matrix of its first axis against the others.
        options: of the model, such as `classes`.

    >>> row = {"space": {"kind": "fedpara", "rank": 16}, "shape": [256, 256]}
    >>> count(row, "numbers", {}), count(row, "rank", {})
    (16384, 256)
    """
    if "shape" in row:
        base: Tree = {"layer.weight": Key(0).normal(*row["shape"])}
    else:
        kind, own = named(row["model"], "model")
        with torch.device("meta"):  # shapes without numbers
            base = dict(lookup("model", kind).make(**own, **options).named_parameters())
    with torch.no_grad():
        space = build("space", row["space"], "space")
        frame = space.basis(Spec.of(base), Key(0), "cpu")
        coords = space.init(base, frame, Key(0))
        if what == "numbers":
            return Spec.of(coords).size
        exact = [{name: block.double() for name, block in tree.items()} for tree in (base, frame, coords)]
        weight = space.expand(*exact)["layer.weight"]
    return int(torch.linalg.matrix_rank(weight.flatten(1)))


def rounded(number: float) -> str:
    """A number as papers print it.

    >>> rounded(66_000), rounded(15_250_000), rounded(256)
    ('66 K', '15.25 M', '256')
    """
    for size, unit in ((1e6, " M"), (1e3, " K")):
        if number >= size:
            return f"{number / size:.10g}{unit}"
    return f"{number:g}"


def counted_rows(content: Table) -> list[list[str]]:
    """The rows of such a table: ours, the paper's, and how far apart they are in per cent, for each column."""
    out = []
    for row in content["rows"]:
        cells: list[str] = [row["label"]]
        for i, column in enumerate(content["columns"]):
            ours, printed = count(row, column["what"], column.get("options", {})), _printed(row["published"], i)
            cells.append(f"{ours:,}")
            cells += [rounded(printed), f"{100 * (ours / printed - 1):+.1f}"] if printed else ["-", "-"]
        out.append(cells)
    return out


def counted_heads(content: Table) -> list[str]:
    """The heads of these rows."""
    heads = [[f"our {c['name']}", "paper's", "difference %"] for c in content["columns"]]
    return ["", *(head for three in heads for head in three)]


def _printed(published: Sequence[Any], i: int) -> float:
    value = float(published[i]) if i < len(published) else 0.0
    return 0.0 if math.isnan(value) else value
