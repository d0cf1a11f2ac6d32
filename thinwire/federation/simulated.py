"""Simulated clients: all of them on this machine, trained in groups from the server's own public state.

    sample -> downloads -> train -> uploads -> decode        every message is produced, as it would be sent

The cohort of a round, the order of every client's examples and the initial weights are functions of the seed alone,
independent of the method: two methods run with one seed see the same clients and the same batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from thinwire.core.parallel import each
from thinwire.errors import ConfigError, Diverged
from thinwire.federation.attacks import replaced
from thinwire.federation.backends import Backends
from thinwire.federation.evaluation import as_numbers, with_client_evaluations
from thinwire.federation.federation import Clients, Collected, Federation
from thinwire.federation.job import RoundRecord, RunState
from thinwire.federation.speed import ClientSpeeds, Speed
from thinwire.federation.transfer import to_host
from thinwire.protocol.client import (
    Group,
    Update,
    drop_stale,
    initial_client_state,
    make_uploads,
    training_inputs,
    updates,
)
from thinwire.protocol.receive import receive
from thinwire.protocol.round import Reply, Round
from thinwire.protocol.state import ClientState, hand_over
from thinwire.secure.masks import SecAggCohort
from thinwire.training.evaluation import Evaluation
from thinwire.training.inputs import Backend, Workload
from thinwire.wire.message import Parts


class GroupTask(NamedTuple):
    """Clients that are trained together, and how: everything that another process needs."""

    number: int  # rounds done before
    backend: Backend
    group: Group
    cohort: tuple[int, ...]
    work: Workload | None = None  # other batches than those of the round


class SimulatedClients(Clients):
    """All clients on this machine."""

    simulated = True

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        job, engine = self.job, federation.engine
        self.backends = Backends(federation)
        self.backend = self.backends.initial()
        if job.attack and job.attack.knows_others and (engine.chunk or engine.workers):
            raise ConfigError(
                "this attack uses the updates of the whole cohort, which must be trained together; write "
                "engine.chunk = 0 and engine.workers = 0"
            )
        everyone = job.task.clients
        self.attackers = job.attack.attackers(federation.key, len(everyone)) if job.attack else frozenset[int]()
        self.speeds: ClientSpeeds | None = None  # without a speed the simulated clock does not run
        if job.speed != Speed() or job.method.asynchronous.active:
            sizes = [len(everyone.client(i)) for i in range(len(everyone))]
            self.speeds = ClientSpeeds(job.speed, job.local, sizes, federation.key)

    def cohort(self, round: Round, state: RunState) -> tuple[int, ...]:
        """The clients of a round; within a window of the schedule the cohort stays the same."""
        keep, sampler, away = state.cohort and not round.plan.resample, self.federation.sampler, self.left_out(state)
        if not away:
            return state.cohort if keep else sampler.cohort(state.round)
        return tuple(i for i in (state.cohort if keep else sampler.order(state.round)) if i not in away)[: sampler.size]

    def collect(self, got: Collected) -> None:
        """Collect the uploads of the cohort."""
        round = got.round
        self.train_cohort(got, self.cohort(round, got.state))
        contract, clients = self.contract.at(round.version), sorted(got.cohort)
        for client in clients if contract.has_hints else ():
            round.hints(client)  # once for each tier, before threads need them
        for client, found in zip(
            clients, each(lambda i: self.usable(got, got.replies[i]), clients, contract.code.nbytes), strict=True
        ):
            self.accept(got, client, found)
        if got.refused and contract.method.secure_aggregation:  # masks cancel only in the sum of all
            raise Diverged(f"{next(iter(got.refused.values()))}; try a smaller learning rate")
        if self.speeds is not None:
            got.clock = max(self.arrivals(got).values())

    def train_cohort(self, got: Collected, cohort: tuple[int, ...]) -> None:
        """Train some clients; if a backend fails, the next one, or smaller groups, are tried."""
        server, contract = got.round.server, self.contract.at(got.round.version)
        known = got.state.clients
        states = {i: known.get(i) or initial_client_state(contract, server.public, i) for i in cohort}
        if any(one.unsent for one in states.values()):
            synced = {version: server.ledger.synced_since(version) for version in {s.version for s in states.values()}}
            states = {i: drop_stale(one, synced[one.version]) for i, one in states.items()}
        if contract.method.opt_owner == "place":
            states = hand_over(states, cohort, got.state.cohort, known)
        got.cohort, got.versions = cohort, {i: one.version for i, one in states.items()}
        while True:
            groups, how = list(self._groups(got, states)), (got.state.round, got.state.backend)
            try:
                with self.federation.compute():
                    for replies in self.answers([GroupTask(*how, group, cohort) for group in groups], got):
                        got.replies |= {one.client: one for one in replies}
                return
            except Exception as error:  # training is pure, so a failure changes nothing
                size, begun = max(len(group.clients) for group in groups), bool(got.replies)
                got.state, got.replies = self.backends.fall_back(got.state, error, size, begun), {}

    def count(self, got: Collected) -> None:
        """Count downloads and uploads. Downloads may still be encoded while the round is closed."""
        self.downloads(got)
        got.bytes_up = sum(len(one.message) for one in got.replies.values())

    def arrivals(self, got: Collected) -> dict[int, float]:
        """When the upload of each client arrives, on the simulated clock."""
        assert self.speeds is not None
        version, now, down = got.round.version, got.state.clock, self.downloads(got)
        return {
            i: now + self.speeds.seconds(i, version, len(down[i]), len(reply.message))
            for i, reply in got.replies.items()
        }

    def downloads(self, got: Collected) -> dict[int, Parts]:
        """The downloads of the cohort, encoded when they are first needed."""
        if not got.downloads:
            got.downloads = got.round.downloads.parts(got.versions)
            got.bytes_down, got.bytes_catchup = got.round.downloads.split(got.downloads)
        return got.downloads

    def _groups(self, got: Collected, states: Mapping[int, ClientState]) -> Iterator[Group]:
        """The cohort in groups of clients that start from the same public state and fit into memory together.

        With incremental downloads every client reaches the server's state, bit for bit, so nothing is replayed here;
        with full ones the clients of one tier decode the same coordinates.
        """
        full, tiers = self.job.method.download == "full", dict[int, list[int]]()
        engine, state = self.federation.engine, got.state
        for i in got.cohort:
            tiers.setdefault(self.contract.tier(i) if full else 0, []).append(i)
        for ids in tiers.values():
            public = state.server.public
            if full:
                before = self.federation.first._replace(version=states[ids[0]].version)
                public = receive(self.contract, before, bytes(self.downloads(got)[ids[0]]), ids[0]).public
            alone = 1 if self.job.local.trainer else 0  # clients may keep different things
            size = alone or state.chunk or engine.chunk or math.ceil(len(ids) / max(1, engine.workers))
            for part in (tuple(ids[at : at + size]) for at in range(0, len(ids), size)):
                yield Group(public, got.round.plan, part, tuple(states[i] for i in part))

    # -- local training ------------------------------------------------------------------------------------------------

    def answers(self, tasks: list[GroupTask], got: Collected) -> Iterator[list[Reply]]:
        """The replies of all groups."""
        return (self.answer(task, got) for task in tasks)

    def answer(self, task: GroupTask, got: Collected | None = None) -> list[Reply]:
        """Train a group and make its uploads.

        Args:
            task: the group.
            got: the round; None in another process.
        """
        group, version = task.group, task.group.public.version
        update = self.train(task)
        if update.loss.is_cuda:
            arrive = to_host(update)
            self.federation.sampler.plan(task.number + 1)  # while the update is copied
            update = arrive()
        if self.job.attack:
            key = self.federation.key.fold("attack", task.number, group.clients[0])
            update = replaced(self.job.attack, self.attackers, group, update, key)
        masks = SecAggCohort(task.cohort, self._secret) if self.job.method.secure_aggregation else None
        made = make_uploads(self.contract, group, update, masks)
        losses = update.loss.tolist()
        return [
            Reply(client, version, message, losses[i], update.samples[i], state)
            for i, (client, (message, state)) in enumerate(zip(group.clients, made, strict=True))
        ]

    def train(self, task: GroupTask) -> Update:
        """The updates of a group after local training on its batches of the round, on the device."""
        work = task.work or self.federation.sampler.workload(task.number, task.group.clients)
        inputs = training_inputs(self.contract, self.backends.models[task.backend], task.group, work)
        return updates(self.contract, task.group, inputs, self.backends.trainers[task.backend].train(inputs))

    def _secret(self, i: int, j: int) -> bytes:
        """A secret of two clients. The simulator deals them; real clients would agree on them."""
        key = self.federation.key.fold("secret").value.to_bytes(8, "little")
        return hashlib.blake2b(f"{i} {j}".encode(), key=key).digest()

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self, state: RunState, record: RoundRecord) -> RoundRecord:
        """The record with each client's model on its own validation examples, of all clients that have some."""
        found = list(self.evaluations(state).values())
        weights = [float(one.examples) for one in found] if self.federation.test is None else None
        return with_client_evaluations(record, found, weights)

    def evaluations(self, state: RunState, every: bool = False) -> dict[int, Evaluation]:
        """The evaluations of all clients that have validation examples; see `Federation.client_evaluation`.

        With `evaluate = "average"` it is the averaged model, except for clients whose model is not the public one:
        where the method has private blocks, and where the client has changes that it has not sent.
        """
        federation, public, tests = self.federation, state.server.public, self.job.task.client_tests
        private = self.contract.at(public.version).private
        average = federation.final(state) if federation.averages and not private else None
        found: dict[int, Evaluation] = {}
        for i in range(len(tests)) if tests is not None else ():
            own = state.clients.get(i)
            if own is not None:
                own = drop_stale(own, state.server.ledger.synced_since(own.version))
            one = federation.client_evaluation(public, own, i, average, every)
            if one is not None:
                found[i] = one
        return found

    def results(self, state: RunState) -> list[dict[str, Any]]:
        """The numbers of each client after the last round, also the metrics that rounds have of the test set only."""
        task = self.job.task
        with self.federation.compute():
            found = self.evaluations(state, every=True)
        return [
            {
                "client": task.client_names[i] if task.client_names else str(i),
                "training_examples": len(task.clients.client(i)),
                **as_numbers(one),
            }
            for i, one in found.items()
        ]
