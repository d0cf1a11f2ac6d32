"""In which order a client sees its examples. A function of the seed, the round and the client: never of the method.

Each epoch is a new random order, cut into batches. The last, short batch is filled up by repeating its own examples, so
that all batches have one shape; the repeated ones do not count in the loss.

>>> plan = plan_batches([3], [Key(0)], Local(epochs=1, batch=2))
>>> plan.index.shape, plan.rows.tolist()
((1, 2, 2), [[2, 1]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from thinwire.core.key import Key, permutations
from thinwire.core.reference import is_reference
from thinwire.core.registry import short_repr
from thinwire.core.text import check_numbers
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Local:
    """How much a client trains in one round.

    Args:
        epochs: passes over its examples.
        batch: examples in a step; 0 means all of them in one step.
        steps: if above 0, exactly this many steps instead of whole epochs.
        logit_adjustment: for clients with few classes: in training, outputs are shifted by this factor times the
            logarithm of how often their class occurs in the batch (`losses.adjust_logits`); 0 for not at all. Only
            with cross entropy. Evaluation does not change.
        pseudo_count: is added to the count of each class in the batch.
        accumulate: divide each batch into so many parts and add up their gradients: the step of the whole batch, in the
            memory of one part (`step.py`).
        trainer: a function `fit(model, records)` that trains instead of our steps (`own_trainer.py`): the function, or
            a reference such as `my_trainer.py:fit`; "" for none. `records.batches()` has epochs, batch and steps.
    """

    epochs: int = 1
    batch: int = 32
    steps: int = 0
    logit_adjustment: float = field(default=0.0, metadata={"rare": True})
    pseudo_count: float = field(default=0.5, metadata={"rare": True})
    accumulate: int = field(default=1, metadata={"rare": True})
    trainer: str | Callable[..., Any] = field(default="", metadata={"rare": True})
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.epochs < 1:
            raise ConfigError(f"epochs must be 1 or more, not {self.epochs}")
        if self.batch < 0:
            raise ConfigError(f"batch must be 0 (all examples) or more, not {self.batch}")
        if self.steps < 0:
            raise ConfigError(f"steps must be 0 (whole epochs) or more, not {self.steps}")
        if not 0 <= self.logit_adjustment < math.inf:
            raise ConfigError(
                f"logit_adjustment must be 0 (none) or more, not {self.logit_adjustment}; write for example 1.0"
            )
        if not 0 < self.pseudo_count < math.inf:
            raise ConfigError(f"pseudo_count must be above 0, not {self.pseudo_count}; write for example 0.5")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate must be 1 (no parts) or a number of parts of a batch, not {self.accumulate}")
        if not (callable(self.trainer) or self.trainer == "" or is_reference(str(self.trainer))):
            raise ConfigError(
                f"trainer must be a function fit(model, records) or a reference to one, not {self.trainer!r}; write "
                'for example "my_trainer.py:fit"'
            )
        if self.trainer and self.accumulate > 1:
            raise ConfigError("a trainer of one's own takes its own steps; accumulate there, and leave accumulate at 1")


@dataclass(frozen=True, eq=False)
class Batches:
    """Positions within each client's own examples.

    index: (clients, steps, batch) int64; rows: (clients, steps) how many of a batch count, 0 where a client is done.
    """

    index: np.ndarray
    rows: np.ndarray


def plan_batches(sizes: Sequence[int], keys: Sequence[Key], local: Local) -> Batches:
    """The batches of several clients, padded to the longest.

    Args:
        sizes: how many examples each client has; at least one.
        keys: one a client, for this round.
        local: how much to train.
    """
    return plan_rounds([(sizes, keys)], local)[0]


def plan_rounds(rounds: Sequence[tuple[Sequence[int], Sequence[Key]]], local: Local) -> list[Batches]:
    """`plan_batches` for several rounds, whose random orders are drawn together.

    Args:
        rounds: sizes and keys of the clients of each round.
        local: how much to train.
    """
    plans = [_Plan.of(sizes, local) for sizes, _ in rounds]
    drawn = [
        (key.fold("epoch", epoch), n)
        for (sizes, keys), plan in zip(rounds, plans, strict=True)
        for key, n, count in zip(keys, sizes, plan.epochs, strict=True)
        for epoch in range(count)
    ]
    orders = iter(permutations([key for key, _ in drawn], [n for _, n in drawn]))
    return [plan.fill(orders) for plan in plans]


class _Plan(NamedTuple):
    """The batches of a round before the order of examples is drawn."""

    width: int
    shapes: list[tuple[np.ndarray, np.ndarray]]  # of an epoch of each client, see `_epoch`
    steps: list[int]
    epochs: list[int]

    @classmethod
    def of(cls, sizes: Sequence[int], local: Local) -> _Plan:
        """The plan of clients with so many examples."""
        width = max(min(n, local.batch) if local.batch else n for n in sizes)
        shapes = [_epoch(n, min(local.batch, n) if local.batch else n, width) for n in sizes]
        steps = [local.steps or local.epochs * len(rows) for _, rows in shapes]
        return cls(
            width, shapes, steps, [-(-count // len(rows)) for count, (_, rows) in zip(steps, shapes, strict=True)]
        )

    def fill(self, orders: Iterator[np.ndarray]) -> Batches:
        """The batches, given the next random orders of all clients and epochs."""
        steps = self.steps
        index = np.zeros((len(steps), max(steps), self.width), np.int64)
        rows = np.zeros((len(steps), max(steps)), np.int64)
        for i, (places, one) in enumerate(self.shapes):
            for first in range(0, steps[i], len(one)):  # an epoch; the last one may be cut short
                part = slice(first, min(first + len(one), steps[i]))
                count = part.stop - first
                index[i, part], rows[i, part] = next(orders)[places[:count]], one[:count]
        return Batches(index, rows)


def by_size(index: np.ndarray, rows: np.ndarray, sizes: np.ndarray, window: int, key: Key) -> np.ndarray:
    """The batches of one client with examples of similar size together, so that little of a batch is padding.

    Within each window of full batches the examples are sorted by size, cut into batches, and these are put in random
    order. Which examples a window has does not change.

    Args:
        index: (steps, batch) the examples of each batch.
        rows: (steps,) how many of a batch count.
        sizes: the size of every example.
        window: batches of a window.
        key: of the order of batches.

    >>> by_size(np.array([[0, 1], [2, 3]]), np.array([2, 2]), np.array([9, 1, 8, 2]), 2, Key(1)).tolist()
    [[2, 0], [1, 3]]
    """
    out, width = index.copy(), index.shape[1]
    ends = np.flatnonzero(np.diff(rows == width)) + 1  # a batch that is not full ends an epoch
    for part in np.split(np.arange(len(rows)), ends):
        for first in range(0, len(part), window):
            steps = part[first : first + window]
            if rows[steps[0]] == width and len(steps) > 1:
                flat = index[steps].reshape(-1)
                sorted_by_size = flat[np.argsort(sizes[flat], kind="stable")].reshape(-1, width)
                out[steps] = sorted_by_size[key.fold(int(steps[0])).permutation(len(steps)).numpy()]
    return out


@lru_cache(maxsize=256)
def _epoch(n: int, batch: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which place of a random order of n examples stands at each place of an epoch's batches, and their rows."""
    rows = np.full(-(-n // batch), batch, np.int64)
    rows[-1] = n - batch * (len(rows) - 1)
    # position j of a batch with r examples is its own example j mod r
    return np.arange(len(rows))[:, None] * batch + np.arange(width) % rows[:, None], rows
