"""A task from a dataset, a model and a partition: the way from your data to `tw.run_task`.

>>> from torch import nn
>>> from thinwire.data import digits, make_task
>>> task = make_task(digits.digits(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), clients=5)
>>> len(task.clients), len(task.train), len(task.test)
(5, 1438, 359)
>>> make_task(digits.digits(), "mlp", partition="dirichlet", clients=3).model.head.out_features
10
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import nn

from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.data.examples import Examples, Source
from thinwire.data.losses import Loss, loss_by_name
from thinwire.data.partitions.base import Assignment, Partition
from thinwire.data.scaling import standardized
from thinwire.data.task import Task
from thinwire.data.task import validation_fraction as hold_out_validation
from thinwire.errors import ConfigError
from thinwire.metrics import metrics_by_name
from thinwire.metrics.base import Metric
from thinwire.models.exact_init import seeded

Model = nn.Module | Callable[..., nn.Module] | str


def make_task(
    source: Source,
    model: Model,
    *,
    partition: str | Partition = "iid",
    clients: int = 10,
    seed: int = 0,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    validation_fraction: float = 0.0,
    scale: Literal["unit", "standard"] = "unit",
) -> Task:
    """A task: the examples of a dataset, divided into clients, and a model with its initial weights.

    Args:
        source: the dataset, for example from `tw.data.from_table`.
        model: a module, which is used as it is; a function that makes one, called with those of its parameters that
            the dataset states (`classes`, and for example `inputs` or `channels`); or the name of a registered model.
        partition: the name of a partition (`thinwire list partitions`) or a `Partition`; `natural` makes one client of
            each user.
        clients: number of clients; 0 with `natural` or `auto` for all users.
        seed: of the partition, of the initial weights of a model that is made here, and of the validation examples.
        loss: the loss, or its name; by default that of the dataset.
        metrics: metrics besides loss and accuracy, by name; by default those of the dataset.
        validation_fraction: fraction of each client's examples that is held out to evaluate the client's model.
        scale: of images: `unit` for values from 0 to 1, `standard` for mean 0 and standard deviation 1.
    """
    key = Key(seed)
    rule = lookup("partition", partition).make() if isinstance(partition, str) else partition
    assignment = assign_clients(source, rule, clients, key)
    names = client_names(source, assignment)
    validation = None
    if validation_fraction:
        assignment, validation = hold_out_validation(assignment, validation_fraction, key.fold("hold-out"))
    train, test = _scaled(source, scale)
    chosen = source.metrics if metrics is None else metrics
    return Task(
        _module(model, source, key),
        train,
        assignment,
        test,
        validation,
        loss_by_name(source.loss) if loss is None else loss_by_name(loss) if isinstance(loss, str) else loss,
        source.note,
        metrics=chosen if isinstance(chosen, Mapping) else metrics_by_name(chosen),
        objective=source.objective,
        class_names=source.class_names,
        client_names=names,
    )


def assign_clients(source: Source, partition: Partition, clients: int, key: Key) -> Assignment:
    """The training examples of each client; of several targets, the first one counts as the label."""
    labels = source.train.targets if source.train.groups is None else source.train.groups
    if labels.dim() != 1:
        labels = labels.reshape(len(labels), -1)[:, 0]
    users = None if source.users is None else source.users.numpy()
    return partition.assign(labels.numpy(), clients, key.fold("split"), users)


def client_names(source: Source, clients: Assignment) -> tuple[str, ...]:
    """The name of each client where all its examples are of one user with a name; empty if one has none."""
    if source.users is None or not source.user_names or not clients.sizes().all():
        return ()
    users = source.users.numpy()[clients.order]
    first = users[clients.offsets[:-1]]
    if not np.array_equal(users, np.repeat(first, clients.sizes())):
        return ()
    return tuple(source.user_names[user] for user in first.tolist())


def fitting_options(
    make: Callable[..., Any], source: Source, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of a model, completed by what the dataset states: number of classes, inputs, channels, ..."""
    known = inspect.signature(make).parameters
    stated = {**source.model, "classes": source.classes}
    return {name: value for name, value in stated.items() if name in known} | dict(options or {})


def _module(model: Model, source: Source, key: Key) -> nn.Module:
    """The module that is given, or that a name or a function makes."""
    if isinstance(model, nn.Module):
        return model
    make = lookup("model", model).make if isinstance(model, str) else model
    if not callable(make):
        raise ConfigError(f"model must be a module, a function that makes one, or a name, not {type(model).__name__}")
    options = fitting_options(make, source)
    with seeded(key.fold("model")):
        made = make(**options)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"the function of the model returned {type(made).__name__}, expected a torch module")
    return made


def _scaled(source: Source, scale: str) -> tuple[Examples, Examples]:
    """Training and test examples in this scale."""
    if scale == "unit":
        return source.train, source.test
    if scale != "standard" or not source.mean:
        why = "the dataset states no mean and std" if scale == "standard" else f"{scale!r} is not unit or standard"
        raise ConfigError(f"scale: {why}; write scale='unit'")
    return standardized(source.train, source.mean, source.std), standardized(source.test, source.mean, source.std)
