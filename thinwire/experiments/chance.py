"""What guessing gets on the test set of a run: the share of its most frequent class."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from thinwire.experiments.collapse import Chance

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.simulation.simulation import Simulation

FEWEST = 100  # examples that can tell


def chance_of(simulation: Simulation) -> Chance | None:
    """What guessing gets on the test set of a run; None where the test set cannot tell.

    Where clients keep a part of the model to themselves the public model is nobody's: then it is the mean over clients
    of the best constant answer on each client's own held-out examples, and None where none are held out. On fewer than
    a hundred examples an accuracy is luck as much as learning: None, too.
    """
    task, found = simulation.job.task, None
    if any(stage.sendable.size < stage.coords.size for stage in simulation.contract.stages):
        if (own := task.client_tests) is not None:
            labels = task.train.targets
            found = chance_at_home([labels[own.client(i)] for i in range(len(own))])
    elif task.test is not None:
        found = chance_among(task.test.targets)
    return found if found is not None and found.examples >= FEWEST else None


def chance_among(labels: Tensor) -> Chance | None:
    """The chance of a tensor of labels; None where they are no class numbers, or all alike. Negative ones do not count.

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


def chance_at_home(labels: list[Tensor]) -> Chance | None:
    """The mean over clients of the chance on each client's own labels."""
    if not labels or labels[0].is_floating_point():
        return None
    counts = [Counter(mine.flatten().tolist()) for mine in labels]
    share = statistics.fmean(max(mine.values()) / mine.total() for mine in counts)
    classes = len(set().union(*counts))
    return Chance(share, sum(mine.total() for mine in counts), classes, "client_accuracy") if share < 1 else None
