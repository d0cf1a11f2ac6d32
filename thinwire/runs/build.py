"""The task and the job of settings: load the dataset, partition it, make the model; or use a task of the user.

A task of the user is a `Task` or a function, named by a reference (`my_task.py:task`) or given as an object of Python.
A function returns a `Task`, or a `Source`, which is then partitioned and gets a model as a dataset does. Its parameters
`seed` and `data_dir` are filled if it has them; all others are options: `--set task.rows=100`. It is called with torch
seeded by the seed of the run, so that seeds give different initial weights, the same on every machine.

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
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from thinwire.core.key import Key
from thinwire.core.reference import (
    OWN,
    failure,
    is_reference,
    load_reference,
    own_kind,
    short_name,
    source_file,
    task_label,
)
from thinwire.core.registry import lookup
from thinwire.core.text import unfit_for_a_name, visible
from thinwire.data.examples import AugmentedImages, Examples, Images, Source
from thinwire.data.fingerprint import fingerprint
from thinwire.data.task import Task, assign_clients, scaled, task_of, validation_fraction
from thinwire.errors import ConfigError, DataError
from thinwire.federation.job import Job
from thinwire.federation.settings import Settings, TaskSettings
from thinwire.metrics import metrics_by_name
from thinwire.models.exact_init import seeded

MOST_BY_DEFAULT = 10  # clients of a round, and of a dataset without users, where nothing states them

_WIDTH = ("inputs", "features", "in_features")  # names of one parameter: the number of values of an example
OwnTask = Task | Source | Callable[..., Task | Source]
FILLED = ("seed", "data_dir")  # parameters of a function that are not options
LONGEST_NAME = 60  # bytes of the name of a task: the name of a run directory has it

_kept: WeakValueDictionary[str, Any] = WeakValueDictionary()  # tasks of this process, by kind; the caller holds them


def build_job(settings: Settings, data_dir: Path | None = None) -> Job:
    """The job of settings; reads the dataset."""
    return job_on(settings, build_task(settings.task, Key(settings.seed), data_dir))


def job_on(settings: Settings, task: Task) -> Job:
    """The job of settings on a task that is there already."""
    return Job(
        task,
        settings.method,
        settings.rounds,
        settings.cohort.size or min(MOST_BY_DEFAULT, len(task.clients)),
        settings.local,
        settings.seed,
        settings.eval.every,
        metrics_by_name(settings.eval.metrics),
        settings.eval.objective,
        settings.attack,
        settings.speed,
    )


def build_task(choice: TaskSettings, key: Key, data_dir: Path | None = None) -> Task:
    """Dataset, clients and initial weights; all three depend only on the seed."""
    source: Source | Task
    if own_kind(choice.kind):
        source = make_own(choice.kind, dict(choice.options), key, data_dir)
    else:
        source = lookup("dataset", choice.kind).make(data_dir=data_dir, **dict(choice.options))
    if isinstance(source, Task):
        return chosen_of(choice, source, key)
    # by default one client per user, or 10 with near-equal parts
    clients = assign_clients(source, choice.partition or lookup("partition", "auto").make(), choice.clients, key)
    if choice.participating_clients:
        clients = clients.first(choice.participating_clients)
    model = build_model(choice, source, key)
    train, test = prepared(choice, source)
    return task_of(replace(source, train=train, test=test), model, clients, choice.validation_fraction, key)


def chosen_of(choice: TaskSettings, task: Task, key: Key) -> Task:
    """A task of one's own, which has clients and a model, with validation examples and fewer clients if wanted."""
    own, clients, validation = len(task.clients), task.clients, task.client_tests
    plain = replace(choice, clients=0, partition=None, model=None, scale="unit", augment="none")
    if choice.clients not in (0, own) or replace(choice, clients=0) != plain:
        raise ConfigError(
            f"{choice.label} is a Task, which has a model and {own} clients of its own; leave task.clients, "
            "task.partition, task.model, task.scale and task.augment out"
        )
    if some := choice.participating_clients:
        clients, validation = clients.first(some), validation and validation.first(some)
    if choice.validation_fraction and validation is None:
        clients, validation = validation_fraction(clients, choice.validation_fraction, key.fold("hold-out"))
    return replace(task, clients=clients, client_tests=validation)


def prepared(choice: TaskSettings, source: Source) -> tuple[Examples, Examples]:
    """Training and test examples with the scale and the augmentation of the task."""
    source = scaled(source, choice.scale, choice.label)
    if choice.augment == "none":
        return source.train, source.test
    if not isinstance(source.train, Images):
        raise ConfigError(f"{choice.label} has no images stored as bytes; write task.augment = 'none'")
    return AugmentedImages(source.train), source.test


def build_model(choice: TaskSettings, source: Source, key: Key) -> nn.Module:
    """The model, with one output for each class of the dataset, initialized from the seed."""
    if choice.model is None:
        raise ConfigError(
            f"{choice.label} has no model; write --set task.model=mlp, or a class of your own, "
            "--set task.model=FILE.py:NAME"
        )
    kind, make = choice.model.kind, lookup("model", choice.model.kind).make
    if isinstance(make, nn.Module):  # a reference to a module that is built already; training copies it
        return make
    stated = {"classes": source.classes, **dict(source.model)}
    width = next((stated[name] for name in _WIDTH if name in stated), None)
    if is_reference(kind) and width is not None:
        stated = {**dict.fromkeys(_WIDTH, width), **stated}
    known = inspect.signature(make).parameters
    options = {**{name: value for name, value in stated.items() if name in known}, **dict(choice.model.options)}
    if (given := options.get("classes", source.classes)) < source.classes:
        raise ConfigError(f"task.model.classes is {given}, but {choice.label} has {source.classes} classes")
    if is_reference(kind) and (name := _missing(make, options)):
        raise ConfigError(
            f"{short_name(kind)} has a parameter {name!r} without a default, and {choice.label} does not state it; "
            f"write --set task.model.{name}=VALUE"
        )
    try:
        with seeded(key.fold("model")):
            model: nn.Module = make(**options)
    except Exception as error:
        if is_reference(kind):
            raise failure(error, source_file(make)) from error
        raise
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{short_name(kind)} returned an object of type {type(model).__name__}, not a torch nn.Module"
        )
    return model


# -- tasks of the user ------------------------------------------------------------------------------------------------


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
    kind = f"{OWN}{label}-{fingerprint(call_own(on, label, {}, Key(0), None))[:8]}"
    _kept[kind] = on
    return kind


def task_options(kind: str) -> tuple[Any, dict[str, Any]]:
    """The loader of a dataset, or the function or object of an own task, and its options with their defaults."""
    own = own_kind(kind)
    make = _object(kind) if own else lookup("dataset", kind).make
    filled = FILLED if own else ("data_dir",)
    known = {} if isinstance(make, Task | Source) else _parameters(make)
    return make, {name: one.default for name, one in known.items() if name not in filled}


def _missing(make: Callable[..., Any], given: Mapping[str, Any]) -> str:
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
    file = "" if kind.startswith(OWN) or not inspect.ismethod(found) else kind.rpartition(":")[0]
    return call_own(found, task_label({"kind": kind}), options, key, data_dir, file)


def call_own(
    make: OwnTask,
    label: str,
    options: Mapping[str, Any],
    key: Key,
    data_dir: Path | None,
    file: str = "",
) -> Task | Source:
    """The task that a function of one's own makes with options for a seed; an error of its code becomes one line.

    Args:
        make: the function; a task is returned as it is.
        label: its name for readers.
        options: its arguments.
        key: the root of all randomness, the key of the seed.
        data_dir: the folder of datasets.
        file: the user's file, whose line an error names; by default that of the function.
    """
    if isinstance(make, Task | Source):
        return make
    filled = {"seed": key.value, "data_dir": data_dir}
    given = {**options, **{name: filled[name] for name in FILLED if name in _parameters(make)}}
    if name := _missing(make, given):
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
        found: OwnTask = _kept[kind]
        return found
    with seeded(Key(0)):  # for a Task that is made when the file is imported
        found = load_reference(kind)
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
