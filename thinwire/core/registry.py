"""The registry: a name for every part, so that a file can write `kind = "mapo"`.

A part is registered where it is defined, by one decorator. `KINDS` is the only list of kinds: configuration files, the
command line, `thinwire list` and the tests derive theirs from it. Parts of other packages: `plugins.py`. In place of a
name, `FILE.py:NAME` or `package.module:NAME` is the object itself (`reference.py`).

>>> @register("codec", "doctest-codec", doc="Only for this example.")
... class Example: ...
>>> lookup("codec", "doctest-codec").make is Example
True
>>> del _TABLE["codec"]["doctest-codec"]  # remove the example again

Rarely set fields of a part are left out of its `repr` and of its table while they have their default: the schema
of messages is a hash of `repr(method)`, and the digest of an experiment is a hash of its table, so a new field declared
with `rare(default)` changes neither of them where it is not used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from thinwire.core.reference import is_reference, load_reference
from thinwire.core.text import check_settings
from thinwire.errors import ConfigError, UnknownName

before_lookup: list[Callable[[], None]] = []  # called before names are looked up; `plugins` adds itself

T = TypeVar("T", bound=Callable[..., Any])
P = TypeVar("P")


@dataclass(frozen=True)
class Kind:
    """A kind of part.

    Args:
        name: as in `register(name, ...)`.
        module: the module whose import registers the built-in parts of this kind; imported on first use.
        plural: the name in `thinwire list`.
        contract: the address of the class that parts implement. A field with this type holds a part, which is a table
            in an experiment file.
        slots: the fields of `Method` that hold such a part.
    """

    name: str
    module: str
    plural: str
    contract: str = ""
    slots: tuple[str, ...] = ()

    def contract_type(self) -> Any:
        """The class at `contract`."""
        module, _, name = self.contract.rpartition(".")
        return getattr(importlib.import_module(module), name)


# The order of slots is their order in the configuration of a run.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("space", "thinwire.spaces", "spaces", "thinwire.spaces.base.Space", ("space",)),
        Kind("sketch", "thinwire.sketches", "sketches", "thinwire.sketches.base.Sketch", ("sketch",)),
        Kind("schedule", "thinwire.schedules", "schedules", "thinwire.schedules.base.Schedule", ("schedule",)),
        Kind("codec", "thinwire.codecs", "codecs", "thinwire.codecs.base.Codec", ("up", "down", "merge_codec")),
        Kind(
            "client_weight",
            "thinwire.aggregators",
            "client-weights",
            "thinwire.aggregators.base.ClientWeight",
            ("client_weight",),
        ),
        Kind(
            "aggregator",
            "thinwire.aggregators",
            "aggregators",
            "thinwire.aggregators.base.Aggregator",
            ("aggregator",),
        ),
        Kind(
            "optimizer",
            "thinwire.optimizers",
            "optimizers",
            "thinwire.optimizers.base.Optimizer",
            ("client_opt", "server_opt"),
        ),
        Kind(
            "lr_schedule",
            "thinwire.optimizers",
            "lr-schedules",
            "thinwire.optimizers.lr_schedules.LRSchedule",
            ("lr_schedule", "server_lr_schedule"),
        ),
        Kind(
            "correction",
            "thinwire.optimizers",
            "corrections",
            "thinwire.optimizers.base.Correction",
            ("correction",),
        ),
        Kind("penalty", "thinwire.optimizers", "penalties", "thinwire.optimizers.penalties.Penalty", ("penalty",)),
        Kind("privacy", "thinwire.privacy", "privacy", "thinwire.privacy.base.Privacy", ("privacy",)),
        Kind("mask", "thinwire.masks", "masks", "thinwire.masks.base.Mask", ("mask",)),
        Kind("attack", "thinwire.federation.attacks", "attacks"),
        Kind("partition", "thinwire.data", "partitions"),
        Kind("dataset", "thinwire.data", "datasets"),
        Kind("model", "thinwire.models", "models"),
        Kind("metric", "thinwire.metrics", "metrics"),
        Kind("method", "thinwire.methods", "methods"),
    )
}

# slot of Method -> kind of its part
SLOTS: dict[str, str] = {slot: kind.name for kind in KINDS.values() for slot in kind.slots}


@dataclass(frozen=True)
class Entry:
    """A registered part.

    Args:
        kind: its kind.
        name: its name.
        make: the class or function that makes it.
        doc: one line about it.
        paper: where it was published.
        preset: settings to use it with, as in an experiment file: for a dataset its clients, partition and model.
    """

    kind: str
    name: str
    make: Callable[..., Any]
    doc: str
    paper: str = ""
    preset: Mapping[str, Any] = field(default_factory=dict)


_TABLE: dict[str, dict[str, Entry]] = {}
_REFERENCES: dict[tuple[str, str], Entry] = {}  # entries of references, by kind and reference

PLUGIN_HINT = "; a part of your own is found after --import MODULE"


def register(
    kind: str, name: str, *, doc: str = "", paper: str = "", preset: Mapping[str, Any] | None = None
) -> Callable[[T], T]:
    """Name a class or function, so that experiment files and the command line find it.

    Args:
        kind: a key of `KINDS`.
        name: the name; one that is taken is refused.
        doc: one line about it; by default the first line of the docstring.
        paper: where it was published.
        preset: settings to use it with, as in an experiment file.
    """
    if kind not in KINDS:
        raise UnknownName("kind of part", kind, KINDS)

    def enter(make: T) -> T:
        if not _is_builtin(make):
            # so that a clash is found here, and not when the built-in part is registered
            importlib.import_module(KINDS[kind].module)
        table = _TABLE.setdefault(kind, {})
        if name in table and _address(table[name].make) != _address(make):  # equal: a module that is reloaded
            raise ValueError(
                f"{kind} {name!r} is already registered by {'.'.join(_address(table[name].make))}; choose another name"
            )
        line = doc or (make.__doc__ or "").strip().split("\n", 1)[0]
        table[name] = Entry(kind, name, make, line, paper, dict(preset or {}))
        return make

    return enter


def entries(kind: str) -> dict[str, Entry]:
    """All parts of a kind by name, in alphabetical order, those of installed plugins included."""
    if kind not in KINDS:
        raise UnknownName("kind of part", kind, KINDS)
    importlib.import_module(KINDS[kind].module)
    for hook in before_lookup:
        hook()
    return dict(sorted(_TABLE.get(kind, {}).items()))


def lookup(kind: str, name: str) -> Entry:
    """The part of that kind and name or reference, or an error that lists similar names."""
    if is_reference(name):
        return _by_reference(kind, name)
    table = entries(kind)
    if name not in table:
        raise UnknownName(kind, name, table, PLUGIN_HINT)
    return table[name]


def name_of(kind: str, part: object) -> str | None:
    """The registered name of a part's class, or the reference that it was looked up by; None if it has neither."""
    for name, entry in entries(kind).items():
        if entry.make is type(part):
            return name
    return next((at for (of, at), entry in _REFERENCES.items() if of == kind and entry.make is type(part)), None)


def registered(kind: str) -> list[Entry]:
    """The parts of a kind that are registered so far, without any import."""
    return list(_TABLE.get(kind, {}).values())


def foreign() -> set[tuple[str, str]]:
    """Kind and name of every registered part that is not built in."""
    return {
        (kind, name) for kind, table in _TABLE.items() for name, entry in table.items() if not _is_builtin(entry.make)
    }


def unregister(names: Iterable[tuple[str, str]]) -> None:
    """Remove parts by kind and name."""
    for kind, name in names:
        del _TABLE[kind][name]


def _by_reference(kind: str, reference: str) -> Entry:
    """The entry of an object that is named by a reference; its name is that of the object."""
    if (kind, reference) not in _REFERENCES:
        found = load_reference(reference)
        if not callable(found):
            raise ConfigError(f"{reference} is of type {type(found).__name__}; a {kind} is a class or a function")
        doc = (found.__doc__ or "").strip().split("\n", 1)[0]
        _REFERENCES[kind, reference] = Entry(kind, reference.rpartition(":")[2], found, doc)
    return _REFERENCES[kind, reference]


def _is_builtin(make: Callable[..., Any]) -> bool:
    return make.__module__.startswith("thinwire.")


def _address(make: Callable[..., Any]) -> tuple[str, str]:
    return make.__module__, make.__qualname__


@dataclass_transform(frozen_default=True)
def register_part(kind: str, name: str, *, paper: str = "", kw_only: bool = False) -> Callable[[type[P]], type[P]]:
    """Name a class whose instances are settings, and make it a frozen dataclass that checks them when it is made.

    Its `__post_init__` is called after `check_settings`; its `repr` leaves out `rare` fields.

    Args:
        kind: as for `register`.
        name: as for `register`.
        paper: as for `register`.
        kw_only: whether settings are given by name only.

    >>> @register_part("codec", "doctest-codec")
    ... class Coarse:
    ...     bits: int = 8
    >>> Coarse(), Coarse(0.5)
    Traceback (most recent call last):
    thinwire.errors.ConfigError: bits must be a whole number, not 0.5; write for example bits = 8
    >>> del _TABLE["codec"]["doctest-codec"]
    """

    def enter(part: type[P]) -> type[P]:
        own = getattr(part, "__post_init__", lambda self: None)

        def check(self: P) -> None:
            check_settings(self)
            own(self)

        part.__post_init__ = check  # type: ignore[attr-defined]
        part.__repr__ = short_repr  # type: ignore[method-assign, assignment]
        return register(kind, name, paper=paper)(dataclass(frozen=True, repr=False, kw_only=kw_only)(part))

    return enter


def rare(default: Any, *, in_repr: bool = False) -> Any:
    """A field of a part that is rarely set: it is left out of tables while it has its default, and of `repr`.

    Args:
        default: its default.
        in_repr: whether it is always in `repr`, as the schema of messages depends on it.
    """
    return field(default=default, metadata={"rare": True, "in repr": in_repr})


def is_left_out(part_field: Field[Any], value: Any) -> bool:
    """Whether a field of a part is rarely set and has its default.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Step:
    ...     size: float = 1.0
    ...     limit: float = rare(9.0)
    >>> [is_left_out(f, 9.0) for f in fields(Step)]
    [False, True]
    """
    return bool(part_field.metadata.get("rare")) and bool(value == part_field.default)


def short_repr(part: Any) -> str:
    """The `repr` of a dataclass without the fields that are left out.

    >>> from thinwire.optimizers.base import SGD
    >>> SGD(0.5), SGD(0.5, clip_norm=1.0)  # doctest: +NORMALIZE_WHITESPACE
    (SGD(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0),
     SGD(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0, clip_norm=1.0))
    """
    shown = ((f, getattr(part, f.name)) for f in fields(part) if f.repr)
    given = (f"{f.name}={one!r}" for f, one in shown if f.metadata.get("in repr") or not is_left_out(f, one))
    return f"{type(part).__qualname__}({', '.join(given)})"
