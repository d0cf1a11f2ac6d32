"""A task: a model, a dataset and its partition into clients, a loss.

>>> import torch
>>> pool, clients = pool_clients([(torch.zeros(3, 2), torch.zeros(3)), (torch.ones(1, 2), torch.ones(1))])
>>> len(pool), clients.sizes().tolist()
(4, [3, 1])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.core.key import Key, permutations
from thinwire.data.bad_values import different_shapes
from thinwire.data.examples import Arrays, Examples, Inputs
from thinwire.data.losses import Loss, cross_entropy
from thinwire.data.own_examples import as_tensors
from thinwire.data.partitions.base import Assignment, offsets_of
from thinwire.errors import ConfigError
from thinwire.metrics.base import Metric

_AT_ONCE = 1 << 14  # clients whose examples are shuffled in one call


class Exchange(NamedTuple):
    """Messages between server and clients before the first round, by client; their bytes are counted in that round."""

    up: Mapping[int, bytes] = {}
    down: Mapping[int, bytes] = {}

    @property
    def bytes_up(self) -> int:
        """Bytes that clients sent."""
        return sum(map(len, self.up.values()))

    @property
    def bytes_down(self) -> int:
        """Bytes that clients received."""
        return sum(map(len, self.down.values()))


@dataclass(frozen=True, eq=False)
class Task:
    """A model, its training data by client, its test data and its loss.

    Args:
        model: the module with its initial weights; never changed.
        train: the examples of all clients.
        clients: the training examples of each client.
        test: examples for evaluation after a round, or None.
        client_tests: the examples of `train` that are held out to evaluate each client's model; or None.
        loss: `loss(outputs, targets)`, one value per example or their mean; see `thinwire.data.losses`.
        note: a remark about the data for readers of results.
        before: messages that were exchanged to prepare the data, for example to estimate the scale of images.
        metrics: metrics of the test set besides loss and accuracy, by name.
        objective: what rounds and runs are ranked by: `accuracy`, `loss` or one of the metrics; by default accuracy if
            targets are class labels (`metrics/objective.py`).
        class_names: names of classes or labels for readers, by number; empty if they have none.
        client_names: names of clients for readers, by number; empty if they have none.
    """

    model: nn.Module
    train: Examples
    clients: Assignment
    test: Examples | None = None
    client_tests: Assignment | None = None
    loss: Loss = cross_entropy
    note: str = ""
    before: Exchange = Exchange()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    objective: str = ""
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        empty = np.flatnonzero(self.clients.sizes() == 0)
        if len(empty):
            more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
            raise ConfigError(f"client {empty[0]}{more} has no examples; leave empty clients out, or use fewer clients")


def validation_fraction(clients: Assignment, fraction: float, key: Key) -> tuple[Assignment, Assignment]:
    """Hold out a random fraction of each client's examples for validation: (training, validation) assignments.

    >>> train, held_out = validation_fraction(Assignment(np.arange(10), np.array([0, 5, 10])), 0.2, Key(0))
    >>> train.sizes().tolist(), held_out.sizes().tolist()
    ([4, 4], [1, 1])
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the validation fraction must be between 0 and 1, not {fraction}")
    sizes = clients.sizes()
    counts = np.rint(fraction * sizes).astype(np.int64)
    wrong = np.flatnonzero((counts < 1) | (counts >= sizes))
    if len(wrong):
        i = int(wrong[0])
        raise ConfigError(f"client {i} has {sizes[i]} examples, too few to hold out a fraction of {fraction}")
    order = np.empty_like(clients.order)
    for first in range(0, len(clients), _AT_ONCE):
        ids = range(first, min(first + _AT_ONCE, len(clients)))
        shuffled = np.concatenate(permutations([key.fold(i) for i in ids], sizes[first : ids.stop].tolist()))
        begin, end = clients.offsets[first], clients.offsets[ids.stop]
        order[begin:end] = clients.order[
            shuffled + np.repeat(clients.offsets[first : ids.stop], sizes[first : ids.stop])
        ]
    position = np.arange(len(order)) - np.repeat(clients.offsets[:-1], sizes)
    held_out = position < np.repeat(counts, sizes)
    return Assignment(order[~held_out], offsets_of(sizes - counts)), Assignment(order[held_out], offsets_of(counts))


def pool_clients(clients: Sequence[Any]) -> tuple[Arrays, Assignment]:
    """Concatenate the examples of clients, each a pair `(inputs, targets)`, a torch Dataset or a DataLoader.

    Args:
        clients: pairs of tensors or numpy arrays with one row per example (inputs may also be a dictionary of these),
            datasets whose items are such pairs of one example, or DataLoaders, which are read once.
    """
    if not len(clients):
        raise ConfigError("there are no clients; give at least one pair (inputs, targets)")
    pairs = [as_tensors(client, f"client {i}") for i, client in enumerate(clients)]
    sizes = [len(targets) for _, targets in pairs]
    try:
        first = pairs[0][0]
        inputs: Inputs
        if isinstance(first, dict):
            inputs = {name: torch.cat([x[name] for x, _ in pairs]) for name in first}  # type: ignore[index]
        else:
            inputs = torch.cat([x for x, _ in pairs])  # type: ignore[misc]
        targets = torch.cat([y for _, y in pairs])
    except (RuntimeError, KeyError, TypeError) as error:
        which = different_shapes(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
        raise ConfigError(which or f"the examples of clients differ in shape or type: {error}") from error
    return Arrays(inputs, targets), Assignment(np.arange(sum(sizes)), np.concatenate(([0], np.cumsum(sizes))))


def alone(inputs: Inputs, targets: Tensor, clients: int) -> tuple[Arrays, Assignment]:
    """The examples of a machine that has the data of one client only, for any client index that it is given.

    >>> pool, assignment = alone(torch.zeros(3, 2), torch.zeros(3), clients=4)
    >>> len(pool), assignment.sizes().tolist()
    (3, [3, 3, 3, 3])
    """
    own, _ = pool_clients([(inputs, targets)])
    return own, Assignment(np.tile(np.arange(len(own)), clients), len(own) * np.arange(clients + 1))


def as_examples(data: Any, what: str = "test") -> Arrays:
    """Examples from a pair `(inputs, targets)`, a torch Dataset or a DataLoader."""
    inputs, targets = as_tensors(data, what)
    return Arrays(inputs, targets)
