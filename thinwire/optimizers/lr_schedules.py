"""Learning rates that change from round to round: warm-up, decay, steps, cosine.

A rate is a factor on the step size of an optimiser, a pure function of the version that the round starts from: every
machine knows it, nothing is sent, a resumed run goes on with the same. Within a round it does not change.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Protocol

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.optimizers.base import Optimizer

_LEAST = 1e-9  # a rate of 0 is no rate: SCAFFOLD divides by it


class LRSchedule(Protocol):
    """A factor on the step size, by round."""

    def factor(self, version: int) -> float:
        """The factor of the round that starts from this version (0 is the first); above 0."""
        ...


@register("lr_schedule", "constant")
@dataclass(frozen=True)
class ConstantLR(LRSchedule):
    """The same step size in every round."""

    def factor(self, version: int) -> float:
        """One."""
        return 1.0


@register("lr_schedule", "exponential", paper="used by Hyeon-Woo et al., ICLR 2022")
@dataclass(frozen=True)
class ExponentialLR(LRSchedule):
    """A step size that shrinks by the same factor in every round (as `torch.optim.lr_scheduler.ExponentialLR`).

        factor = tau^t,    t = 0, 1, 2, ...

    >>> [ExponentialLR(tau=0.5).factor(t) for t in range(3)]
    [1.0, 0.5, 0.25]
    """

    tau: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1:
            raise ConfigError(f"tau must be above 0 and at most 1, not {self.tau}; write for example tau = 0.99")

    def factor(self, version: int) -> float:
        """Tau to the power of the round."""
        return max(self.tau**version, _LEAST)


@register("lr_schedule", "multistep")
@dataclass(frozen=True)
class MultiStepLR(LRSchedule):
    """A step size that falls at a few rounds (as `torch.optim.lr_scheduler.MultiStepLR`).

        factor = by^(number of entries of `at` that are t or less)

    Args:
        at: after how many rounds it falls, ascending.
        by: by which factor.

    >>> [round(MultiStepLR(at=(1, 3), by=0.1).factor(t), 6) for t in range(4)]
    [1.0, 0.1, 0.1, 0.01]
    """

    at: tuple[int, ...] = (50, 75)
    by: float = 0.1

    def __post_init__(self) -> None:
        if not self.at or self.at[0] < 1 or list(self.at) != sorted(set(self.at)):
            raise ConfigError(f"at must be rounds in ascending order, for example at = [50, 75], not {list(self.at)}")
        if not 0 < self.by <= 1:
            raise ConfigError(f"by must be above 0 and at most 1, not {self.by}; write for example by = 0.1")

    def factor(self, version: int) -> float:
        """As many falls as there were."""
        return max(self.by ** sum(version >= at for at in self.at), _LEAST)


@register("lr_schedule", "cosine", paper="Loshchilov and Hutter, ICLR 2017")
@dataclass(frozen=True)
class CosineLR(LRSchedule):
    """A step size that falls along half a cosine (as `torch.optim.lr_scheduler.CosineAnnealingLR`).

        factor = floor + (1 - floor) (1 + cos(pi t / rounds)) / 2

    Args:
        rounds: how long the fall takes; afterwards the rate stays as it was in the last of these rounds.
        floor: the share of the step size that it falls towards.

    >>> [round(CosineLR(rounds=4).factor(t), 3) for t in (0, 2, 3, 9)]
    [1.0, 0.5, 0.146, 0.146]
    """

    rounds: int = 100
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds of a cosine must be 1 or more, not {self.rounds}")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"floor must be from 0 to 1, a share of the step size, not {self.floor}")

    def factor(self, version: int) -> float:
        """Where the cosine is."""
        share = min(version, self.rounds - 1) / self.rounds
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


@register("lr_schedule", "warmup", paper="Goyal et al., 2017")
@dataclass(frozen=True)
class WarmupLR(LRSchedule):
    """A step size that grows to its full size over the first rounds, and then does something else.

        factor = min(1, (t + 1) / rounds) * then(t)

    Args:
        rounds: in which round (from 1) it is full.
        inner: another rate, counted from the first round as well.

    >>> [round(WarmupLR(4, inner=ExponentialLR(0.5)).factor(t), 4) for t in range(5)]
    [0.25, 0.25, 0.1875, 0.125, 0.0625]
    """

    rounds: int = 10
    inner: LRSchedule = ConstantLR()

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds of a warm-up must be 1 or more, not {self.rounds}")

    def factor(self, version: int) -> float:
        """The part of the way, times the other rate."""
        return min(1.0, (version + 1) / self.rounds) * self.inner.factor(version)


def at_lr_schedule(optimiser: Optimizer, rate: LRSchedule, version: int) -> Optimizer:
    """The optimiser with the step size of one round.

    >>> from thinwire.optimizers.sgd import SGD
    >>> at_lr_schedule(SGD(0.5), ExponentialLR(0.5), 2).lr
    0.125
    """
    factor = rate.factor(version)
    if factor == 1.0:
        return optimiser
    changed: Optimizer = dataclasses.replace(optimiser, lr=optimiser.lr * factor)  # type: ignore[type-var]
    return changed
