"""Sampling of clients and of batches: functions of the seed, the same for every method."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from thinwire.core.key import Key
from thinwire.core.parallel import sent
from thinwire.data.examples import Examples
from thinwire.data.partition import Assignment
from thinwire.training.batches import Batches, Local, by_size, plan_rounds
from thinwire.training.inputs import Workload

MOST_ROUNDS = 8  # rounds whose batches are planned at a time
FEW = 1 << 16  # examples of these rounds

Planned: TypeAlias = dict[int, tuple[tuple[int, ...], Batches]]  # cohorts and batches by round


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
        self._drawn: dict[int, tuple[int, ...]] = {}  # the last cohorts, by round
        self._planned: dict[int, Future[Planned]] = {}  # in advance, by round

    @cached_property
    def _other(self) -> ThreadPoolExecutor:
        """The thread that plans batches in advance; it ends with the sampler."""
        return ThreadPoolExecutor(1, thread_name_prefix="thinwire-plan")

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The sizes of all examples, on the host: a copy in every round would wait for the GPU."""
        return np.asarray(self.train.sizes.cpu()) if self.train.sizes is not None else np.zeros(0)

    def cohort(self, number: int) -> tuple[int, ...]:
        """The clients of a round, without replacement."""
        return self._cohorts([number])[0]

    def _cohorts(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """The clients of some rounds, drawn together."""
        known = self._drawn
        if missing := [number for number in numbers if number not in known]:
            drawn = [self.key.fold("cohort", number).choice(len(self.eligible), self.size) for number in missing]
            new = {n: tuple(self.eligible[i] for i in its) for n, its in zip(missing, drawn, strict=True)}
            known = {**dict(list(known.items())[-3 * MOST_ROUNDS :]), **new}
            self._drawn = known  # replaced as a whole: two threads draw
        return [known[number] for number in numbers]

    def order(self, number: int) -> tuple[int, ...]:
        """All eligible clients in the order in which a round takes those that are there; its cohort is first."""
        first = self.cohort(number)
        taken = set(first)
        others = [i for i in self.eligible if i not in taken]
        drawn = self.key.fold("cohort", number).fold("others").permutation(len(others)).tolist()
        return (*first, *(others[i] for i in drawn))

    def plan(self, number: int) -> None:
        """Begin to plan the batches of a round in another thread, before they are needed.

        Few examples are planned for several rounds at a time, and the next ones when the second half of these begins:
        each call of numpy passes Python's lock from one thread to the other and back, which takes longer than the work.

        Args:
            number: rounds done before it.
        """
        if number not in self._planned:
            self._planned = self._begin(number)
        last = max(self._planned)
        if self._at_once > 1 and 2 * (last - number) < self._at_once - 1:
            kept = {n: planned for n, planned in self._planned.items() if n >= number}
            self._planned = {**kept, **self._begin(last + 1)}

    @cached_property
    def _at_once(self) -> int:
        """Rounds that are planned at a time."""
        longest = max(1, *(len(self.clients.client(i)) for i in self.eligible[:10]))
        examples, passes = self.size * longest, 1 if self.local.steps else self.local.passes(longest)
        return max(1, min(MOST_ROUNDS, FEW // (examples * passes)))

    def _begin(self, first: int) -> dict[int, Future[Planned]]:
        """Begin to plan some rounds."""
        numbers = range(first, first + self._at_once)
        return dict.fromkeys(numbers, self._other.submit(self._plan, numbers))

    def _plan(self, numbers: Sequence[int]) -> Planned:
        cohorts = self._cohorts(numbers)
        batches = self._batches(list(zip(numbers, cohorts, strict=True)))
        return {number: (cohorts[i], batches[i]) for i, number in enumerate(numbers)}

    def workload(self, number: int, clients: tuple[int, ...]) -> Workload:
        """The batches of some clients in a round."""
        planned, batches = self._planned.get(number), None
        if planned is not None:
            its, batches = planned.result()[number]
            batches = batches if its == clients else None
        if batches is None:
            batches = self._batches([(number, clients)])[0]
        own = tuple(self.clients.client(i) for i in clients)
        return Workload(
            torch.from_numpy(batches.index) if self.device.type == "cpu" else sent(batches.index, self.device),
            batches.rows,
            tuple(map(len, own)),
            clients,
            self.key,
            number,
            self.train.gather,
            own,
        )

    def _batches(self, rounds: Sequence[tuple[int, tuple[int, ...]]]) -> list[Batches]:
        """The batches of some clients in some rounds, by their indices in the training examples."""
        owns = [[self.clients.client(i) for i in clients] for _, clients in rounds]
        keys = [[self.key.fold("batches", number, i) for i in clients] for number, clients in rounds]
        sizes = [[len(mine) for mine in own] for own in owns]
        made = plan_rounds(list(zip(sizes, keys, strict=True)), self.local)
        for batches, own, its in zip(made, owns, keys, strict=True):
            index = batches.index  # positions within each client's own examples become indices of the training examples
            for i, mine in enumerate(own):
                index[i] = mine[index[i]]
            if self.train.sizes is not None and self.train.window > 1:
                for i, key in enumerate(its):
                    index[i] = by_size(index[i], batches.rows[i], self._sizes, self.train.window, key.fold("lengths"))
            if self.train.variants > 1:  # augmented images: each example in one of its variants
                for i, key in enumerate(its):
                    variants = key.fold("variants").integers(index[i].size, self.train.variants).numpy()
                    index[i] += len(self.train) * variants.reshape(index[i].shape)
        return made
