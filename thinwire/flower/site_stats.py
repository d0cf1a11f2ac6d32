"""The lines of `sites.jsonl` of one round: what each client of the cohort sent, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from thinwire.core.text import visible
from thinwire.core.tree import Tree, flatten, norm, sub
from thinwire.flower.client_store import Response
from thinwire.protocol.norm_bound import reference
from thinwire.runtime.site_record import SiteRecord, Status


@dataclass
class Traffic:
    """Bytes to and from each client in a round, and the seconds until its last response."""

    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def sent(self, client: int, size: int) -> None:
        """Count a request."""
        self.down[client] = self.down.get(client, 0) + size

    def received(self, client: int, size: int, seconds: float) -> None:
        """Count a response."""
        self.up[client] = self.up.get(client, 0) + size
        self.seconds[client] = seconds


class Outcome(NamedTuple):
    """What became of the responses of a round: those that were used, who was scaled down and refused, and why."""

    counted: Mapping[int, Response]
    bounded: Mapping[int, str]
    refused: Mapping[int, str]
    norms: Mapping[int, float] = {}  # of all updates that could be decoded
    updates: Mapping[int, Tree] = {}  # of the responses that were used
    start: Mapping[str, Tensor] = {}  # what is subtracted from uploaded weights
    late: Set[int] = frozenset()  # clients that the round did not wait for


def site_records(
    number: int, cohort: tuple[int, ...], name: Callable[[int], str], outcome: Outcome, traffic: Traffic
) -> list[SiteRecord]:
    """One record for each client of the cohort.

    Args:
        number: the round.
        cohort: its clients.
        name: what logs call a client.
        outcome: what became of the responses.
        traffic: bytes and seconds.
    """
    norms, cosines = similarity(outcome.updates, dict(outcome.start))
    norms = {**norms, **outcome.norms}
    records = []
    for i in cohort:
        status, why = _status(i, outcome)
        loss = outcome.counted[i].loss if i in outcome.counted else None
        seconds = traffic.seconds.get(i)
        records.append(
            SiteRecord(
                *(number, name(i), i, status, _finite(norms.get(i)), _finite(cosines.get(i)), _finite(loss)),
                None if seconds is None else round(seconds, 3),
                traffic.up.get(i, 0),
                traffic.down.get(i, 0),
                visible(why, 300),
            )
        )
    return records


def similarity(updates: Mapping[int, Tree], start: Tree) -> tuple[dict[int, float], dict[int, float]]:
    """The norm of each update, and its cosine to the mean, in which no update is longer than the median.

    >>> import torch
    >>> trees = {0: {"w": torch.ones(2)}, 1: {"w": torch.ones(2)}, 2: {"w": -1e6 * torch.ones(2)}}
    >>> similarity(trees, {})[1]
    {0: 1.0, 1: 1.0, 2: -1.0}
    """
    moved = {i: sub(tree, start) if start else tree for i, tree in updates.items() if tree}
    norms = {i: norm(tree) for i, tree in moved.items()}
    if not moved:
        return {}, {}
    longest, total = reference(list(norms.values())), None
    for i, tree in moved.items():
        part = flatten(tree) * (min(1.0, longest / norms[i]) if norms[i] else 0.0)
        total = part if total is None else total + part
    assert total is not None
    length = float(total.norm())
    cosines = {
        i: round(float(flatten(tree) @ total) / (norms[i] * length), 4) if norms[i] * length else 0.0
        for i, tree in moved.items()
    }
    return norms, cosines


def _status(client: int, outcome: Outcome) -> tuple[Status, str]:
    if client in outcome.counted:
        why = outcome.bounded.get(client, "")
        return ("bounded", why) if why else ("accepted", "")
    if client in outcome.refused:
        return "refused", outcome.refused[client]
    if client in outcome.late:
        return "late", "the round was closed before it responded"
    return "absent", "no response in time"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
