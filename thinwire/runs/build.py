"""Build the job of an experiment: load the dataset, partition it, make the model; or make the task of one's own."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from torch import nn

from thinwire.core.key import Key
from thinwire.core.reference import failure, is_reference, short_name, source_file
from thinwire.core.registry import lookup
from thinwire.data.examples import AugmentedImages, Examples, Images, Source, image_values, standardized
from thinwire.data.losses import loss_by_name
from thinwire.data.task import Task, assign_clients, client_names, validation_fraction
from thinwire.errors import ConfigError
from thinwire.federation.job import Job
from thinwire.metrics import metrics_by_name
from thinwire.models.exact_init import seeded
from thinwire.runs.experiment import Experiment, TaskChoice
from thinwire.runs.own_task import make_own, missing_argument
from thinwire.runs.task_files import own_kind

MOST_BY_DEFAULT = 10  # clients of a round, and of a dataset without users, where nothing states them

_WIDTH = ("inputs", "features", "in_features")  # names of one parameter: the number of values of an example


def build_job(experiment: Experiment, data_dir: Path | None = None) -> Job:
    """The job of an experiment; reads the dataset."""
    return job_on(experiment, build_task(experiment.task, Key(experiment.seed), data_dir))


def job_on(experiment: Experiment, task: Task) -> Job:
    """The job of an experiment on a task that is there already."""
    return Job(
        task,
        experiment.method,
        experiment.rounds,
        experiment.cohort.size or min(MOST_BY_DEFAULT, len(task.clients)),
        experiment.local,
        experiment.seed,
        experiment.eval.every,
        metrics_by_name(experiment.eval.metrics),
        experiment.eval.objective,
        experiment.attack,
        experiment.speed,
    )


def build_task(choice: TaskChoice, key: Key, data_dir: Path | None = None) -> Task:
    """Dataset, clients and initial weights; all three depend only on the seed."""
    source: Source | Task
    if own_kind(choice.kind):
        source = make_own(choice.kind, dict(choice.options), key, data_dir)
    else:
        source = lookup("dataset", choice.kind).make(data_dir, **dict(choice.options))
    if isinstance(source, Task):
        return chosen_of(choice, source, key)
    # by default one client per user, or 10 with near-equal parts
    clients = assign_clients(source, choice.partition or lookup("partition", "auto").make(), choice.clients, key)
    if choice.participating_clients:
        clients = clients.first(choice.participating_clients)
    validation = None
    if choice.validation_fraction:
        clients, validation = validation_fraction(clients, choice.validation_fraction, key.fold("hold-out"))
    model = build_model(choice, source, key)
    train, test = prepared(choice, source)
    return Task(
        model,
        train,
        clients,
        test,
        validation,
        loss_by_name(source.loss),
        source.note,
        metrics_by_name(source.metrics),
        source.objective,
        source.class_names,
        client_names(source, clients),
    )


def chosen_of(choice: TaskChoice, task: Task, key: Key) -> Task:
    """A task of one's own, which has clients and a model, with validation examples and fewer clients if wanted."""
    own = len(task.clients)
    stated = [name for name in ("partition", "model") if getattr(choice, name) is not None]
    stated += ["scale"] * (choice.scale != "unit") + ["augment"] * (choice.augment != "none")
    if choice.clients not in (0, own) or stated:
        raise ConfigError(
            f"{choice.label} is a Task, which has a model and {own} clients of its own; leave "
            f"task.{stated[0] if stated else 'clients'} out"
        )
    clients, validation = task.clients, task.client_tests
    if some := choice.participating_clients:
        if some > own:
            raise ConfigError(f"task.participating_clients must be 0 (all) or at most the {own} clients, not {some}")
        clients, validation = clients.first(some), validation.first(some) if validation is not None else None
    if choice.validation_fraction and validation is None:
        clients, validation = validation_fraction(clients, choice.validation_fraction, key.fold("hold-out"))
    return replace(task, clients=clients, client_tests=validation)


def prepared(choice: TaskChoice, source: Source) -> tuple[Examples, Examples]:
    """Training and test examples with the scale and the augmentation of the task."""
    train, test = source.train, source.test
    if choice.scale != "unit":
        values = image_values(train)
        if values is None or image_values(test) is None:
            raise ConfigError(f"{choice.label} has no images; write task.scale = 'unit'")
        mean, std = source.mean, source.std
        if not len(mean) == len(std) == values.shape[1]:
            raise ConfigError(
                f"task.scale = 'standard' needs {values.shape[1]} values of mean and std from the dataset, and "
                f"{choice.label} states {len(mean)} and {len(std)}; write task.scale = 'unit'"
            )
        train, test = (standardized(part, mean, std) for part in (train, test))
    if choice.augment == "none":
        return train, test
    if not isinstance(train, Images):
        raise ConfigError(f"{choice.label} has no images stored as bytes; write task.augment = 'none'")
    return AugmentedImages(train), test


def build_model(choice: TaskChoice, source: Source, key: Key) -> nn.Module:
    """The model, with one output for each class of the dataset, initialized from the seed."""
    if choice.model is None:
        raise ConfigError(
            f"{choice.label} returns a Source, which has no model; write --set task.model=mlp, or a class of your own, "
            "--set task.model=FILE.py:NAME"
        )
    kind, make = choice.model.kind, lookup("model", choice.model.kind).make
    if isinstance(make, nn.Module):  # a reference to a module that is built already; training copies it
        return make
    options = dict(choice.model.options)
    own = is_reference(kind)
    known = inspect.signature(make).parameters
    stated = dict(source.model)
    width = next((stated[name] for name in _WIDTH if name in stated), None)
    if own and width is not None:
        stated = {**dict.fromkeys(_WIDTH, width), **stated}
    for name, value in stated.items():
        if name in known:
            options.setdefault(name, value)
    if "classes" in known:
        given = options.setdefault("classes", source.classes)
        if given < source.classes:
            raise ConfigError(f"task.model.classes is {given}, but {choice.label} has {source.classes} classes")
    if own and (name := missing_argument(make, options)):
        raise ConfigError(
            f"{short_name(kind)} has a parameter {name!r} without a default, and {choice.label} does not state it; "
            f"write --set task.model.{name}=VALUE"
        )
    try:
        with seeded(key.fold("model")):
            model: nn.Module = make(**options)
    except Exception as error:
        if own:
            raise failure(error, source_file(make)) from error
        raise
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{short_name(kind)} returned an object of type {type(model).__name__}, not a torch nn.Module"
        )
    return model
