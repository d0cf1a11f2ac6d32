"""Everything that has a name, one line each."""

from __future__ import annotations

from typing import Any, Literal, get_args

from thinwire.errors import UnknownName
from thinwire.experiments.presets import presets

What = Literal["methods", "tasks", "models", "partitions", "parts"]
_PARTS = (
    *("space", "sketch", "schedule", "codec", "optimizer", "correction", "penalty", "lr_schedule"),
    *("privacy", "client_weight", "mask", "aggregator"),
)


def catalog(what: str) -> list[dict[str, Any]]:
    """The names of one sort, each with one line of text and its paper; models with their number of parameters."""
    if what in ("methods", "tasks"):
        known = presets(what)  # type: ignore[arg-type]
        return [{"name": p.name, "about": p.about, "paper": p.paper} for p in known.values()]
    if what == "models":
        return _models()
    # late: the registry's modules need torch, the presets above do not
    from thinwire.core.registry import entries

    if what == "partitions":
        return [{"name": e.name, "about": e.doc, "paper": e.paper} for e in entries("partition").values()]
    if what == "parts":
        return [
            {"name": e.name, "kind": kind, "about": e.doc, "paper": e.paper}
            for kind in _PARTS
            for e in entries(kind).values()
        ]
    raise UnknownName("list", what, get_args(What))


def _models() -> list[dict[str, Any]]:
    import torch

    from thinwire.core.registry import entries
    from thinwire.errors import ConfigError

    out = []
    for entry in entries("model").values():
        try:
            with torch.device("meta"):  # shapes only: nothing is allocated or initialised
                parameters = sum(p.numel() for p in entry.make().parameters())
        except ConfigError:  # needs an extra that is not installed
            parameters = None
        out.append({"name": entry.name, "parameters": parameters, "about": entry.doc, "paper": entry.paper})
    return out
