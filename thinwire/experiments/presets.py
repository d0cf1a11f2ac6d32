"""Named settings: one small file a method, a task, a published table. None needs torch to be listed.

A preset is a part of an experiment file, plus `about` (one line) and `paper`. `layer` puts several on top of each
other: a later value wins, and a part of another kind replaces the earlier one whole.

>>> layer({"a": {"kind": "x", "n": 1}}, {"a": {"kind": "y"}}), layer({"a": {"n": 1}}, {"a": {"m": 2}})
({'a': {'kind': 'y'}}, {'a': {'n': 1, 'm': 2}})
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

from thinwire.errors import UnknownName
from thinwire.experiments.toml import Table, loads

Kind = Literal["methods", "tasks", "repro"]


class Preset(NamedTuple):
    """A named part of an experiment."""

    name: str
    about: str
    paper: str
    table: Table


def presets(kind: Kind) -> dict[str, Preset]:
    """All presets of a kind, in alphabetical order."""
    return {name: _read(file) for name, file in _files(kind).items()}


def preset(kind: Kind, name: str) -> Preset:
    """The preset of that name, or an error that lists its neighbours."""
    known = _files(kind)
    if name not in known:
        hint = "; or name a file that ends in .toml" if kind == "methods" else ""
        raise UnknownName("table" if kind == "repro" else kind.removesuffix("s"), name, known, hint)
    return _read(known[name])


def papers() -> list[Table]:
    """The papers whose tables are made anew: what came out of each, and which tables cannot be made, and why."""
    file = _folder() / "papers.toml"
    found: list[Table] = loads(file.read_text("utf-8"), file.name)["papers"]
    return found


def tables() -> list[dict[str, str]]:
    """Every table that `thinwire repro` makes, and those that cannot be made, with the reason."""
    made = [{"name": one.name, "paper": one.paper, "about": one.about} for one in presets("repro").values()]
    return made + [
        {"name": "-", "paper": f"{paper['name']}, {table}", "about": f"not made: {why}"}
        for paper in papers()
        for table, why in paper.get("not_made", {}).items()
    ]


def _folder() -> Path:
    return Path(str(resources.files("thinwire"))).joinpath("presets")


def _files(kind: Kind) -> dict[str, Path]:
    return {file.stem: file for file in sorted((_folder() / kind).glob("*.toml"))}


def _read(file: Path) -> Preset:
    table = loads(file.read_text("utf-8"), f"preset {file.name}")
    return Preset(file.stem, table.pop("about"), table.pop("paper", ""), table)


def layer(under: Table, over: Table) -> Table:
    """One table on top of another."""
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            other = "kind" in value and "kind" in below and value["kind"] != below["kind"]
            out[key] = dict(value) if other else layer(below, value)
        else:
            out[key] = value
    return out
