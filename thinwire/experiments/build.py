"""Build the job of an experiment: load the dataset, partition it into clients, make the model."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import nn

from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.data.examples import AugmentedImages, Examples, Images, Source
from thinwire.data.losses import loss_by_name
from thinwire.data.make_task import client_names
from thinwire.data.partitions.base import Assignment
from thinwire.data.scaling import estimate, image_values, schema_of, standardized, unpack_scale
from thinwire.data.task import Exchange, Task, validation_fraction
from thinwire.errors import ConfigError
from thinwire.experiments.experiment import Experiment, TaskChoice
from thinwire.metrics import metrics_by_name
from thinwire.models.exact_init import exact_init
from thinwire.runtime.job import Job

MOST_BY_DEFAULT = 10  # clients of a round, and of a dataset without users, where nothing states them


def build_job(experiment: Experiment, data_dir: Path | None = None) -> Job:
    """The job of an experiment; reads the dataset."""
    task = build_task(experiment.task, Key(experiment.seed), data_dir)
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
    )


def build_task(choice: TaskChoice, key: Key, data_dir: Path | None = None) -> Task:
    """Dataset, clients and initial weights; all three depend only on the seed."""
    source: Source = lookup("dataset", choice.kind).make(data_dir, **dict(choice.options))
    users = None if source.users is None else source.users.numpy()
    labels = source.train.targets
    if labels.dim() != 1:
        labels = labels.reshape(len(labels), -1)[:, 0]
    clients = choice.partition.assign(labels.numpy(), choice.clients, key.fold("split"), users)
    if choice.participating_clients:
        clients = clients.first(choice.participating_clients)
    validation = None
    if choice.validation_fraction:
        clients, validation = validation_fraction(clients, choice.validation_fraction, key.fold("hold-out"))
    model = build_model(choice, source, key)
    train, test, before = prepared(choice, source, clients)
    return Task(
        model,
        train,
        clients,
        test,
        validation,
        loss_by_name(source.loss),
        source.note,
        before,
        metrics_by_name(source.metrics),
        source.objective,
        source.class_names,
        client_names(source, clients),
    )


def prepared(choice: TaskChoice, source: Source, clients: Assignment) -> tuple[Examples, Examples, Exchange]:
    """Training and test examples with the scale and the augmentation of the task, and the messages that this took."""
    train, test, before = source.train, source.test, Exchange()
    if choice.scale != "unit":
        values = image_values(train)
        if values is None or image_values(test) is None:
            raise ConfigError(f"{choice.kind} has no images; write task.scale = 'unit'")
        mean, std = source.mean, source.std
        if choice.scale == "estimated":
            scale, before = estimate(choice.kind, values, clients)
            mean, std = unpack_scale(scale, schema_of(choice.kind, values.shape[1]))
        elif not len(mean) == len(std) == values.shape[1]:
            raise ConfigError(
                f"task.scale = 'standard' needs {values.shape[1]} values of mean and std from the dataset, and "
                f"{choice.kind} states {len(mean)} and {len(std)}; write task.scale = 'estimated'"
            )
        train, test = (standardized(part, mean, std) for part in (train, test))
    if choice.augment == "none":
        return train, test, before
    if not isinstance(train, Images):
        raise ConfigError(f"{choice.kind} has no images stored as bytes; write task.augment = 'none'")
    return AugmentedImages(train), test, before


def build_model(choice: TaskChoice, source: Source, key: Key) -> nn.Module:
    """The model, with one output for each class of the dataset, initialized from the seed."""
    make = lookup("model", choice.model.kind).make
    options = dict(choice.model.options)
    known = inspect.signature(make).parameters
    for name, value in source.model.items():
        if name in known:
            options.setdefault(name, value)
    if "classes" in known:
        given = options.setdefault("classes", source.classes)
        if given < source.classes:
            raise ConfigError(f"task.model.classes is {given}, but {choice.kind} has {source.classes} classes")
    # torch's generator is seeded too, for initializers that exact_init does not replace
    with torch.random.fork_rng(devices=[]), exact_init(key.fold("model")):
        torch.manual_seed(key.fold("model").value)
        model: nn.Module = make(**options)
    return model
