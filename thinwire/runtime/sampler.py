"""Who takes part in a round, and on which examples: functions of the seed, the same for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.core.key import Key
from thinwire.core.pinned import sent
from thinwire.data.examples import Examples, Shifted
from thinwire.data.partitions.base import Assignment
from thinwire.training.batches import Batches, Local, plan_batches
from thinwire.training.local import Workload


class Sampler:
    """The cohorts and the batches of a run.

    Args:
        key: the root of the run's randomness.
        asked: the clients that may be asked.
        cohort: how many are, in a round.
        local: how much each trains.
        train: the pool of examples, on the device.
        clients: whose they are.
        device: where numbers of examples are wanted.
    """

    def __init__(
        self,
        key: Key,
        asked: Sequence[int],
        cohort: int,
        local: Local,
        train: Examples,
        clients: Assignment,
        device: torch.device,
    ) -> None:
        self.key, self.asked, self.size, self.local = key, asked, min(cohort, len(asked)), local
        self.train, self.clients, self.device = train, clients, device
        self._drawn: tuple[int, tuple[int, ...]] | None = None  # the last cohort: asked for ahead, and when it is time
        self._planned: tuple[int, tuple[int, ...], Batches] | None = None  # batches that were planned ahead

    def cohort(self, number: int) -> tuple[int, ...]:
        """The clients of a round that draws anew."""
        if self._drawn is None or self._drawn[0] != number:
            drawn = self.key.fold("cohort", number).choice(len(self.asked), self.size)
            self._drawn = number, tuple(self.asked[i] for i in drawn)
        return self._drawn[1]

    def plan(self, number: int) -> None:
        """Plan the batches of a round that draws anew before they are asked for."""
        if self._planned is None:
            clients = self.cohort(number)
            self._planned = number, clients, self._batches(number, clients)

    def workload(self, number: int, clients: tuple[int, ...]) -> Workload:
        """The examples of some clients in a round, by their numbers in the pool."""
        planned, self._planned = self._planned, None
        fits = planned is not None and planned[:2] == (number, clients)
        batches = planned[2] if planned and fits else self._batches(number, clients)
        return Workload(
            sent(batches.index, self.device),
            batches.rows,
            tuple(len(self.clients.client(i)) for i in clients),
            tuple(self.key.fold("batches", number, i).fold("layers") for i in clients),
            self.train.gather,
        )

    def _batches(self, number: int, clients: tuple[int, ...]) -> Batches:
        """The same as numbers on the host."""
        own = [self.clients.client(i) for i in clients]
        keys = [self.key.fold("batches", number, i) for i in clients]
        batches = plan_batches([len(mine) for mine in own], keys, self.local)
        index = batches.index
        for i, mine in enumerate(own):
            index[i] = mine[index[i]]
        if isinstance(self.train, Shifted):
            for i, key in enumerate(keys):
                forms = key.fold("variants").integers(index[i].size, self.train.variants).numpy()
                index[i] += len(self.train) * forms.reshape(index[i].shape)
        return batches
