"""In which order a client sees its examples. A function of the seed, the round and the client: never of the method.

Each epoch is a new random order, cut into batches. The last, short batch is filled up by repeating its own examples, so
that all batches have one shape; the repeated ones do not count in the loss.

>>> plan = plan_batches([3], [Key(0)], Local(epochs=1, batch=2))
>>> plan.index.shape, plan.rows.tolist()
((1, 2, 2), [[2, 1]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from thinwire.core.key import Key, permutations
from thinwire.core.reference import is_reference
from thinwire.core.registry import rare, short_repr
from thinwire.core.text import NonNegativeFloat, NonNegativeInt, PositiveFloat, check_settings
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Local:
    """How much a client trains in one round.

    Args:
        epochs: passes over its examples; 0 for two, or up to four until a client has 32 batches.
        batch: examples in a step; 0 means all of them in one step.
        steps: if above 0, exactly this many steps instead of whole epochs.
        logit_adjustment: for clients with few classes: in training, outputs are shifted by this factor times the
            logarithm of how often their class occurs in the batch (`losses.adjust_logits`); 0 for not at all. Only
            with cross entropy. Evaluation does not change.
        pseudo_count: is added to the count of each class in the batch.
        trainer: a function `fit(model, records)` that trains instead of our steps (`own_trainer.py`): the function, or
            a reference such as `my_trainer.py:fit`; "" for none. `records.batches()` has epochs, batch and steps.
    """

    epochs: NonNegativeInt = 1
    batch: NonNegativeInt = 32
    steps: NonNegativeInt = 0
    logit_adjustment: NonNegativeFloat = rare(0.0)
    pseudo_count: PositiveFloat = rare(0.5)
    trainer: str | Callable[..., Any] = rare("")
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_settings(self)
        if not (callable(self.trainer) or self.trainer == "" or is_reference(str(self.trainer))):
            raise ConfigError(
                f"trainer must be a function fit(model, records) or a reference to one, not {self.trainer!r}; write "
                'for example "my_trainer.py:fit"'
            )

    def passes(self, examples: int) -> int:
        """The number of epochs of a client with so many examples.

        >>> [Local(epochs=0, batch=16).passes(n) for n in (40, 200, 5000)], Local(epochs=1).passes(40)
        ([4, 3, 2], 1)
        """
        return self.epochs or min(4, max(2, -(-32 * self.batch // examples)))

    def steps_of(self, examples: int) -> int:
        """The number of local steps of a client with so many examples.

        >>> Local(epochs=2, batch=16).steps_of(40), Local(steps=5).steps_of(40)
        (6, 5)
        """
        return self.steps or self.passes(examples) * (math.ceil(examples / self.batch) if self.batch else 1)


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
    plans, drawn = [], []
    for sizes, keys in rounds:
        width = max(min(n, local.batch) if local.batch else n for n in sizes)
        epochs = [_epoch(n, min(local.batch, n) if local.batch else n, width) for n in sizes]
        steps = [local.steps or local.passes(n) * len(rows) for n, (_, rows) in zip(sizes, epochs, strict=True)]
        plans.append((width, epochs, steps))
        for key, n, count, (_, rows) in zip(keys, sizes, steps, epochs, strict=True):
            drawn += [(key.fold("epoch", epoch), n) for epoch in range(-(-count // len(rows)))]
    orders = iter(permutations([key for key, _ in drawn], [n for _, n in drawn]))
    made = []
    for width, epochs, steps in plans:
        index = np.zeros((len(steps), max(steps), width), np.int64)
        rows = np.zeros(index.shape[:2], np.int64)
        for i, (places, of_epoch) in enumerate(epochs):
            for first in range(0, steps[i], len(of_epoch)):  # the last epoch may be cut short
                part = slice(first, min(first + len(of_epoch), steps[i]))
                count = part.stop - first
                index[i, part], rows[i, part] = next(orders)[places[:count]], of_epoch[:count]
        made.append(Batches(index, rows))
    return made


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
