"""The catalog: everything that has a name, one row each (`thinwire list`).

`methods`, `tasks` and `recipes` are presets, `parts` is every part of a method; the other lists are the kinds of the
registry.
"""

from __future__ import annotations

from typing import Any

from thinwire.core import plugins
from thinwire.core.registry import KINDS, Entry, entries, registered
from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.presets import presets

Row = dict[str, Any]

LISTS = (
    "methods",
    "tasks",
    "recipes",
    "parts",
    *sorted(kind.plural for kind in KINDS.values() if kind.name != "method"),
)


def catalog(what: str) -> list[Row]:
    """The rows of one list, each with a name, a line of text and a paper; models with their number of parameters.

    Args:
        what: one of `LISTS`.
    """
    if what == "methods":
        return _presets("methods", "method")
    if what == "tasks":
        return _presets("tasks", "dataset")
    if what == "recipes":
        return [{"name": one.name, "about": one.about, "paper": one.paper} for one in presets("recipes").values()]
    if what == "models":
        return _models()
    if what == "parts":
        return [
            {"name": entry.name, "kind": kind.name, "about": entry.doc, "paper": entry.paper}
            for kind in KINDS.values()
            if kind.slots
            for entry in entries(kind.name).values()
        ]
    for kind in KINDS.values():
        if kind.plural == what:
            return [_row(entry) for entry in entries(kind.name).values()]
    raise UnknownName("list", what, LISTS)


def _row(entry: Entry) -> Row:
    return {"name": entry.name, "about": entry.doc, "paper": entry.paper}


def _presets(what: Any, kind: str) -> list[Row]:
    """Our presets and what plugins registered; built-in parts are not imported, since that needs torch."""
    rows = {one.name: {"name": one.name, "about": one.about, "paper": one.paper} for one in presets(what).values()}
    plugins.load_installed()
    rows |= {entry.name: _row(entry) for entry in registered(kind) if entry.name not in rows}
    return [rows[name] for name in sorted(rows)]


def _models() -> list[Row]:
    import torch  # late: only this list needs it

    out = []
    for entry in entries("model").values():
        try:
            with torch.device("meta"):  # shapes only: nothing is allocated or initialized
                parameters = sum(p.numel() for p in entry.make().parameters())
        except (ConfigError, TypeError):  # it needs an extra that is not installed, or has required arguments
            parameters = None
        out.append({"name": entry.name, "parameters": parameters, "about": entry.doc, "paper": entry.paper})
    return out
