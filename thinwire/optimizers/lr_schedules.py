"""Learning-rate schedules over rounds: constant, exponential, multi-step, cosine, warm-up.

A schedule is a factor on the learning rate of an optimizer, a pure function of the version that the round starts from.
Server and clients compute it, nothing is sent, and a resumed run continues with the same values. Within a round the
learning rate is constant.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.optimizers.base import Optimizer

_LEAST = 1e-9  # not 0: SCAFFOLD divides by the learning rate


class LRSchedule(Protocol):
    """A factor on the learning rate, by round. Not a `Schedule`, which decides which blocks are synchronized."""

    constant: ClassVar[bool] = False  # True: the factor is 1 in every round

    @abstractmethod
    def factor(self, version: int) -> float:
        """Return the factor of the round that starts from this version (0 is the first); above 0."""
        ...


@register("lr_schedule", "constant")
@dataclass(frozen=True)
class ConstantLR(LRSchedule):
    """Use the same learning rate in every round.

    >>> ConstantLR().factor(7)
    1.0
    """

    constant = True

    def factor(self, version: int) -> float:
        """Return 1."""
        return 1.0


@register("lr_schedule", "exponential", paper="used by Hyeon-Woo et al., ICLR 2022")
@dataclass(frozen=True)
class ExponentialLR(LRSchedule):
    """Multiply the learning rate by a factor after every round (as `torch.optim.lr_scheduler.ExponentialLR`).

        factor = tau^t,    t = 0, 1, 2, ...

    Args:
        tau: the factor, above 0 and at most 1.

    >>> [ExponentialLR(tau=0.5).factor(t) for t in range(3)]
    [1.0, 0.5, 0.25]
    """

    tau: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1:
            raise ConfigError(f"tau must be above 0 and at most 1, not {self.tau}; write for example tau = 0.99")

    def factor(self, version: int) -> float:
        """Return tau^t."""
        return max(self.tau**version, _LEAST)


@register("lr_schedule", "multistep")
@dataclass(frozen=True)
class MultiStepLR(LRSchedule):
    """Multiply the learning rate by a factor at given rounds (as `torch.optim.lr_scheduler.MultiStepLR`).

        factor = by^(number of entries of `at` that are t or less)

    Args:
        at: numbers of rounds after which the learning rate decreases, in ascending order.
        by: the factor, above 0 and at most 1.

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
        """Return `by` to the power of the number of decreases so far."""
        return max(self.by ** sum(version >= at for at in self.at), _LEAST)


@register("lr_schedule", "cosine", paper="Loshchilov and Hutter, ICLR 2017")
@dataclass(frozen=True)
class CosineLR(LRSchedule):
    """Decrease the learning rate along half a cosine (as `torch.optim.lr_scheduler.CosineAnnealingLR`).

        factor = floor + (1 - floor) (1 + cos(pi t / rounds)) / 2

    Args:
        rounds: number of rounds of the decrease; afterwards the factor of the last of these rounds is kept.
        floor: the limit of the factor, from 0 to 1.

    >>> [round(CosineLR(rounds=4).factor(t), 3) for t in (0, 2, 3, 9)]
    [1.0, 0.5, 0.146, 0.146]
    """

    rounds: int = 100
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds of a cosine must be 1 or more, not {self.rounds}")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"floor must be from 0 to 1, a share of the learning rate, not {self.floor}")

    def factor(self, version: int) -> float:
        """Return the value of the cosine."""
        progress = min(version, self.rounds - 1) / self.rounds
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@register("lr_schedule", "warmup", paper="Goyal et al., 2017")
@dataclass(frozen=True)
class WarmupLR(LRSchedule):
    """Increase the learning rate linearly over the first rounds, times another schedule.

        factor = min(1, (t + 1) / rounds) * inner(t)

    Args:
        rounds: number of rounds until the full learning rate.
        inner: the other schedule; it starts in the first round, too.

    >>> [round(WarmupLR(4, inner=ExponentialLR(0.5)).factor(t), 4) for t in range(5)]
    [0.25, 0.25, 0.1875, 0.125, 0.0625]
    """

    rounds: int = 10
    inner: LRSchedule = ConstantLR()

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds of a warm-up must be 1 or more, not {self.rounds}")

    def factor(self, version: int) -> float:
        """Return the factor of the warm-up times that of `inner`."""
        return min(1.0, (version + 1) / self.rounds) * self.inner.factor(version)


def at_lr_schedule(optimizer: Optimizer, schedule: LRSchedule, version: int) -> Optimizer:
    """Return the optimizer with the learning rate of one round.

    >>> from thinwire.optimizers.sgd import SGD
    >>> at_lr_schedule(SGD(0.5), ExponentialLR(0.5), 2).lr
    0.125
    """
    factor = schedule.factor(version)
    if factor == 1.0:
        return optimizer
    changed: Optimizer = dataclasses.replace(optimizer, lr=optimizer.lr * factor)  # type: ignore[type-var]
    return changed
