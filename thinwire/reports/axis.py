"""Axes of charts: positions, and round ticks whose labels do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from thinwire.reports.svg import TICK_WIDTH, text

Format = Callable[[float], str]


class HorizontalAxis:
    """A linear or logarithmic axis from left to right.

    Args:
        low: smallest value.
        high: largest value.
        left: position of the left end, in pixels.
        right: position of the right end.
        log: logarithmic scale.
        integers: ticks at integers only.
    """

    def __init__(
        self, low: float, high: float, left: float, right: float, log: bool = False, integers: bool = False
    ) -> None:
        if log:
            low, high = low / 1.06, high * 1.06
            if high / low < 1.5:
                low, high = low / 1.25, high * 1.25
        elif high == low:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.left, self.right, self.log, self.integers = low, high, left, right, log, integers

    def at(self, value: float) -> float:
        """The position of a value, in pixels."""
        fraction = (value - self.low) / (self.high - self.low)
        if self.log:
            fraction = math.log(value / self.low) / math.log(self.high / self.low)
        return self.left + fraction * (self.right - self.left)

    def ticks(self, label: Format) -> list[float]:
        """As many round values as their labels have room for."""
        candidates: list[list[float]] = []
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
                candidates.append([step * 10.0**d for d in decades for step in steps])
            candidates += [candidates[-1][::2], candidates[-1][1::2], candidates[1][::4]]
        else:
            candidates = [round_ticks(self.low, self.high, wanted) for wanted in (12, 9, 6, 4, 3, 2)]
        for candidate in candidates:
            inside = [tick for tick in candidate if self.low <= tick <= self.high]
            if self.integers and any(tick % 1 for tick in inside):
                continue
            if len(inside) > 1 and self._fit(inside, label):
                return inside
        if self.integers:
            return [float(math.ceil(self.low))]
        ends = [self.low, self.high]
        return ends if self._fit(ends, label) else ends[:1]

    def draw(self, top: float, bottom: float, label: Format) -> list[str]:
        """SVG of the grid lines and the labels under them."""
        parts = []
        for tick in self.ticks(label):
            x, words = self.at(tick), label(tick)
            start, end = self._span(tick, len(words) * TICK_WIDTH)
            parts.append(f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom + 4:.1f}"/>')
            parts.append(text((start + end) / 2, bottom + 18, words, "middle"))
        return parts

    def _fit(self, ticks: Sequence[float], label: Format) -> bool:
        """Whether the labels of these ticks do not overlap."""
        edge = -math.inf
        for tick in ticks:
            start, end = self._span(tick, len(label(tick)) * TICK_WIDTH)
            if start < edge + 10:
                return False
            edge = end
        return True

    def _span(self, tick: float, width: float) -> tuple[float, float]:
        """Left and right end of a label: centered, but inside the chart."""
        start = min(max(self.at(tick) - width / 2, 0), self.right + 14 - width)
        return start, start + width


def round_ticks(low: float, high: float, wanted: int) -> list[float]:
    """About `wanted` round values that cover a range.

    >>> round_ticks(0.13, 0.87, 4)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high == low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
