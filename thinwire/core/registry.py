"""Names for parts, so that a text file can say `kind = "mapo"`.

One decorator, one table. A part is registered where it is defined; the table fills when the module is imported.

>>> @register("codec", "doctest-codec", doc="Only for this example.")
... class Example: ...
>>> lookup("codec", "doctest-codec").make is Example
True
>>> del _TABLE["codec"]["doctest-codec"]     # leave no trace of the example
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from thinwire.errors import UnknownName

T = TypeVar("T", bound=Callable[..., Any])

# Importing these modules fills the table of each kind. Only names: nothing is imported until somebody asks.
HOMES: dict[str, tuple[str, ...]] = {
    "space": ("thinwire.spaces",),
    "sketch": ("thinwire.sketches",),
    "schedule": ("thinwire.schedules",),
    "codec": ("thinwire.codecs",),
    "optimizer": ("thinwire.optimizers",),
    "correction": ("thinwire.optimizers",),
    "penalty": ("thinwire.optimizers",),
    "lr_schedule": ("thinwire.optimizers",),
    "privacy": ("thinwire.privacy",),
    "client_weight": ("thinwire.aggregators",),
    "mask": ("thinwire.masks",),
    "aggregator": ("thinwire.aggregators",),
    "partition": ("thinwire.data",),
    "task": ("thinwire.data",),
    "model": ("thinwire.models",),
    "method": ("thinwire.methods",),
}


@dataclass(frozen=True)
class Entry:
    """One registered part: its kind and name, what makes it, one line about it, and where it was published."""

    kind: str
    name: str
    make: Callable[..., Any]
    doc: str
    paper: str = ""
    preset: Mapping[str, Any] = field(default_factory=dict)  # settings to use it with, as in an experiment file


_TABLE: dict[str, dict[str, Entry]] = {}


def register(
    kind: str, name: str, *, doc: str = "", paper: str = "", preset: Mapping[str, Any] | None = None
) -> Callable[[T], T]:
    """Give a class or function a name under which configuration files find it.

    `doc` defaults to the first line of the docstring. Registering a name twice is an error: it would hide a part.
    """

    def enter(make: T) -> T:
        table = _TABLE.setdefault(kind, {})
        if name in table and _address(table[name].make) != _address(make):  # the same again: a reloaded module
            raise ValueError(f"{kind} {name!r} is already registered by {table[name].make!r}")
        line = doc or (make.__doc__ or "").strip().split("\n", 1)[0]
        table[name] = Entry(kind, name, make, line, paper, dict(preset or {}))
        return make

    return enter


def entries(kind: str) -> dict[str, Entry]:
    """All parts of a kind by name, in alphabetical order; imports the modules that define them."""
    if kind not in HOMES:
        raise UnknownName("kind of part", kind, HOMES)
    for home in HOMES[kind]:
        importlib.import_module(home)
    return dict(sorted(_TABLE.get(kind, {}).items()))


def lookup(kind: str, name: str) -> Entry:
    """The part of that kind and name, or an error that lists its neighbours."""
    table = entries(kind)
    if name not in table:
        raise UnknownName(kind, name, table)
    return table[name]


def name_of(kind: str, part: object) -> str | None:
    """The registered name of a part's class, or None."""
    for name, entry in entries(kind).items():
        if entry.make is type(part):
            return name
    return None


def _address(make: Callable[..., Any]) -> tuple[str, str]:
    return make.__module__, make.__qualname__
