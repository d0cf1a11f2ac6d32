"""Attacks of malicious clients, for simulations: what some clients send in place of their update.

    [attack]
    kind = "sign-flip"
    fraction = 0.2          # of all clients; who attacks is drawn from the seed, once for the run

An attacker takes part as any other client: its message is well formed and as long as the others', its weight is its
number of examples, and the update that it trained is replaced before it is encoded. Attacks that use the updates of
others know those of all honest clients of the round, which is the most that attackers could know (on a GPU whose memory
does not hold the cohort, those of the clients that are trained with them). Buffers are sent as they are.

x is the update that a client trained; H are the honest clients of the round, of mean m and standard deviation s by
coordinate.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.text import NonNegativeFloat, PositiveFloat, ProperShare, check_settings
from thinwire.data.examples import Examples, Relabeled
from thinwire.data.task import Task
from thinwire.errors import ConfigError
from thinwire.protocol.client import Group, Update

_MAX_VALUE = torch.finfo(torch.float32).max  # a message with a value that is not finite would be refused


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack by a fraction of all clients.

    Args:
        fraction: of the clients, above 0 and below 1.
    """

    fraction: ProperShare = 0.2

    knows_others: ClassVar[bool] = False
    """Whether attackers use the updates of the honest clients; then the cohort must be trained in one group."""

    changes_labels: ClassVar[bool] = False
    """Whether attackers train on other labels than their own."""

    def __post_init__(self) -> None:
        check_settings(self, "attack.")

    def attackers(self, key: Key, clients: int) -> frozenset[int]:
        """The attacking clients, drawn from the key of the run; at least one.

        >>> len(SignFlip(fraction=0.2).attackers(Key(0), 20))
        4
        """
        count = min(clients, max(1, round(self.fraction * clients)))
        return frozenset(map(int, key.fold("attackers").choice(clients, count)))

    def labels(self, targets: Tensor, classes: int) -> Tensor:
        """The targets on which attackers train; by default their own."""
        return targets

    @abstractmethod
    def updates(self, own: Tensor, honest: Tensor, key: Key) -> Tensor:
        """What attackers send.

        Args:
            own: (attackers, values) the updates that they trained.
            honest: (honest clients, values) those of the others in the round.
            key: of the round.
        """


@register("attack", "sign-flip", paper="Li et al., AAAI 2019")
@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Send the negative of the own update, enlarged:  - factor x.

    >>> SignFlip(factor=10.0).updates(torch.ones(1, 2), torch.ones(3, 2), Key(0)).tolist()
    [[-10.0, -10.0]]
    """

    factor: PositiveFloat = 10.0

    def updates(self, own: Tensor, honest: Tensor, key: Key) -> Tensor:
        """Return the negated updates."""
        return own * -self.factor


@register("attack", "scaling", paper="Bagdasaryan et al., AISTATS 2020")
@dataclass(frozen=True, kw_only=True)
class Scaling(Attack):
    """Send the own update, enlarged:  factor x.

    >>> Scaling(factor=3.0).updates(torch.ones(1, 2), torch.ones(3, 2), Key(0)).tolist()
    [[3.0, 3.0]]
    """

    factor: PositiveFloat = 10.0

    def updates(self, own: Tensor, honest: Tensor, key: Key) -> Tensor:
        """Return the enlarged updates."""
        return own * self.factor


@register("attack", "noise", paper="Blanchard et al., NeurIPS 2017")
@dataclass(frozen=True, kw_only=True)
class Noise(Attack):
    """Send Gaussian noise with the norm of the own update times a factor:  factor |x| / sqrt(n) g.

    >>> sent = Noise(factor=2.0).updates(torch.ones(1, 10_000), torch.ones(3, 10_000), Key(0))
    >>> round(float(sent.norm() / 100), 1)
    2.0
    """

    factor: PositiveFloat = 10.0

    def updates(self, own: Tensor, honest: Tensor, key: Key) -> Tensor:
        """Return noise."""
        drawn = key.fold("noise").normal(*own.shape, device=own.device)
        lengths: Tensor = torch.linalg.vector_norm(own, dim=1, keepdim=True)
        return drawn * lengths * (self.factor / math.sqrt(max(1, own.shape[1])))


@register("attack", "label-flip", paper="Fang et al., USENIX Security 2020")
@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Train on wrong labels, classes - 1 - y, and send the update as it is.

    >>> LabelFlip().labels(torch.tensor([0, 9]), 10).tolist()
    [9, 0]
    """

    changes_labels = True

    def labels(self, targets: Tensor, classes: int) -> Tensor:
        """Return the labels in reverse order."""
        return classes - 1 - targets

    def updates(self, own: Tensor, honest: Tensor, key: Key) -> Tensor:
        """Return the updates as they are."""
        return own


@register("attack", "inner-product", paper="Xie et al., UAI 2020")
@dataclass(frozen=True, kw_only=True)
class InnerProduct(Attack):
    """Inner-product manipulation: all attackers send the negative mean of the honest updates:  - factor m.

    A small factor hides among the honest updates, and turns rules that select or sort clients against the mean.

    >>> InnerProduct(factor=0.5).updates(torch.zeros(1, 2), torch.full((3, 2), 4.0), Key(0)).tolist()
    [[-2.0, -2.0]]
    """

    factor: PositiveFloat = 0.5

    knows_others = True

    def updates(self, own: Tensor, honest: Tensor, key: Key) -> Tensor:
        """Return the negated mean of the honest updates."""
        return (honest.mean(0) * -self.factor).expand_as(own)


@register("attack", "a-little", paper="Baruch et al., NeurIPS 2019")
@dataclass(frozen=True, kw_only=True)
class ALittle(Attack):
    """A little is enough: all attackers send the same update, just inside the spread of the honest ones:  m - z s.

        z = Phi^-1((n - a - h) / (n - a)),    h = floor(n / 2 + 1) - a,    n clients of which a attack

    So many honest clients are farther from the mean that a majority seems to agree with the attackers.

    Args:
        z: the distance in standard deviations; 0 for the formula.

    >>> round(ALittle().distance(50, 12), 2)
    0.34
    """

    z: NonNegativeFloat = 0.0

    knows_others = True

    def distance(self, clients: int, attackers: int) -> float:
        """Return z for a round with so many clients."""
        honest = clients - attackers
        share = (honest - (clients // 2 + 1 - attackers)) / max(1, honest)
        return self.z or max(0.0, NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6)))

    def updates(self, own: Tensor, honest: Tensor, key: Key) -> Tensor:
        """Return the mean of the honest updates, moved by z standard deviations."""
        spread = honest.std(0) if len(honest) > 1 else torch.zeros_like(honest[0])
        return (honest.mean(0) - self.distance(len(own) + len(honest), len(own)) * spread).expand_as(own)


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


def replaced(attack: Attack, attackers: frozenset[int], group: Group, update: Update, key: Key) -> Update:
    """The updates of a group, with those of attackers replaced.

    Args:
        attack: what they send.
        attackers: the malicious clients of the run.
        group: the clients.
        update: the updates that they trained.
        key: of the round.
    """
    bad = torch.tensor([client in attackers for client in group.clients])
    if not bad.any() or (attack.knows_others and bad.all()):  # nothing to imitate
        return update
    blocks = {name: block.reshape(len(bad), -1) for name, block in update.code.items()}
    rows = torch.cat([block.float() for block in blocks.values()], 1)
    sent = attack.updates(rows[bad], rows[~bad], key).clamp(-_MAX_VALUE, _MAX_VALUE)
    code = dict(update.code)
    sizes = [block.shape[1] for block in blocks.values()]
    for (name, block), part in zip(blocks.items(), torch.split(sent, sizes, 1), strict=True):
        changed = block.clone()
        changed[bad] = part.to(block.dtype)
        code[name] = changed.view(update.code[name].shape)
    return update._replace(code=code)
