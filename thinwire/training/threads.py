"""Clients trained side by side on the cores of a CPU: one thread for each core, one client at a time in each.

A step of a small model is too little work to be shared out among cores; whole clients are not. Each thread computes on
one core with a copy of the model of its own, since `functional_call` lends the module its weights while it runs. What a
client learns does not depend on the thread that trains it, nor on when: same seed, same bits, with any number of cores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from queue import SimpleQueue

import torch

from thinwire.core import threads
from thinwire.training.local import Learner, TrainingInputs, TrainingOutcome, gathered, no_chance, train_one


class ThreadPoolTrainer:
    """The threads of a simulation and their models, kept from round to round.

    As many threads as torch may use (`torch.get_num_threads()`, `OMP_NUM_THREADS`); if that is one, none is started.
    """

    def __init__(self) -> None:
        self.workers = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        self._copied: tuple[Learner, SimpleQueue[Learner]] | None = None

    def train(self, lesson: TrainingInputs) -> TrainingOutcome:
        """As `local_train`, several clients at a time. Raises UnsupportedModel for a model that draws random numbers."""
        idle, clients = self._copies(lesson.learner), len(lesson.work)

        def one(i: int) -> TrainingOutcome:
            model = idle.get()
            try:
                return train_one(lesson, replace(lesson, learner=model).step(alone=True), lesson.first_opt(), i)
            finally:
                idle.put(model)

        with no_chance(lesson.work.index.device):  # the generator is one for all threads
            if self.workers == 1:
                return gathered([one(i) for i in range(clients)])
            return gathered(self._all(one, clients))

    def _all(self, one: Callable[[int], TrainingOutcome], clients: int) -> list[TrainingOutcome]:
        """The results of all clients in their order, whoever is done first."""
        if self._pool is None:
            self._pool = threads.start(self.workers)
            # torch imports parts of itself when they are first needed, which two threads must not do at once
            self._pool.submit(one, 0).result()
        jobs = [self._pool.submit(one, i) for i in range(clients)]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            for job in jobs:
                job.cancel()
            wait(jobs)
        for job in jobs:  # the error of the first client that has one
            if not job.cancelled() and (error := job.exception()):
                raise error
        return [job.result() for job in jobs]

    def _copies(self, learner: Learner) -> SimpleQueue[Learner]:
        """A copy of a model for each thread; those of the last one are kept."""
        if self._copied is None or self._copied[0] is not learner:
            self._copied = learner, SimpleQueue()
            for _ in range(self.workers):
                self._copied[1].put(copy.deepcopy(learner))
        return self._copied[1]
