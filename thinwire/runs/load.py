"""Tables to values: experiments, methods and tasks from the contents of a file. Every key is checked."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from thinwire.core.registry import SLOTS, lookup
from thinwire.errors import ConfigError, UnknownName
from thinwire.protocol.method import Asynchronous, Budget, Method, Stage
from thinwire.runs.experiment import SECTIONS, TOP, Experiment, ModelChoice, TaskChoice
from thinwire.runs.own_task import checked_arguments, checked_options, own_options
from thinwire.runs.parts import arguments, build, coerce, named
from thinwire.runs.plugins import read_imports
from thinwire.runs.task_files import own_kind
from thinwire.runs.toml import Table

DEFAULT_TASK = "digits"

# The fields of a method that hold no part. Method itself checks the values of strings.
PLAIN_FIELDS: dict[str, Any] = {
    "download": str,
    "upload": str,
    "drift_check": bool,
    "norm_bound": float,
    "budget": Budget,
    "evaluate": str,
    "ema_decay": float,
    "opt_lifetime": str,
    "opt_owner": str,
    "secure_aggregation": bool,
    "next_stage": Stage,
    "asynchronous": Asynchronous,
}
_TASK_KEYS = (
    *("kind", "clients", "partition", "model"),
    *("validation_fraction", "participating_clients", "scale", "augment"),
)


def from_table(table: Table) -> Experiment:
    """An experiment from the contents of a file that states name and task."""
    given = values_from(table)
    if "name" not in given:
        raise ConfigError('name is missing; write for example name = "my-run"')
    if "task" not in given:
        raise ConfigError("[task] is missing; `thinwire show fedavg` prints a complete experiment")
    return Experiment(**given)


def values_from(table: Table) -> dict[str, Any]:
    """The fields of `Experiment` that a table states; the others are left out."""
    known = [*TOP, "import", "fingerprint", "task", "method", "attack", *SECTIONS]
    for key in table:
        if key not in known:
            raise UnknownName("key", key, known)
    out: dict[str, Any] = {}
    if "import" in table:
        out["imports"] = read_imports(table["import"])  # first: the other keys may name parts of these modules
    out |= arguments(Experiment, {key: table[key] for key in (*TOP, "fingerprint") if key in table}, "the experiment")
    for key, make in SECTIONS.items():
        if key in table:
            out[key] = make(**arguments(make, section(table, key), key))
    if "task" in table:
        out["task"] = task_from(section(table, "task"))
    if "attack" in table:
        out["attack"] = build("attack", table["attack"], "attack")
    if "method" in table:
        out["method"] = method_from(section(table, "method"))
    return out


def method_from(table: Table) -> Method:
    """A method from its table.

    >>> method_from({"space": {"kind": "mapo", "k": 8}, "download": "full"}).space.k
    8
    """
    given: Table = {}
    for key, value in table.items():
        where = f"method.{key}"
        if key in SLOTS:
            given[key] = build(SLOTS[key], value, where)
        elif key in PLAIN_FIELDS:
            given[key] = coerce(value, PLAIN_FIELDS[key], where)
        else:
            raise UnknownName("key in method", key, [*SLOTS, *PLAIN_FIELDS])
    return Method(**given)


def task_from(table: Table) -> TaskChoice:
    """A task from its table; keys that are no setting of tasks are arguments of the dataset's loader.

    An own task may have arguments with the name of a setting: `task.clients` is then an argument of its function.
    """
    kind = coerce(table.get("kind", DEFAULT_TASK), str, "task.kind")
    own = own_kind(kind)
    loader = None if own else lookup("dataset", kind).make
    options = own_options(kind) if loader is None else [*inspect.signature(loader).parameters]
    options = [name for name in options if name != "data_dir"]
    for key in table:
        if key not in (*_TASK_KEYS, *options):
            raise UnknownName("key in task", key, (*_TASK_KEYS, *options))
    given = {key: table[key] for key in options if key in table}
    loading = checked_options(kind, given) if loader is None else arguments(loader, given, "task")
    if own:
        table = {key: value for key, value in table.items() if key not in options}
    elif "model" not in table:
        raise ConfigError("task.model is missing; `thinwire show fedavg` prints a complete experiment")
    return TaskChoice(
        kind,
        coerce(table.get("clients", 0), int, "task.clients"),
        build("partition", table["partition"], "task.partition") if "partition" in table else None,
        model_from(table["model"]) if "model" in table else None,
        coerce(table.get("validation_fraction", 0.0), float, "task.validation_fraction"),
        coerce(table.get("participating_clients", 0), int, "task.participating_clients"),
        coerce(table.get("scale", "unit"), str, "task.scale"),
        coerce(table.get("augment", "none"), str, "task.augment"),
        tuple(loading.items()),
    )


def model_from(value: Any) -> ModelChoice:
    """A model from its name or reference, or its table with options."""
    kind, options = named(value, "task.model")
    make = lookup("model", kind).make
    if isinstance(make, nn.Module) and options:
        raise ConfigError(f"task.model = {kind!r} is a module that is already built; write its class to set options")
    return ModelChoice(kind, tuple((checked_arguments(make, options, "task.model") if options else {}).items()))


def section(table: Table, key: str, under: str = "") -> Table:
    """A table within a table, empty where there is none; `under` is the path before it, for the error."""
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{under}{key} must be a table, [{under}{key}], not {found!r}")
    return found
