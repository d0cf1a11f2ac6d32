"""A learning-rate schedule that is halved at given versions: where a run went back to try a smaller rate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.optimizers.lr_schedules import ConstantLR, LRSchedule


@register("lr_schedule", "halved")
@dataclass(frozen=True)
class HalvedLR(LRSchedule):
    """Halve another schedule from given versions on; each time a run is retried adds an entry.

        factor = inner(t) * 0.5^(number of entries of `at` that are t or less)

    Args:
        at: versions in ascending order; one that occurs twice halves twice.
        inner: the other schedule; it does not start again.

    >>> [HalvedLR(at=(2, 2, 4)).factor(t) for t in range(5)]
    [1.0, 1.0, 0.25, 0.25, 0.125]
    """

    at: tuple[int, ...] = (0,)
    inner: LRSchedule = ConstantLR()

    def __post_init__(self) -> None:
        if not self.at or self.at[0] < 0 or list(self.at) != sorted(self.at):
            raise ConfigError(f"at must be versions in ascending order, for example at = [0, 20], not {list(self.at)}")
        if len(self.at) > 1000:
            raise ConfigError(f"at must have at most 1000 entries, not {len(self.at)}")

    def factor(self, version: int) -> float:
        """Return the factor of `inner`, halved for each entry so far."""
        return self.inner.factor(version) * 0.5 ** sum(version >= at for at in self.at)

    def over(self, rounds: int) -> HalvedLR:
        """Return the schedule of a run of that many rounds."""
        return replace(self, inner=self.inner.over(rounds))
