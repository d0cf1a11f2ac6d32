"""Training backend that trains one client on each core of a CPU.

A step of a small model is too little work to be distributed over cores; whole clients are not. Each thread computes on
one core with its own copy of the model, because `functional_call` replaces the module's weights while it runs. The
result of a client does not depend on the thread that trains it: same seed, same bits, with any number of cores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from queue import SimpleQueue

import torch

from thinwire.core import threads
from thinwire.training.inputs import TrainableModel, TrainingInputs, TrainingOutcome
from thinwire.training.loop import stack_outcomes, train_client
from thinwire.training.step import no_randomness


class ThreadPoolTrainer:
    """Trains clients in a pool of threads that is kept from round to round.

    The pool has as many threads as torch may use (`torch.get_num_threads()`, `OMP_NUM_THREADS`); with one, no thread is
    started.
    """

    def __init__(self) -> None:
        self.workers = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        self._copied: tuple[TrainableModel, SimpleQueue[TrainableModel]] | None = None

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train several clients at a time. Raises UnsupportedModel for a model that draws random numbers."""
        idle, clients = self._copies(inputs.model), len(inputs.work.samples)

        def train_one(i: int) -> TrainingOutcome:
            model = idle.get()
            try:
                return train_client(replace(inputs, model=model), i)
            finally:
                idle.put(model)

        with no_randomness(inputs.work.index.device):  # all threads share one generator
            if self.workers == 1:
                return stack_outcomes([train_one(i) for i in range(clients)])
            return stack_outcomes(self._train_all(train_one, clients))

    def _train_all(self, train_one: Callable[[int], TrainingOutcome], clients: int) -> list[TrainingOutcome]:
        """The outcomes of all clients, in order."""
        if self._pool is None:
            self._pool = threads.start(self.workers)
            # torch imports some modules lazily, which two threads must not do at the same time
            self._pool.submit(train_one, 0).result()
        jobs = [self._pool.submit(train_one, i) for i in range(clients)]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            for job in jobs:
                job.cancel()
            wait(jobs)
        for job in jobs:  # raise the error of the first client that has one
            if not job.cancelled() and (error := job.exception()):
                raise error
        return [job.result() for job in jobs]

    def _copies(self, model: TrainableModel) -> SimpleQueue[TrainableModel]:
        """One copy of the model for each thread; the copies of the last model are kept."""
        if self._copied is None or self._copied[0] is not model:
            self._copied = model, SimpleQueue()
            for _ in range(self.workers):
                self._copied[1].put(copy.deepcopy(model))
        return self._copied[1]
