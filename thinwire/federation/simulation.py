"""A federation on one machine, round by round, over real messages.

    round:   plan -> sample -> download -> train -> upload -> aggregate -> next version

The cohort of a round, the order of every client's examples and the initial weights are functions of the seed alone,
independent of the method: two methods run with one seed see the same clients and the same batches.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from thinwire.core.threads import LEAST, on_one_core, start
from thinwire.errors import Diverged
from thinwire.federation.attacked import Attackers
from thinwire.federation.backends import Backends
from thinwire.federation.client_states import ClientStates
from thinwire.federation.clock import Download, SimulatedClock
from thinwire.federation.engine import EngineSettings
from thinwire.federation.evaluation import evaluated
from thinwire.federation.federation import Federation, OnMessage, show_messages
from thinwire.federation.groups import CohortResult, GroupResult, GroupTask, OpenRound
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.lazy import Lazy
from thinwire.federation.pipeline import Pipeline, Trained, is_predictable, predict
from thinwire.federation.places import hand_over, left_behind
from thinwire.protocol.client import (
    Group,
    Updates,
    begin_updates,
    drop_stale,
    initial_client_state,
    make_uploads,
    training_inputs,
)
from thinwire.protocol.download import RoundOpening
from thinwire.protocol.receive import receive
from thinwire.protocol.server import ClosedRound, Terms, close_round
from thinwire.protocol.state import ClientState, ServerState
from thinwire.protocol.upload import decode_uploads
from thinwire.schedules.base import Plan
from thinwire.secure.masks import SecAggCohort, sum_masked
from thinwire.training.inputs import Backend, Workload
from thinwire.wire.bits import Bytes


class Simulation:
    """A job on one machine. The state goes in and comes out of `round`; everything here stays the same.

    Args:
        engine: the device and how to compute on it.
        job: what is trained, by which method, on which data.
    """

    def __init__(self, engine: EngineSettings, job: Job) -> None:
        self.engine, self.job = engine, job
        self.federation = Federation(engine, job)
        self.contract, self.device = self.federation.contract, self.federation.device
        self.backends = Backends(engine, job, self.federation)
        self.attackers = Attackers(job, engine)
        # an attack cannot be predicted
        ahead = self.device.type == "cuda" and not (engine.workers or job.attack or job.local.trainer)
        long = self.device.type == "cuda" and self.contract.code.nbytes >= LEAST
        self._beside = start(1) if long else None  # encodes long downloads on another core
        small = self.contract.coords.nbytes + self.contract.weights.nbytes < LEAST
        self.pipeline = Pipeline(self.device, on=ahead, small=small)
        self.clock = SimulatedClock(job)

    def start(self) -> RunState:
        """The state before the first round."""
        return self.federation.start(*self.backends.initial())

    def round(self, state: RunState, on_message: OnMessage | None = None) -> tuple[RunState, RoundRecord]:
        """One round: the state after it, and its record.

        Args:
            state: the state before it.
            on_message: is called with every message, as it would be sent.
        """
        with on_one_core() if self.device.type == "cuda" else nullcontext():
            return self._round(state, on_message)

    def _round(self, state: RunState, on_message: OnMessage | None) -> tuple[RunState, RoundRecord]:
        began, number, public = time.perf_counter(), state.round + 1, state.server.public
        state = state if state.round else self.choose_backend(state)
        plan, cohort = self.federation.sample(state)
        trained = self.pipeline.take(state.round, cohort, public.coords) if self.pipeline.trained else None
        ready = trained.ready if trained else self.pipeline.now() if self.pipeline.stream else None
        opened = self.open(state, plan, cohort, ready)
        try:
            with self.federation.compute(state.onednn):
                state, result = self._train(state, opened, trained)
            loss = self._loss(result)
            server = self.pipeline.on_host(state.server) if self.pipeline.trained else state.server
            with self.pipeline.in_parallel(ready) if server is state.server else nullcontext():
                closed = self._close(server, plan, result.messages)
        except Diverged as error:
            raise Diverged(f"round {number}: {error}", self._sent(opened, on_message)) from error
        if self.pipeline.trained:
            closed = closed._replace(server=self.pipeline.confirm(closed.server))
        sent = self._sent(opened, on_message)
        new = ((i, one) for i, one in result.states.items() if i not in closed.refused)
        left = left_behind(self.job.method.opt_owner, cohort, state.cohort, state.clients)
        after = state._replace(
            round=number,
            server=closed.server,
            clients=ClientStates.of(state.clients).updated((*left, *new)),
            cohort=cohort,
            sync_counts=state.sync_counts.add(self.contract.at(public.version), plan, result.messages),
            clock=self.clock.after_all(state, opened.download, result.messages),
        )
        record = self._record(opened, closed, loss, sent)._replace(clock=self.clock.shown(after))
        if self.federation.averages or self.federation.is_evaluated(number):
            with self.federation.compute(state.onednn), self.pipeline.in_parallel():
                after, record = evaluated(self.federation, after, record, self.pipeline.evaluation(after.server))
            self.pipeline.join()
        return after, record._replace(seconds=time.perf_counter() - began)

    def _sent(self, opened: OpenRound, on_message: OnMessage | None) -> tuple[int, int, int]:
        """Bytes of a round so far: up, down, catch-up."""
        number, down = opened.number + 1, opened.download()
        if on_message:
            messages = {i: b"".join(pieces) for i, pieces in down.messages.items()}
            show_messages(on_message, number, messages, {i: bytes(one) for i, one in opened.uploads.items()})
        up = sum(map(len, opened.uploads.values()))
        return up, down.ordinary, down.catchup

    def _record(self, opened: OpenRound, closed: ClosedRound, loss: float, sent: tuple[int, int, int]) -> RoundRecord:
        """The record of a round, without evaluation."""
        number, version = opened.number + 1, closed.server.public.version - 1
        private = self.job.method.privacy.active
        return RoundRecord(
            *(number, loss, None, None, *sent, len(opened.cohort), 0.0),
            lr=self.contract.at(version).client_opt(version).lr,
            refused=len(closed.refused),
            bounded=len(closed.bounded),
            epsilon=(self.federation.epsilon(number) or (None,))[0] if private else None,
        )

    def open(
        self, state: RunState, plan: Plan, cohort: tuple[int, ...], ready: torch.cuda.Event | None = None
    ) -> OpenRound:
        """The next round with the states of its clients and their downloads, which are encoded when first needed."""
        server, contract = self.pipeline.on_host(state.server), self.contract.at(state.server.public.version)
        known = {i: state.clients.get(i) or initial_client_state(contract, server.public, i) for i in cohort}

        def encode() -> Download:
            opening = RoundOpening(contract, server, plan.names)
            messages = opening.messages({i: known[i].version for i in cohort})
            return Download(messages, *opening.split([sum(map(len, pieces)) for pieces in messages.values()]))

        synced = {version: server.ledger.synced_since(version) for version in {s.version for s in known.values()}}
        own = {i: drop_stale(s, synced[s.version]) if s.unsent else s for i, s in known.items()}
        states = hand_over(contract.method.opt_owner, own, cohort, state.cohort, state.clients)
        waits = ready is not None and server is state.server  # for the GPU
        download = Lazy(encode, *((self.pipeline.stream, ready) if waits else ()))
        return OpenRound(state.round, plan, cohort, states, download, {})

    def choose_backend(self, state: RunState) -> RunState:
        """The state with the fastest backend, if it is still open: before the first round, on a CPU.

        A run directory records it before that round, so that a run that is resumed uses the same one.
        """
        if not self.backends.undecided(state):
            return state
        try:
            opened = self.open(state, *self.federation.sample(state))
            group = next(self._groups(state, opened))

            def run(backend: Backend, onednn: bool, work: Workload, clients: int) -> None:
                few = group._replace(clients=group.clients[:clients], states=group.states[:clients])
                with self.federation.compute(onednn):
                    self.train_group(GroupTask(state.round, backend, onednn, few, opened.cohort), work)

            return self.backends.choose(state, group, run)
        except Diverged as error:
            raise Diverged(f"round {state.round + 1}: {error}") from error

    def convolutions(self, state: RunState) -> str:
        """How convolutions are computed in training."""
        return self.backends.convolutions(state)

    def _groups(self, state: RunState, opened: OpenRound) -> Iterator[Group]:
        """The cohort in groups of clients that start from the same public state and fit into memory together.

        With incremental downloads every client reaches the server's state, bit for bit, so nothing is replayed here;
        with full ones the clients of one tier decode the same coordinates.
        """
        full, tiers = self.job.method.download == "full", dict[int, list[int]]()
        for i in opened.cohort:
            tiers.setdefault(self.contract.tier(i) if full else 0, []).append(i)
        for ids in tiers.values():
            public = state.server.public
            if full:
                before = self.federation.first._replace(version=opened.states[ids[0]].version)
                message = b"".join(opened.download().messages[ids[0]])
                public = receive(self.contract, before, message, ids[0]).public
            alone = 1 if self.job.local.trainer else 0  # clients may keep different things
            size = alone or state.chunk or self.engine.chunk or math.ceil(len(ids) / max(1, self.engine.workers))
            for part in (tuple(ids[at : at + size]) for at in range(0, len(ids), size)):
                yield Group(public, opened.plan, part, tuple(opened.states[i] for i in part))

    def _train(self, state: RunState, opened: OpenRound, trained: Trained | None) -> tuple[RunState, CohortResult]:
        """Train the cohort group by group. Where a backend fails, the next one, or smaller groups, are tried."""
        while True:
            results: list[tuple[tuple[int, ...], GroupResult]] = []
            groups = list(self._groups(state, opened))
            tasks = [GroupTask(opened.number, state.backend, state.onednn, g, opened.cohort) for g in groups]
            try:
                for group, result in zip(groups, self._results(state, opened, tasks, trained), strict=True):
                    results.append((group.clients, result))
                    opened.uploads.update(zip(group.clients, result.messages, strict=True))
                return state, CohortResult.of(results)
            except Exception as error:  # training is pure, so a failure changes nothing
                size = max(len(group.clients) for group in groups)
                state = self.backends.fall_back(state, error, size, bool(results), self.pipeline)
                trained = None

    def _results(
        self, state: RunState, opened: OpenRound, tasks: list[GroupTask], trained: Trained | None
    ) -> Iterator[GroupResult]:
        """The results of all groups. While a GPU trains, the host encodes downloads and plans the next batches."""
        for task in tasks:
            one = trained or self._local_training(task)
            wait = begin_updates(self.contract, task.group, one.inputs.start, one.outcome)
            alone = len(tasks) == 1 and not (state.chunk or self.engine.chunk)
            if alone and (self.device.type == "cuda" or self.pipeline.on) and state.round + 1 < self.job.rounds:
                self._work_ahead(state, one, wait.codes)
            if self._beside:
                opened.download.begin(self._beside)
            else:
                opened.download()
            yield self._uploads(task, one.inputs.work, wait())

    def train_group(self, task: GroupTask, work: Workload | None = None) -> GroupResult:
        """Train a group and make its uploads; on the clients' own batches of the round by default."""
        one = self._local_training(task, work)
        updates = begin_updates(self.contract, task.group, one.inputs.start, one.outcome)()
        return self._uploads(task, one.inputs.work, updates)

    def _local_training(self, task: GroupTask, work: Workload | None = None) -> Trained:
        """Local training of a group."""
        group = task.group
        work = work or self.federation.sampler.workload(task.number, group.clients)
        inputs = training_inputs(self.contract, self.backends.models[task.backend], group, work)
        return Trained(task.number, group, inputs, self.backends.trainers[task.backend].train(inputs), None)

    def _uploads(self, task: GroupTask, work: Workload, updates: Updates) -> GroupResult:
        """The uploads of a group after its training."""
        updates = self.attackers.replaced(task.number, task.group, updates) if self.job.attack else updates
        secagg = SecAggCohort(task.cohort, self._secret) if self.job.method.secure_aggregation else None
        messages, states = make_uploads(self.contract, task.group, updates, work.samples, secagg)
        return GroupResult(messages, states, updates.loss)

    def _work_ahead(self, state: RunState, trained: Trained, codes: Tensor | None) -> None:
        """On a GPU: train the next cohort speculatively, or plan its batches, while this one's uploads are made.

        The next version is evaluated then, too, if that is due.
        """
        number = state.round + 1
        contract, names = self.contract.at(state.server.public.version), trained.group.plan.names
        ahead = self.pipeline.on and number > 1 and state.backend == "graph"  # the first round tries the backend
        if not ahead or codes is None or not is_predictable(contract, state.server, names):
            self.federation.sampler.plan(number)
            return
        prediction = predict(contract, trained.group, trained.inputs.work.samples, codes)
        ready, public = self.pipeline.expect(prediction), trained.group.public
        public = public._replace(version=public.version + 1, coords=prediction.coords)
        clients = self.federation.sampler.cohort(number)
        group = Group(public, trained.group.plan, clients, (ClientState(public.version),) * len(clients))
        try:
            task = GroupTask(number, state.backend, state.onednn, group, clients)
            self.pipeline.trained = self._local_training(task)._replace(ready=ready)
            if self.federation.is_evaluated(number) and not self.federation.averages:
                with self.pipeline.in_parallel():
                    self.pipeline.evaluated = self.federation.begin_evaluation(public)
            if number + 1 < self.job.rounds:
                self.federation.sampler.plan(number + 1)
        except torch.OutOfMemoryError:  # two cohorts at a time do not fit
            self.pipeline.stop()

    def _close(self, server: ServerState, plan: Plan, up: dict[int, Bytes]) -> ClosedRound:
        """Decode the uploads and make the next version."""
        uploads = decode_uploads(self.contract, server.public, plan, up)
        terms = Terms(len(self.job.task.clients), sum_masked=sum_masked)
        return close_round(self.contract, server, plan, uploads, terms)

    def _loss(self, result: CohortResult) -> float:
        """The mean training loss of the cohort, weighted by examples."""
        loss = examples = 0.0
        for client, value in result.losses.items():
            count = len(self.job.task.clients.client(client))
            loss, examples = loss + value * count, examples + count
        if not math.isfinite(loss):
            raise Diverged(f"the training loss is {loss / examples}; try a smaller learning rate")
        return loss / examples

    def _secret(self, i: int, j: int) -> bytes:
        """A secret of two clients. The simulator deals them; real clients would agree on them."""
        key = self.federation.key.fold("secret").value.to_bytes(8, "little")
        return hashlib.blake2b(f"{i} {j}".encode(), key=key).digest()
