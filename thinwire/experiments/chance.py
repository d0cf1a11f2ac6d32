"""Chance accuracy on the test set of a run: the frequency of its most frequent class; for a regression, R2 = 0."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from thinwire.data.losses import is_regression
from thinwire.experiments.collapse import Chance

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.runtime.runner import Runner

FEWEST = 100  # examples for a meaningful accuracy


def chance_of(simulation: Runner) -> Chance | None:
    """The chance accuracy of a run; None without a test set of class labels, or with fewer than 100 examples.

    Of a regression it is the R2 of predicting the mean, which is 0.

    If clients keep a part of the model private, the public model alone is not used. Then it is the mean over clients of
    the chance accuracy on each client's validation examples, and None without those.
    """
    task, found = simulation.job.task, None
    if any(stage.sendable.size < stage.coords.size for stage in simulation.contract.stages):
        if (own := task.client_tests) is not None:
            labels = task.train.targets
            found = chance_of_clients([labels[own.client(i)] for i in range(len(own))])
    elif task.test is not None and is_regression(task.loss):
        found = Chance(0.0, len(task.test), 0, "r2")
    elif task.test is not None:
        found = chance_among(task.test.targets)
    return found if found is not None and found.examples >= FEWEST else None


def chance_among(labels: Tensor) -> Chance | None:
    """The chance accuracy for some labels; None if they are no classes, or all equal. Negative labels are ignored.

    >>> import torch
    >>> chance_among(torch.tensor([0, 1, 1, -100]))
    Chance(share=0.6666666666666666, examples=3, classes=2, metric='accuracy')
    """
    if labels.is_floating_point() or labels.is_complex():
        return None
    counts = Counter(labels[labels >= 0].flatten().tolist())
    if len(counts) < 2:
        return None
    return Chance(max(counts.values()) / counts.total(), counts.total(), len(counts))


def chance_of_clients(labels: list[Tensor]) -> Chance | None:
    """The mean over clients of the chance accuracy for each client's labels."""
    if not labels or labels[0].is_floating_point():
        return None
    counts = [Counter(own.flatten().tolist()) for own in labels]
    share = statistics.fmean(max(own.values()) / own.total() for own in counts)
    classes = len(set().union(*counts))
    return Chance(share, sum(own.total() for own in counts), classes, "client_accuracy") if share < 1 else None


def validation_chance(simulation: Runner) -> Chance | None:
    """The chance accuracy on the validation examples of clients: the best constant prediction, averaged over clients.

    If clients keep a part of the model private, each client has a constant prediction of its own. None without
    validation examples, or if their targets are no classes.
    """
    task = simulation.job.task
    if (own := task.client_tests) is None:
        return None
    labels = [task.train.targets[own.client(i)] for i in range(len(own)) if len(own.client(i))]
    private = any(stage.sendable.size < stage.coords.size for stage in simulation.contract.stages)
    return chance_of_clients(labels) if private else chance_over_clients(labels)


def chance_over_clients(labels: list[Tensor]) -> Chance | None:
    """The mean over clients of the accuracy of one constant prediction for all of them. Negative labels are ignored.

    >>> import torch
    >>> chance_over_clients([torch.tensor([0, 1]), torch.tensor([1, 1, 2, 2])])
    Chance(share=0.5, examples=6, classes=3, metric='client_accuracy')
    """
    if not labels or labels[0].is_floating_point() or labels[0].is_complex():
        return None
    counts = [Counter(own[own >= 0].flatten().tolist()) for own in labels]
    counts = [own for own in counts if own]
    classes = set().union(*counts)
    if len(classes) < 2:
        return None
    share = max(statistics.fmean(own[one] / own.total() for own in counts) for one in classes)
    return Chance(share, sum(own.total() for own in counts), len(classes), "client_accuracy")
