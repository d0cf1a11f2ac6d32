"""Sampling of clients and of batches: functions of the seed, the same for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.core.key import Key
from thinwire.core.pinned import sent
from thinwire.data.examples import Examples
from thinwire.data.partitions.base import Assignment
from thinwire.training.batches import Batches, Local, by_size, plan_batches
from thinwire.training.inputs import Workload


class Sampler:
    """Draws the cohorts and the batches of a run.

    Args:
        key: the root of the run's randomness.
        eligible: the clients that can be sampled.
        cohort: number of clients of a round.
        local: how much each client trains.
        train: the training examples of all clients, on the device.
        clients: the indices of each client's examples.
        device: the device of the batches.
    """

    def __init__(
        self,
        key: Key,
        eligible: Sequence[int],
        cohort: int,
        local: Local,
        train: Examples,
        clients: Assignment,
        device: torch.device,
    ) -> None:
        self.key, self.eligible, self.size, self.local = key, eligible, min(cohort, len(eligible)), local
        self.train, self.clients, self.device = train, clients, device
        self._drawn: tuple[int, tuple[int, ...]] | None = None  # the last cohort
        self._planned: tuple[int, tuple[int, ...], Batches] | None = None  # batches that were planned in advance

    def cohort(self, number: int) -> tuple[int, ...]:
        """The clients of a round, without replacement."""
        if self._drawn is None or self._drawn[0] != number:
            drawn = self.key.fold("cohort", number).choice(len(self.eligible), self.size)
            self._drawn = number, tuple(self.eligible[i] for i in drawn)
        return self._drawn[1]

    def order(self, number: int) -> tuple[int, ...]:
        """All eligible clients in the order in which a round takes those that are there; its cohort is first."""
        first = self.cohort(number)
        taken = set(first)
        others = [i for i in self.eligible if i not in taken]
        drawn = self.key.fold("cohort", number).fold("others").permutation(len(others)).tolist()
        return (*first, *(others[i] for i in drawn))

    def plan(self, number: int) -> None:
        """Plan the batches of a round before they are needed."""
        if self._planned is None:
            clients = self.cohort(number)
            self._planned = number, clients, self._batches(number, clients)

    def workload(self, number: int, clients: tuple[int, ...]) -> Workload:
        """The batches of some clients in a round."""
        planned, self._planned = self._planned, None
        fits = planned is not None and planned[:2] == (number, clients)
        batches = planned[2] if planned and fits else self._batches(number, clients)
        own = tuple(self.clients.client(i) for i in clients)
        return Workload(
            torch.from_numpy(batches.index) if self.device.type == "cpu" else sent(batches.index, self.device),
            batches.rows,
            tuple(map(len, own)),
            tuple(self.key.fold("batches", number, i).fold("layers") for i in clients),
            self.train.gather,
            self.local.accumulate,
            own,
        )

    def _batches(self, number: int, clients: tuple[int, ...]) -> Batches:
        """The batches of some clients, by their indices in the training examples."""
        own = [self.clients.client(i) for i in clients]
        keys = [self.key.fold("batches", number, i) for i in clients]
        batches = plan_batches([len(mine) for mine in own], keys, self.local)
        index = batches.index
        for i, mine in enumerate(own):
            index[i] = mine[index[i]]
        if self.train.sizes is not None and self.train.window > 1:
            sizes = self.train.sizes.cpu().numpy()
            for i, key in enumerate(keys):
                index[i] = by_size(index[i], batches.rows[i], sizes, self.train.window, key.fold("lengths"))
        if self.train.variants > 1:  # augmented images: each example in one of its variants
            for i, key in enumerate(keys):
                variants = key.fold("variants").integers(index[i].size, self.train.variants).numpy()
                index[i] += len(self.train) * variants.reshape(index[i].shape)
        return batches
