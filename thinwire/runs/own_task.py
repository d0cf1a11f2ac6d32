"""Tasks of one's own: a `Task` or a function, named by a reference (`my_task.py:task`) or given as an object of Python.

A function returns a `Task`, or a `Source`, which is then partitioned and gets a model as a dataset does. Its parameters
`seed` and `data_dir` are filled if it has them; all others are options: `--set task.rows=100`. It is called with torch
seeded by the seed of the run, so that seeds give different initial weights, the same on every machine.

>>> from torch import nn
>>> from thinwire.data.task import pool_clients
>>> def letters(rows: int = 4):
...     return Task(nn.Linear(2, 2), *pool_clients([(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.long))]))
>>> kind = task_name(letters)
>>> kind.startswith("own:letters-"), len(make_own(kind, {"rows": 6}, Key(0)).train)
(True, 6)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.core.key import Key
from thinwire.core.reference import failure, load_reference, short_name, source_file
from thinwire.core.text import unfit_for_a_name, visible
from thinwire.data.examples import Source
from thinwire.data.fingerprint import fingerprint
from thinwire.data.task import Task
from thinwire.errors import ConfigError, DataError
from thinwire.models.exact_init import seeded
from thinwire.runs.parts import arguments
from thinwire.runs.task_files import OWN, task_label
from thinwire.runs.toml import Table

OwnTask = Task | Source | Callable[..., Task | Source]
FILLED = ("seed", "data_dir")  # parameters of a function that are not options
LONGEST_NAME = 60  # bytes of the name of a task: the name of a run directory has it

_kept: dict[str, OwnTask] = {}  # tasks of this process, by kind


def task_name(on: str | OwnTask, name: str = "") -> str:
    """The name of a task, for `resolve`: a name or reference is returned as it is; an object is kept and gets one.

    Args:
        on: the name of a task, a reference, a file; or a `Task`, or a function of `seed` that returns one.
        name: the name in tables; by default that of the function.
    """
    if isinstance(on, str):
        return on
    label = name or str(getattr(on, "__name__", "task")).strip("<>")
    if why := unfit_for_a_name(label, LONGEST_NAME):
        raise ConfigError(
            f"the name {visible(repr(label), 80)} of a task cannot be used: {why}; write for example letters"
        )
    _check_object(on, label)
    made = on if isinstance(on, Task | Source) else call_own(on, label, {}, Key(0), None)
    kind = f"{OWN}{label}-{fingerprint(made)[:8]}"
    _kept[kind] = on
    return kind


def own_options(kind: str) -> list[str]:
    """The options of an own task: the parameters of its function, but for `seed` and `data_dir`."""
    found = _object(kind)
    return [] if isinstance(found, Task | Source) else [name for name in _parameters(found) if name not in FILLED]


def checked_options(kind: str, given: Table) -> Table:
    """Options converted to the types of the parameters of the function of an own task.

    The default of a parameter `clients` is stated too, for readers of the configuration.
    """
    found = _object(kind)
    if isinstance(found, Task | Source):
        return {}
    known = _parameters(found).get("clients")
    stated = {"clients": known.default} if known and isinstance(known.default, int) else {}
    return checked_arguments(found, {**stated, **given}, "task")


def checked_arguments(make: Callable[..., Any], options: Table, where: str) -> Table:
    """As `arguments`; of a user's function whose type hints cannot be read, types are not checked."""
    try:
        return arguments(make, options, where)
    except (NameError, TypeError, AttributeError):
        return dict(options)


def missing_argument(make: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """The first parameter without a default that is not given; "" if there is none."""
    needed = (name for name, one in _parameters(make).items() if one.default is inspect.Parameter.empty)
    return next((name for name in needed if name not in given), "")


def make_own(kind: str, options: Mapping[str, Any], key: Key, data_dir: Path | None = None) -> Task | Source:
    """The own task of a kind, made with options for a seed.

    Args:
        kind: a reference, or a name of `task_name`.
        options: arguments of its function.
        key: the root of all randomness, the key of the seed.
        data_dir: the folder of datasets.
    """
    found = _object(kind)
    if isinstance(found, Task | Source):
        return found
    file = "" if kind.startswith(OWN) or not inspect.ismethod(found) else kind.rpartition(":")[0]
    return call_own(found, task_label({"kind": kind}), options, key, data_dir, file)


def call_own(
    make: Callable[..., Any],
    label: str,
    options: Mapping[str, Any],
    key: Key,
    data_dir: Path | None,
    file: str = "",
) -> Task | Source:
    """The task that a function of one's own makes with options for a seed; an error of its code becomes one line.

    Args:
        make: the function.
        label: its name for readers.
        options: its arguments.
        key: the root of all randomness, the key of the seed.
        data_dir: the folder of datasets.
        file: the user's file, whose line an error names; by default that of the function.
    """
    filled = {"seed": key.value, "data_dir": data_dir}
    given = {**options, **{name: filled[name] for name in FILLED if name in _parameters(make)}}
    if name := missing_argument(make, given):
        raise ConfigError(f"{label} has a parameter {name!r} without a default; write --set task.{name}=VALUE")
    try:
        with seeded(key.fold("model")):
            made = make(**given)
    except DataError:  # it names the file or the row
        raise
    except Exception as error:
        raise failure(error, file or source_file(make)) from error
    if not isinstance(made, Task | Source):
        raise ConfigError(
            f"{label} returned an object of type {type(made).__name__}; a task function returns a thinwire.Task or a "
            "thinwire.data.Source"
        )
    return made


def _object(kind: str) -> OwnTask:
    """The Task, Source or function of a kind."""
    if kind.startswith(OWN):
        if kind not in _kept:
            raise ConfigError(
                f"the task {task_label({'kind': kind})!r} is an object of a Python script, which the command line does "
                "not have; run the script again"
            )
        return _kept[kind]
    with seeded(Key(0)):  # for a Task that is made when the file is imported
        found: OwnTask = load_reference(kind)
    _check_object(found, short_name(kind))
    return found


def _check_object(found: object, label: str) -> None:
    if not isinstance(found, Task | Source) and (not callable(found) or isinstance(found, nn.Module | torch.Tensor)):
        raise ConfigError(
            f"{label} is of type {type(found).__name__}; a task is a thinwire.Task, or a function that returns one"
        )


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a function or class."""
    star = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        known = inspect.signature(make).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {}
    return {name: one for name, one in known.items() if one.kind not in star}
