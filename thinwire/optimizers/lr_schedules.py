"""Learning-rate schedules over rounds: constant, exponential, multi-step, cosine, warm-up.

A schedule is a factor on the learning rate of an optimizer, a pure function of the version that the round starts from.
Server and clients compute it, nothing is sent, and a resumed run continues with the same values. Within a round the
learning rate is constant.

A length is a number of rounds, or with `rounds = 0` a fraction of the run, which `over` replaces by a number: a run
that ends early (`target_accuracy`) has the learning rates of the run that was planned.

A learning-rate schedule that is halved at given versions: where a run went back to try a smaller rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NoReturn

from thinwire.core.registry import rare, register_part
from thinwire.core.text import NonNegativeInt, Probability, Share
from thinwire.errors import ConfigError

MIN_FACTOR = 1e-9  # not 0: SCAFFOLD divides by the learning rate


class LRSchedule(ABC):
    """A factor on the learning rate, by round. Not a `Schedule`, which decides which blocks are synchronized."""

    constant = False  # True: the factor is 1 in every round

    @abstractmethod
    def factor(self, version: int) -> float:
        """Return the factor of the round that starts from this version (0 is the first); above 0."""

    def over(self, rounds: int) -> LRSchedule:
        """Return the schedule of a run of that many rounds: fractions become numbers of rounds.

        Raises:
            ConfigError: if the schedule is longer than the run.
        """
        return self


@register_part("lr_schedule", "constant")
class ConstantLR(LRSchedule):
    """Use the same learning rate in every round.

    >>> ConstantLR().factor(7)
    1.0
    """

    constant = True

    def factor(self, version: int) -> float:
        """Return 1."""
        return 1.0


@register_part("lr_schedule", "exponential", paper="used by Hyeon-Woo et al., ICLR 2022")
class ExponentialLR(LRSchedule):
    """Multiply the learning rate by a factor after every round (as `torch.optim.lr_scheduler.ExponentialLR`).

        factor = tau^t,    t = 0, 1, 2, ...

    Args:
        tau: the factor, above 0 and at most 1.

    >>> [ExponentialLR(tau=0.5).factor(t) for t in range(3)]
    [1.0, 0.5, 0.25]
    """

    tau: Share = 0.99

    def factor(self, version: int) -> float:
        """Return tau^t."""
        return max(self.tau**version, MIN_FACTOR)


@register_part("lr_schedule", "multistep")
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
    by: Share = 0.1

    def __post_init__(self) -> None:
        if not self.at or self.at[0] < 1 or list(self.at) != sorted(set(self.at)):
            raise ConfigError(f"at must be rounds in ascending order, for example at = [50, 75], not {list(self.at)}")

    def over(self, rounds: int) -> MultiStepLR:
        """Return itself."""
        _check_fits(f"a multistep at {list(self.at)}", self.at[-1], rounds, "earlier ones")
        return self

    def factor(self, version: int) -> float:
        """Return `by` to the power of the number of decreases so far."""
        return max(self.by ** sum(version >= at for at in self.at), MIN_FACTOR)


@register_part("lr_schedule", "cosine", paper="Loshchilov and Hutter, ICLR 2017")
class CosineLR(LRSchedule):
    """Decrease the learning rate along half a cosine (as `torch.optim.lr_scheduler.CosineAnnealingLR`).

        factor = floor + (1 - floor) (1 + cos(pi t / rounds)) / 2

    Args:
        rounds: number of rounds of the decrease, at most those of the run; afterwards the factor of the last of these
            rounds is kept. 0: by `fraction`.
        floor: the limit of the factor, from 0 to 1.
        fraction: the decrease as a fraction of the run, above 0 and at most 1; used if `rounds` is 0.

    >>> [round(CosineLR(rounds=4).factor(t), 3) for t in (0, 2, 3, 9)]
    [1.0, 0.5, 0.146, 0.146]
    >>> CosineLR().over(80) == CosineLR(rounds=80)
    True
    """

    rounds: NonNegativeInt = 0
    floor: Probability = 0.0
    fraction: Share = rare(1.0)

    def over(self, rounds: int) -> CosineLR:
        """Return the cosine with a number of rounds."""
        return replace(self, rounds=_length("a cosine", self.rounds, self.fraction, rounds))

    def factor(self, version: int) -> float:
        """Return the value of the cosine."""
        rounds = self.rounds or _unknown(self)
        progress = min(version, rounds - 1) / rounds
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@register_part("lr_schedule", "warmup", paper="Goyal et al., 2017")
class WarmupLR(LRSchedule):
    """Increase the learning rate linearly over the first rounds, times another schedule.

        factor = min(1, (t + 1) / rounds) * inner(t)

    Args:
        rounds: number of rounds until the full learning rate, at most those of the run. 0: by `fraction`.
        inner: the other schedule. It starts in the first round, too, and its fractions are of the whole run: under a
            warm-up of 5 of 100 rounds a cosine has fallen to 0.994 when the warm-up ends, and it ends with the run.
        fraction: the warm-up as a fraction of the run, above 0 and at most 1; used if `rounds` is 0.

    >>> [round(WarmupLR(4, inner=ExponentialLR(0.5)).factor(t), 4) for t in range(5)]
    [0.25, 0.25, 0.1875, 0.125, 0.0625]
    >>> WarmupLR(inner=CosineLR()).over(200)
    WarmupLR(rounds=10, inner=CosineLR(rounds=200, floor=0.0))
    """

    rounds: NonNegativeInt = 0
    inner: LRSchedule = ConstantLR()
    fraction: Share = rare(0.05)

    def over(self, rounds: int) -> WarmupLR:
        """Return the warm-up with a number of rounds, and the inner schedule over the same run."""
        length = _length("a warm-up", self.rounds, self.fraction, rounds)
        return replace(self, rounds=length, inner=self.inner.over(rounds))

    def factor(self, version: int) -> float:
        """Return the factor of the warm-up times that of `inner`."""
        return min(1.0, (version + 1) / (self.rounds or _unknown(self))) * self.inner.factor(version)


def _length(what: str, own: int, fraction: float, rounds: int) -> int:
    """The number of rounds of a schedule in a run of `rounds`."""
    if own:
        _check_fits(f"{what} of {own} rounds", own, rounds, "fewer, or rounds = 0 for a fraction of the run")
    return own or max(1, round(fraction * rounds))


def _check_fits(what: str, last: int, rounds: int, instead: str) -> None:
    if last > rounds:
        raise ConfigError(
            f"the learning-rate schedule is longer than the run: {what}, but the run has {rounds}; write {instead}"
        )


def _unknown(schedule: LRSchedule) -> NoReturn:
    raise ConfigError(f"{schedule!r} is a fraction of a run of unknown length; write rounds, or call over(rounds)")
