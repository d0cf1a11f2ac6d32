"""The training examples of a task under an attack: those of attackers have the labels that the attack states."""

from __future__ import annotations

import torch

from thinwire.core.key import Key
from thinwire.data.examples import Examples, Relabeled
from thinwire.data.task import Task
from thinwire.errors import ConfigError
from thinwire.federation.attacks import Attack


def poisoned(task: Task, attack: Attack, key: Key) -> Examples:
    """The training examples with the labels on which attackers train; validation examples keep their own.

    Args:
        task: the task.
        attack: the attack.
        key: of the run.
    """
    if not attack.changes_labels:
        return task.train
    targets = task.train.targets
    if targets.is_floating_point() or targets.dim() != 1:
        raise ConfigError("attack.kind = 'label-flip' needs class labels, which this task does not have; use sign-flip")
    attackers = sorted(attack.attackers(key, len(task.clients)))
    theirs = torch.cat([torch.as_tensor(task.clients.client(i)) for i in attackers])
    changed = targets.clone()
    changed[theirs] = attack.labels(targets[theirs], int(targets.max()) + 1)
    return Relabeled(task.train, changed)
