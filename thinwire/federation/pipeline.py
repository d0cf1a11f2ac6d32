"""Pipeline for a GPU: train the next cohort speculatively while this round's uploads are encoded and decoded.

Where uploads are exact and the server takes a plain weighted mean, the next version can be computed on the GPU from the
outcome of training, before any message is encoded. The next cohort is then trained from the predicted coordinates while
the host packs, checks and decodes the messages of this round. The server still uses the messages alone: the prediction
is used only if its step has the bits of the ledger's newest entry, and training from a wrong prediction is discarded.

Of a small model a copy of the public state stays on the host. Downloads are encoded and rounds are closed on it by the
same additions, so that neither waits for the GPU.

This repeats the arithmetic of `Round.close` for one case (`predict`). Measured on an H200 (`benchmarks/speed`, two
runs each): CNN-2 with 100 clients 1.24x, the CIFAR CNN with 10 clients 1.20x (bf16) and 1.27x (tf32), CNN-2 with 10
clients no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.core.parallel import PARALLEL_BYTES, start
from thinwire.core.tree import Tree, Vector, add, bring, flatten, tmap, unstack, weighted_mean
from thinwire.federation.federation import Collected, Federation
from thinwire.federation.job import RunState
from thinwire.federation.simulated import GroupTask, SimulatedClients
from thinwire.federation.transfer import to_host
from thinwire.protocol.client import Group, Update
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Closed, Round
from thinwire.protocol.state import ClientState, PublicState, ServerState
from thinwire.protocol.upload import received_weight
from thinwire.training.evaluation import Evaluation
from thinwire.wire.message import Parts


class Trained(NamedTuple):
    """A cohort that was trained in advance."""

    task: GroupTask
    update: Update
    ready: torch.cuda.Event | None  # recorded when its initial coordinates were computed
    step: Tensor  # the predicted step, on the host
    evaluation: Callable[[], Evaluation] | None  # of the version that it was trained from


class PipelinedClients(SimulatedClients):
    """Simulated clients on a GPU. Each round, the next cohort is trained in advance where that is possible.

    A *stream* is a queue of GPU work that is processed in order; an *event* marks a position in it. On a CPU there are
    neither.
    """

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        device = federation.device
        self.on = True
        long = self.contract.code.nbytes >= PARALLEL_BYTES
        self._pool = start(1) if long else None
        self._encoding: Future[dict[int, Parts]] | None = None
        self._small = self.contract.coords.nbytes + self.contract.weights.nbytes < PARALLEL_BYTES
        # of high priority: the host waits for its short work, while long training runs beside it
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]
        self._next: Trained | None = None  # trained from the predicted next version
        self._now: Trained | None = None  # of this round
        self._ready: torch.cuda.Event | None = None  # after which the public state of this round can be read
        self._copy: tuple[Tree, PublicState] | None = None  # the newest coordinates, and their public state on the host

    # -- a round -------------------------------------------------------------------------------------------------------

    def open(self, round: Round, state: RunState) -> Collected:
        """A round, of which the training may have begun before; its public state is on the host, if a copy is there."""
        now, self._next = self._next, None
        if now is not None and now.task.group.public.coords is round.server.public.coords:
            same = (now.task.number, now.task.cohort) == (state.round, self.cohort(round, state))
            now = now if same else None
        self._now, self._ready = now, now.ready if now else self._mark()
        return super().open(replace(round, server=self._on_host(round.server)), state)

    def train(self, task: GroupTask) -> Update:
        """The updates of a group, unless it was trained before."""
        now = self._now
        if now is not None and (now.task.number, now.task.group.clients) == (task.number, task.group.clients):
            return now.update
        return super().train(task)

    def arrived(self, update: Update, task: GroupTask, got: Collected | None) -> Update:
        """The updates of a group on the CPU.

        While they are copied, the next cohort is trained speculatively, or its batches are planned, and long downloads
        are encoded on another core.
        """
        assert got is not None
        arrive, number = to_host(update), task.number + 1
        if task.group.clients == task.cohort and number < self.job.rounds:
            contract, code = self.contract.at(task.group.public.version), update.code
            ahead = self.on and number > 1 and task.backend == "graph"  # the first round tries the backend
            if ahead and isinstance(code, Vector) and is_predictable(contract, got.round):
                self._train_ahead(task, contract, update.samples, code)
            else:
                self.federation.sampler.plan(number)
        if self._pool is None:
            self.downloads(got)
        elif not got.downloads:
            self._encoding = self._pool.submit(self._encode, got)
        return arrive()

    def _train_ahead(self, task: GroupTask, contract: Contract, samples: tuple[int, ...], code: Vector) -> None:
        """Train the next cohort from the predicted version, which is evaluated then, too, if that is due."""
        federation, number, group = self.federation, task.number + 1, task.group
        step, coords = predict(contract, group, samples, code)
        if step.device.type == "cuda":
            step = torch.empty(step.shape, dtype=step.dtype, pin_memory=True).copy_(step, non_blocking=True)
        ready, public = self._mark(), group.public._replace(version=group.public.version + 1, coords=coords)
        clients = federation.sampler.cohort(number)
        states = (ClientState(public.version),) * len(clients)
        following = task._replace(number=number, group=Group(public, group.plan, clients, states), cohort=clients)
        try:
            self._next = Trained(following, super().train(following), ready, step, None)
            if federation.test is not None and federation.is_evaluated(number) and not federation.averages:
                with self._beside(ready):
                    begun = federation.begin_evaluation(federation.weights(public), dict(public.buffers))
                self._next = self._next._replace(evaluation=begun)
            if number + 1 < self.job.rounds:
                federation.sampler.plan(number + 1)
        except torch.OutOfMemoryError:  # two cohorts at a time do not fit
            self.stop()

    def downloads(self, got: Collected) -> dict[int, Parts]:
        """The downloads of the cohort."""
        encoding, self._encoding = self._encoding, None
        return encoding.result() if encoding else self._encode(got)

    def _encode(self, got: Collected) -> dict[int, Parts]:
        """Encode in parallel with training: from the copy on the host, or in a stream of their own."""
        with self._beside(self._ready if got.round.server is got.state.server else None):
            return super().downloads(got)

    def close(self, got: Collected) -> Closed:
        """The next version from the messages; the prediction is used if it has the same bits."""
        if self._next is None:
            if got.round.server is not got.state.server:  # the next version is made on the GPU
                got.round = replace(got.round, server=got.state.server)
            return super().close(got)
        with self._beside(self._ready if got.round.server is got.state.server else None):
            closed = super().close(got)
        return closed._replace(server=self._confirmed(closed.server, self._next))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in parallel with the cohort that is trained in advance."""
        with self._beside(self._next.ready if self._next else None):
            yield
        if self._next is not None and self._stream is not None:
            # GPU work that is submitted from now on can use the results
            torch.cuda.current_stream(self.federation.device).wait_stream(self._stream)

    def begun_evaluation(self, server: ServerState) -> Callable[[], Evaluation] | None:
        """The evaluation that was begun with the training of the next cohort."""
        known = self._next is not None and self._next.task.group.public.coords is server.public.coords
        return self._next.evaluation if self._next and known else None

    def stop(self) -> None:
        """Train nothing in advance any more, and discard what was."""
        self._next, self._now, self._copy, self.on = None, None, None, False

    # -- streams and copies --------------------------------------------------------------------------------------------

    def _mark(self) -> torch.cuda.Event | None:
        """An event for everything that was submitted to the GPU until now."""
        return None if self._stream is None else torch.cuda.current_stream(self.federation.device).record_event()

    @contextmanager
    def _beside(self, since: torch.cuda.Event | None) -> Iterator[None]:
        """Run GPU work in the side stream, after an event."""
        if self._stream is None or since is None:
            yield
            return
        self._stream.wait_event(since)
        with torch.cuda.stream(self._stream):
            yield

    def _on_host(self, server: ServerState) -> ServerState:
        """The same state with its public state on the host, if a copy is there; else the state itself."""
        if self._copy is None or self._copy[0] is not server.public.coords:
            return server
        return server._replace(public=self._copy[1])

    def _confirmed(self, server: ServerState, trained: Trained) -> ServerState:
        """The server's state, with the predicted coordinates if they are right; else training is discarded."""
        public, guess = server.public, trained.task.group.public
        if trained.ready is not None:
            trained.ready.synchronize()
        entry = memoryview(server.ledger.entries[-1] if server.ledger.entries else b"")
        step = trained.step.view(torch.uint8).numpy()  # the payload, which is the last part of an entry
        word = np.uint32 if len(step) % 4 == 0 else np.uint8
        if len(entry) >= len(step) and np.array_equal(np.frombuffer(entry[-len(step) :], word), step.view(word)):
            predicted = public._replace(base=guess.base, coords=guess.coords)
            self._copy = (guess.coords, _host_copy(public, guess.coords)) if self._small else None
            return server._replace(public=predicted)
        self.stop()  # a prediction that was wrong once would be wrong again
        if self._stream is None:
            return server
        torch.cuda.synchronize(self.federation.device)
        if public.device.type == "cpu":
            return server._replace(public=PublicState(public.version, *bring(public[1:], self.federation.device)))
        # copies: memory of the side stream must not be reused by it while the main stream reads it
        return server._replace(public=PublicState(public.version, *(tmap(torch.clone, tree) for tree in public[1:])))


def _host_copy(public: PublicState, coords: Tree) -> PublicState:
    """A public state on the host; its coordinates are one vector where these are."""
    copy = PublicState(public.version, *bring(public[1:], "cpu"))
    if isinstance(coords, Vector) and not isinstance(copy.coords, Vector):
        copy = copy._replace(coords=Vector(flatten(copy.coords), coords.spec))
    return copy


def is_predictable(contract: Contract, round: Round) -> bool:
    """Whether the next version is the weighted mean of exact uploads, and no part keeps a state."""
    method, version, server = contract.method, round.version, round.server
    exact = all(codec.exact for codec in (*method.ups, method.down, method.merge_codec))
    return (
        exact
        and method.sketch.is_identity
        and not method.space.reparametrized
        and method.aggregator.is_weighted_mean
        and not (method.privacy.active or method.mask.active or contract.private)
        and method.schedule.resamples(version + 1)
        and method.opt_lifetime != "run"
        and method.opt_owner == "client"
        and method.download == "incremental"
        and method.upload == "delta"
        and not (method.secure_aggregation or method.budget.tiers or method.next_stage)
        and not (server.opt or server.correction or contract.buffers.blocks or contract.has_client_correction)
        and not contract.shared.blocks
        and round.plan.names == contract.coords.named
        and contract.window(version) == contract.window(version + 1)
    )


def predict(contract: Contract, group: Group, samples: tuple[int, ...], codes: Vector) -> tuple[Tensor, Tree]:
    """The step of `Round.close` and the coordinates after it, by the same operations in the same order, on the device.

    Args:
        contract: the contract at this version.
        group: the clients.
        samples: number of examples of each.
        codes: their updates.
    """
    public, spec = group.public, contract.coords
    order = sorted(range(len(group.clients)), key=lambda i: group.clients[i])
    known = {count: received_weight(contract, count) for count in set(samples)}
    weights = [known[samples[i]] for i in order]
    mean = Vector(flatten(weighted_mean([unstack(codes, i) for i in order], weights)), spec)
    # blocks in one vector: a few kernels, not some for each block
    now = Vector(flatten(public.coords), spec)
    change, _ = contract.server_opt(public.version).server_step(mean, {}, now)
    return flatten(change), add(now, change)
