"""Tables without training: the number of parameters of a weight or model in a space, and the rank of a weight."""

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
from thinwire.experiments.toml import Table as TomlTable


def count(row: TomlTable, what: str, options: TomlTable) -> int:
    """One cell of such a table.

    Args:
        row: a `space`, and the `shape` of a weight or a `model`.
        what: `numbers` (parameters), or the `rank` of a weight as a matrix of its first axis against the others.
        options: of the model, such as `classes`.

    >>> row = {"space": {"kind": "fedpara", "rank": 16}, "shape": [256, 256]}
    >>> count(row, "numbers", {}), count(row, "rank", {})
    (16384, 256)
    """
    if "shape" in row:
        base: Tree = {"layer.weight": Key(0).normal(*row["shape"])}
    else:
        kind, model_options = named(row["model"], "model")
        with torch.device("meta"):  # shapes only
            base = dict(lookup("model", kind).make(**model_options, **options).named_parameters())
    with torch.no_grad():
        space = build("space", row["space"], "space")
        basis = space.basis_from(base, Key(0), "cpu")
        coords = space.init(base, basis, Key(0))
        if what == "numbers":
            return Spec.of(coords).size
        exact = [{name: block.double() for name, block in tree.items()} for tree in (base, basis, coords)]
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


def counted_rows(content: TomlTable) -> list[list[str]]:
    """The rows of such a table: for each column our value, the published value, and their difference in percent."""
    rows = []
    for row in content["rows"]:
        cells: list[str] = [row["label"]]
        for i, column in enumerate(content["columns"]):
            ours, published = count(row, column["what"], column.get("options", {})), _published(row["published"], i)
            cells.append(f"{ours:,}")
            cells += [rounded(published), f"{100 * (ours / published - 1):+.1f}"] if published else ["-", "-"]
        rows.append(cells)
    return rows


def counted_heads(content: TomlTable) -> list[str]:
    """The column heads of these rows."""
    heads = [[f"our {column['name']}", "paper's", "difference %"] for column in content["columns"]]
    return ["", *(head for three in heads for head in three)]


def _published(values: Sequence[Any], i: int) -> float:
    """The published value of a column; 0 if the paper has none."""
    value = float(values[i]) if i < len(values) else 0.0
    return 0.0 if math.isnan(value) else value
