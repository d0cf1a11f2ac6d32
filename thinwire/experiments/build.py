"""Build the job of an experiment: load the dataset, partition it into clients, make the model."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.data.examples import AugmentedImages, Examples, Images, Source
from thinwire.data.task import Task, validation_fraction
from thinwire.errors import ConfigError
from thinwire.experiments.experiment import Experiment, TaskChoice
from thinwire.metrics import metrics_by_name
from thinwire.models.exact_init import exact_init
from thinwire.runtime.job import Job


def build_job(experiment: Experiment, data_dir: Path | None = None) -> Job:
    """The job of an experiment; reads the dataset."""
    key = Key(experiment.seed)
    return Job(
        build_task(experiment.task, key, data_dir),
        experiment.method,
        experiment.rounds,
        experiment.cohort.size,
        experiment.local,
        experiment.seed,
        experiment.eval.every,
        metrics_by_name(experiment.eval.metrics),
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
    train, test = prepared(choice, source)
    return Task(model, train, clients, test, validation, note=source.note)


def prepared(choice: TaskChoice, source: Source) -> tuple[Examples, Examples]:
    """Training and test examples with the scale and the augmentation of the task."""
    train, test = source.train, source.test
    if choice.scale == "unit" and choice.augment == "none":
        return train, test
    if not (isinstance(train, Images) and isinstance(test, Images)):
        raise ConfigError(
            f"{choice.kind} has no images stored as bytes; write task.scale = 'unit' and task.augment = 'none'"
        )
    if choice.scale == "standard":
        mean, std = train.measured()
        train, test = (replace(part, mean=mean, std=std) for part in (train, test))
    return AugmentedImages(train) if choice.augment == "shift-flip" else train, test


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
