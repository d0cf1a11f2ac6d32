"""In which order a client sees its examples. A function of the seed, the round and the client: never of the method.

Each epoch is a new random order, cut into batches. The last, short batch is filled up by repeating its own examples, so
that all batches have one shape; the repeated ones do not count in the loss.

>>> plan = plan_batches([3], [Key(0)], Local(epochs=1, batch=2))
>>> plan.index.shape, plan.rows.tolist()
((1, 2, 2), [[2, 1]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.core.rng import Key
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Local:
    """How much a client trains in one round.

    Args:
        epochs: passes over its examples.
        batch: examples in a step; 0 means all of them in one step.
        steps: if above 0, exactly this many steps instead of whole epochs.
    """

    epochs: int = 1
    batch: int = 32
    steps: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"epochs must be 1 or more, not {self.epochs}")
        if self.batch < 0:
            raise ConfigError(f"batch must be 0 (all examples) or more, not {self.batch}")
        if self.steps < 0:
            raise ConfigError(f"steps must be 0 (whole epochs) or more, not {self.steps}")


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
    width = max(min(n, local.batch) if local.batch else n for n in sizes)
    parts = [_client_batches(n, key, local, width) for n, key in zip(sizes, keys, strict=True)]
    steps = max(len(rows) for _, rows in parts)
    index = np.zeros((len(parts), steps, width), np.int64)
    rows = np.zeros((len(parts), steps), np.int64)
    for i, (client_index, client_rows) in enumerate(parts):
        index[i, : len(client_rows)] = client_index
        rows[i, : len(client_rows)] = client_rows
    return Batches(index, rows)


def _client_batches(n: int, key: Key, local: Local, width: int) -> tuple[np.ndarray, np.ndarray]:
    batch = min(local.batch, n) if local.batch else n
    per_epoch = -(-n // batch)
    steps = local.steps or local.epochs * per_epoch
    epochs = -(-steps // per_epoch)
    rows = np.full(per_epoch, batch, np.int64)
    rows[-1] = n - batch * (per_epoch - 1)
    # position j of a batch with r examples is its own example j mod r
    places = np.arange(per_epoch)[:, None] * batch + np.arange(width) % rows[:, None]
    orders = [key.fold("epoch", epoch).permutation(n).numpy()[places] for epoch in range(epochs)]
    return np.concatenate(orders)[:steps], np.tile(rows, epochs)[:steps]
