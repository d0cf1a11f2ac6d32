"""Medians of the latest rounds, with which the uploads of the next round are compared.

A cohort of one or two clients, or one of mostly malicious clients, has no median that can be trusted. The median of the
rounds before it can: it is that of other cohorts.

    r      the median, over the latest ten rounds, of the median size of an upload in a round
    far    the update of a client whose norm is above 3 min(m, r), with m the median of its own round

The norm of an update is divided by the learning rate of the clients, so that a schedule does not change r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

ROUNDS = 10  # that are remembered
ENOUGH = 3  # rounds without which nothing is compared
FAR = 3.0  # times the median: a client that is asked about first if the next state is not fit
UNFIT = 3.0  # times the loss of the latest rounds


class Recent(NamedTuple):
    """Medians of the latest rounds by part of an upload, oldest first, and the clients far off in the newest."""

    medians: Mapping[str, tuple[float, ...]] = {}
    far: tuple[int, ...] = ()

    def of(self, part: str) -> float:
        """The median of the latest rounds; 0 if there are too few.

        >>> Recent({"loss": (2.0, 1.0, 30.0)}).of("loss"), Recent({"loss": (2.0,)}).of("loss")
        (2.0, 0.0)
        """
        known = self.medians.get(part, ())
        return median(known) if len(known) >= ENOUGH else 0.0

    def sizes(self, lr: float) -> dict[str, float]:
        """The medians of all parts for clients with this learning rate; the loss is left out."""
        found = {part: self.of(part) * (lr if part == "code" else 1.0) for part in self.medians if part != "loss"}
        return {part: size for part, size in found.items() if size > 0}

    def after(self, medians: Mapping[str, float], lr: float, far: tuple[int, ...]) -> Recent:
        """What is remembered after one more round.

        >>> Recent().after({"code": 0.5, "loss": 2.0}, lr=0.1, far=()).medians
        {'code': (5.0,), 'loss': (2.0,)}
        """
        units = {"code": lr} if lr > 0 else {}
        news = {part: size / units.get(part, 1.0) for part, size in medians.items() if math.isfinite(size)}
        kept = {part: (*self.medians.get(part, ()), size)[-ROUNDS:] for part, size in news.items()}
        return Recent({**self.medians, **kept}, far)

    def loss_is_unfit(self, loss: float) -> bool:
        """Whether a median loss is far beyond the median of the latest rounds, and beyond each of the last three.

        >>> recent = Recent({"loss": (2.5, 0.5, 0.4, 0.3)})
        >>> recent.loss_is_unfit(1.4), recent.loss_is_unfit(1.6)
        (False, True)
        """
        known = self.medians.get("loss", ())
        return len(known) >= ENOUGH and loss > UNFIT * max(self.of("loss"), *known[-ENOUGH:]) > 0
