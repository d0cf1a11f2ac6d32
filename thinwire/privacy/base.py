"""The contract of a privacy mechanism, and the mechanism without any privacy: `NoPrivacy`.

A mechanism acts between sketch and codec, on all values of an update together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register_part
from thinwire.core.tree import Tree


class Privacy:
    """Bounds the influence of each client, and adds noise to the aggregate.

    A mechanism subclasses this contract and implements `bound`, `aggregate` or both; by default nothing is changed.
    `thinwire.testing.check_privacy` checks it.

    `bound` runs on the client and `aggregate` on the server. Not secure aggregation, which hides the update of each
    client from the server but does not bound or perturb the aggregate; both can be combined, see `masked`.
    """

    active = True
    """Whether the mechanism changes what is uploaded or released."""

    bounds = False
    """Whether the influence of one client is bounded, so that uploads must hold nothing besides the update."""

    delta: float | None = None
    """The delta of (epsilon, delta)-differential privacy; None if the mechanism gives no such guarantee."""

    masked: MaskedPrivacy | None = None
    """The mechanism for secure aggregation, where the server sees the sum only; None if there is none."""

    def bound(self, code: Tree, key: Key) -> Tree:
        """On the client: clip the update, and add noise if the mechanism is local."""
        return code

    def aggregate(self, codes: Sequence[Tree], mean: Callable[[Sequence[Tree]], Tree], clients: int, key: Key) -> Tree:
        """On the server: the aggregate that is released.

        Args:
            codes: one decoded update for each client; with secure aggregation, only their mean.
            mean: aggregates trees as the method does.
            clients: the number of clients in the aggregate.
            key: the key of the noise.
        """
        return mean(codes)

    def spent(self, clients: int, population: int, rounds: int) -> tuple[float | None, str] | None:
        """The epsilon after these rounds, or None and the reason; None if the mechanism gives no guarantee.

        Args:
            clients: clients per round.
            population: all clients that can be sampled.
            rounds: the number of rounds so far.
        """
        return None


class MaskedPrivacy(ABC):
    """A mechanism for secure aggregation, where the server sees the sum only: clients clip and add noise themselves."""

    @abstractmethod
    def check_clients(self, clients: int) -> None:
        """Raise a ConfigError if the sum of so many clients is not supported."""

    @abstractmethod
    def add_to_sum(self, x: np.ndarray, clients: int, key: Key, least: int = 0) -> np.ndarray:
        """On the client: the integers (int64) that it adds to the sum of so many clients, from its values x.

        Args:
            x: its values.
            clients: the number of clients that begin the sum.
            key: the source of its noise.
            least: how many of them remain at least; their noise must suffice. 0: all.
        """

    @abstractmethod
    def of_sum(self, total: np.ndarray, clients: int, began: int = 0, least: int = 0) -> np.ndarray:
        """On the server: the aggregate that is released, as float64, from the sum.

        Args:
            total: the sum.
            clients: the number of clients in it.
            began: the number of clients that began the sum; 0: the same.
            least: as given to `add_to_sum`.
        """


@register_part("privacy", "none")
class NoPrivacy(Privacy):
    """No privacy: updates are sent and their mean is released unchanged.

    >>> from thinwire.core.key import Key
    >>> import torch
    >>> NoPrivacy().bound({"w": torch.ones(2)}, Key(0))["w"].tolist()
    [1.0, 1.0]
    """

    active = False
