"""Named presets: methods from the registry; tasks and recipes from TOML files.

A preset is a part of an experiment file, with a line of text (`about`) and its paper; slots of a method are objects.

>>> preset("methods", "fedprox").table
{'method': {'correction': FedProx(mu=0.1)}}

Methods that fill different slots of `Method` can be joined by `+`. Where two fill one slot with different values:

    method.up, method.down     codecs are chained in the order of the names: topk+int8 quantizes the largest values
    method.client_opt          the first method that fills it wins: a learning rate is tuned for one method
    any other slot             is refused, in one line that names the slot and both methods

The catalog has everything with a name, one row each (`thinwire list`): `methods`, `tasks` and `recipes` are presets,
`parts` is every part of a method; the other lists are the kinds of the registry.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from thinwire.core import plugins
from thinwire.core.registry import KINDS, SLOTS, Entry, entries, name_of, registered
from thinwire.errors import ConfigError, IncompatibleParts, UnknownName
from thinwire.runs.toml import Table, loads

if TYPE_CHECKING:
    from thinwire.protocol.method import Method


Kind = Literal["methods", "tasks", "recipes"]


class Preset(NamedTuple):
    """A named part of an experiment.

    Args:
        name: the name on the command line.
        about: one sentence.
        paper: the paper that it is from.
        table: the values that it sets; of a method, the slots that it fills.
        on: the table in place of `table` on some tasks, by the name of the task.
    """

    name: str
    about: str
    paper: str
    table: Table
    on: Mapping[str, Table] = {}

    def on_task(self, task: str | None) -> Table:
        """The values that it sets on a task."""
        return self.on.get(task or "", self.table)


def presets(kind: Kind) -> dict[str, Preset]:
    """All presets of a kind, in alphabetical order."""
    return {name: _read(one) for name, one in _known(kind).items()}


def names(kind: Kind) -> frozenset[str]:
    """The names of all presets of a kind."""
    return frozenset(_known(kind))


def preset(kind: Kind, name: str) -> Preset:
    """The preset of that name, or an error that lists similar names."""
    if name not in (known := _known(kind)):
        if kind != "methods":
            raise UnknownName(kind.removesuffix("s"), name, known)
        near = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
        hint = ", ...; `thinwire list methods` prints all; or name a file that ends in .toml"
        raise UnknownName("method", name, near or ["fedavg"], hint)
    return _read(known[name])


def _known(kind: Kind) -> Mapping[str, Entry | Path]:
    """The registered methods, or the files of tasks or recipes, by name."""
    if kind == "methods":
        return entries("method")
    folder = Path(str(resources.files("thinwire"))) / "presets" / kind
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


_STATED = ("client_opt", "lr_schedule")


def filled(method: Method) -> Table:
    """The slots that a method fills: those that differ from `Method()`.

    `client_opt` and `lr_schedule` also count where they are given and equal the default: a task or a recipe sets them,
    too, and those of the method have priority.

    >>> from thinwire.protocol.method import Method
    >>> from thinwire.optimizers import SGD
    >>> filled(Method()), list(filled(Method(client_opt=SGD(0.1))))
    ({}, ['client_opt'])
    """
    default = type(method)()
    slots = {one.name: getattr(method, one.name) for one in dataclasses.fields(method)}
    return {
        slot: value
        for slot, value in slots.items()
        if (value is not getattr(default, slot) if slot in _STATED else value != getattr(default, slot))
    }


# the slots after whose parts a method is named; the others are settings of its training
_NAMING = ("space", "sketch", "schedule", "up", "mask", "aggregator", "server_opt", "correction", "penalty", "privacy")


def method_name(method: Method, model: Any = None) -> str:
    """A name for a method that was given as an object: the kinds of its parts where they are not those of FedAvg.

    Args:
        method: the method.
        model: the model that it trains; the adapters of one wrapped by peft are named first.

    >>> from thinwire.protocol.method import Method
    >>> from thinwire.spaces import LoRA
    >>> from thinwire.codecs import Quantize
    >>> method_name(Method()), method_name(Method(space=LoRA(rank=4), up=Quantize(4)))
    ('fedavg', 'lora+quantize')
    """
    default, kinds = type(method)(), [one.peft_type.value.lower() for one in getattr(model, "peft_config", {}).values()]
    for slot in _NAMING:
        part = getattr(method, slot)
        if type(part) is not type(getattr(default, slot)):
            kinds.append((name_of(SLOTS[slot], part) or type(part).__name__).rpartition(":")[2])
    return "+".join(dict.fromkeys(kinds)) or "fedavg"


def _read(source: Entry | Path) -> Preset:
    """The preset of a registered method, or of a file."""
    if isinstance(source, Path):
        table = copy.deepcopy(_loaded(source))
        return Preset(source.stem, table.pop("about"), table.pop("paper", ""), table)
    from thinwire.methods.fedavg import arguments_on_tasks

    on = {task: _table(source, arguments) for task, arguments in arguments_on_tasks(source.make).items()}
    return Preset(source.name, source.doc, source.paper, _table(source, {}), on)


def _table(entry: Entry, arguments: Mapping[str, Any]) -> Table:
    """The table that a registered method sets when it is called with these arguments."""
    from thinwire.protocol.method import Method

    try:
        inspect.signature(entry.make).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"method {entry.name!r}: {error}; give every argument a default") from error
    method = entry.make(**arguments)
    if not isinstance(method, Method):
        raise ConfigError(f"method {entry.name!r} must return a Method, not {method!r}")
    return {**entry.preset, "method": filled(method)}


@cache  # every run of a table looks up its task
def _loaded(file: Path) -> Table:
    return loads(file.read_text("utf-8"), f"preset {file.name}")


_CHAINED = ("method.up", "method.down")
_FIRST_WINS = ("method.client_opt",)


def named_methods(expression: str) -> list[Preset]:
    """The presets of an expression, for example `mapo+int8`, in its order."""
    names = [name.strip() for name in expression.split("+")]
    if len(names) > 1 and not all(names):
        raise ConfigError(f"{expression!r} has a + with no method on one side; write for example mapo+int8")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"{expression!r} names {name!r} twice; once is enough")
    return [preset("methods", name) for name in names]


def join(methods: Sequence[Preset], task: str | None = None) -> Table:
    """One table from several presets, with the values that they have on a task.

    Raises:
        IncompatibleParts: two methods fill the same slot.

    >>> join(named_methods("scaffold+int8"))["method"]["correction"]
    Scaffold()
    >>> join(named_methods("mapo+fedpara"))
    Traceback (most recent call last):
    thinwire.errors.IncompatibleParts: mapo+fedpara: 'mapo' and 'fedpara' both fill method.space; keep one of them
    """
    expression = "+".join(method.name for method in methods)
    filled: Table = {}  # by path, two levels deep: `rounds`, `method.space`, `local.batch`
    owners: dict[str, list[str]] = {}  # the methods that filled a slot
    for method in methods:
        for key, section in method.on_task(task).items():
            values = (
                {f"{key}.{name}": one for name, one in section.items()} if isinstance(section, dict) else {key: section}
            )
            for slot, value in values.items():
                before = owners.setdefault(slot, [])
                old = filled.get(slot, value)
                if old == value:
                    filled[slot] = value
                elif slot in _CHAINED:
                    filled[slot] = _chain(expression, slot, [*before, method.name], old, value)
                elif slot in _FIRST_WINS or (slot == "method.server_opt" and type(old) is type(value)):
                    continue  # the learning rates of the first method
                else:
                    raise IncompatibleParts(
                        f"{expression}: {before[0]!r} and {method.name!r} both fill {slot}; keep one of them"
                    )
                before.append(method.name)
    out: Table = {}
    for slot, value in filled.items():
        key, _, name = slot.partition(".")
        out.update({key: {**out.get(key, {}), name: value}} if name else {key: value})
    return out


def _chain(expression: str, slot: str, names: Sequence[str], first: Any, second: Any) -> Any:
    """Two codecs in sequence, or an error that names the order in which they can be chained."""
    from thinwire.codecs.chain import Chain  # late: it imports torch

    try:
        return Chain.of(first, second)
    except ConfigError as error:
        reason = f"do not chain: {error}"
        with suppress(ConfigError):
            Chain.of(second, first)
            others = [name for name in expression.split("+") if name not in names]
            reason = f"do not chain in this order; write {'+'.join([*others, names[-1], *names[:-1]])}"
        earlier = " and ".join(map(repr, names[:-1]))
        raise IncompatibleParts(f"{expression}: {earlier} and {names[-1]!r} both fill {slot} and {reason}") from error


Row = dict[str, Any]

LISTS = (
    "methods",
    "tasks",
    "recipes",
    "parts",
    *sorted(kind.plural for kind in KINDS.values() if kind.name != "method"),
)


def catalog(what: str) -> list[Row]:
    """The rows of one list, each with a name, a line of text and a paper.

    Args:
        what: one of `LISTS`.
    """
    if what == "tasks":  # built-in datasets without a preset are not imported, since that needs torch
        rows = {one.name: _row(one) for one in presets("tasks").values()}
        plugins.load_installed()
        rows |= {entry.name: _row(entry) for entry in registered("dataset") if entry.name not in rows}
        return [rows[name] for name in sorted(rows)]
    if what == "recipes":
        return [_row(one) for one in presets("recipes").values()]
    if what == "parts":
        return [
            {"name": entry.name, "kind": kind.name, **_row(entry)}
            for kind in KINDS.values()
            if kind.slots
            for entry in entries(kind.name).values()
        ]
    kinds = {kind.plural: name for name, kind in KINDS.items()}
    if what not in kinds:
        raise UnknownName("list", what, LISTS)
    return [_row(entry) for entry in entries(kinds[what]).values()]


def _row(one: Entry | Preset) -> Row:
    return {"name": one.name, "about": one.about if isinstance(one, Preset) else one.doc, "paper": one.paper}
