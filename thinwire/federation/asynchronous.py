"""Asynchronous rounds in a simulation: clients take their time, and a round is closed by the uploads that arrive first.

    round:   ask clients until enough train -> train them now -> take the uploads that arrive first -> next version

A client is trained when it is asked, because what it sends depends on nothing that happens later; its upload is kept
until its time on the simulated clock has come (`Flight`). An upload is decoded as of the version that it is based on,
and its weight falls with its staleness. With equal speeds and a concurrency of 1 all of this is a synchronous round,
bit for bit.

A deployment has no simulated clock: who arrived when is recorded there, and a replay takes it from the record.
"""

from __future__ import annotations

import time

from thinwire.errors import Diverged, WireError
from thinwire.federation.client_states import ClientStates
from thinwire.federation.engine import EngineSettings
from thinwire.federation.evaluation import evaluated
from thinwire.federation.federation import OnMessage
from thinwire.federation.groups import CohortResult, OpenRound
from thinwire.federation.job import Flight, Job, RoundRecord, RunState
from thinwire.federation.pipeline import Pipeline
from thinwire.federation.simulation import Simulation
from thinwire.protocol.server import Terms, close_round
from thinwire.protocol.setup import plan_round
from thinwire.protocol.upload import Upload, decode_upload, trained_by_tier
from thinwire.schedules.base import Plan


class AsynchronousSimulation(Simulation):
    """A simulation in which a round does not wait for all clients that were asked; see `Asynchronous`."""

    def __init__(self, engine: EngineSettings, job: Job) -> None:
        super().__init__(engine, job)
        self.pipeline = Pipeline(self.device, on=False)  # the next cohort is not known before the uploads are there

    def _round(self, state: RunState, on_message: OnMessage | None) -> tuple[RunState, RoundRecord]:
        began, number, version = time.perf_counter(), state.round + 1, state.server.public.version
        state = state if state.round else self.choose_backend(state)
        plan = plan_round(self.contract, state.server)
        opened = self.open(state, plan, self._asked(state))
        try:
            with self.federation.compute(state.onednn):
                state, result = self._train(state, opened, None)
            flights = self._flights(state, opened, result)
            taken, uploads = self._taken(state, plan, flights)
            opened = opened._replace(uploads={one.client: one.message for one in taken})
            used = {one.client: one for one in taken if one.client in uploads}
            loss = self._loss(CohortResult({}, {}, {i: one.loss for i, one in used.items()}))
            closed = close_round(self.contract, state.server, plan, uploads, Terms(len(self.job.task.clients)))
        except Diverged as error:
            raise Diverged(f"round {number}: {error}", self._sent(opened, on_message)) from error
        sent = self._sent(opened, on_message)
        new = ((i, one.state) for i, one in used.items() if i not in closed.refused)
        arrived = {one.client for one in taken}
        after = state._replace(
            round=number,
            server=closed.server,
            clients=ClientStates.of(state.clients).updated(new),
            cohort=tuple(used),
            sync_counts=state.sync_counts.add(self.contract.at(version), plan, used),
            clock=max([state.clock, *(one.arrives for one in taken)]),
            flights=tuple(one for one in flights if one.client not in arrived),
        )
        record = self._record(opened, closed, loss, sent)._replace(
            clients=len(used),
            refused=len(closed.refused) + len(taken) - len(used),
            clock=self.clock.shown(after),
            staleness=sum(version - one.version for one in used.values()) / len(used),
        )
        if self.federation.averages or self.federation.is_evaluated(number):
            with self.federation.compute(state.onednn):
                after, record = evaluated(self.federation, after, record)
        return after, record._replace(seconds=time.perf_counter() - began)

    def _asked(self, state: RunState) -> tuple[int, ...]:
        """The clients that are asked at the beginning of a round, in addition to those that still train."""
        sampler, version = self.federation.sampler, state.server.public.version
        if recorded := self.federation.arrivals:
            later = (arrived for number, arrived in recorded.items() if number > state.round)
            return tuple(sorted(i for arrived in later for i, base in arrived.items() if base == version))
        most = self.job.method.asynchronous.clients(sampler.size, len(self.federation.eligible))
        training = {one.client for one in state.flights}
        idle = [i for i in sampler.order(state.round) if i not in training]
        return tuple(idle[: most - len(training)])

    def _flights(self, state: RunState, opened: OpenRound, result: CohortResult) -> tuple[Flight, ...]:
        """All clients that train, in the order in which they were asked."""
        version = state.server.public.version
        arrives = self.clock.arrivals(state, opened.download, result.messages)
        new = (
            Flight(i, version, arrives[i], bytes(message), result.states[i], result.losses[i])
            for i, message in result.messages.items()
        )
        return (*state.flights, *new)

    def _taken(
        self, state: RunState, plan: Plan, flights: tuple[Flight, ...]
    ) -> tuple[list[Flight], dict[int, Upload]]:
        """The uploads that arrive until the round is closed, and those of them that are used, decoded."""
        taken, uploads, size = list[Flight](), dict[int, Upload](), self.federation.sampler.size
        waiting = sorted(flights, key=lambda one: one.arrives)  # stable: clients that were asked first are first
        if recorded := self.federation.arrivals:
            now = recorded[state.round + 1]
            waiting, size = [one for one in waiting if now.get(one.client) == one.version], len(now)
        for one in waiting:
            if len(uploads) == size:
                break
            taken.append(one)
            upload = self._decoded(state, plan, one)
            if upload is not None:
                uploads[one.client] = upload
        return taken, uploads

    def _decoded(self, state: RunState, plan: Plan, flight: Flight) -> Upload | None:
        """An upload with its staleness; None if it is too stale, or of other blocks than this round synchronizes."""
        public, version, client = state.server.public, flight.version, flight.client
        staleness = public.version - version
        if self.job.method.asynchronous.is_too_stale(staleness):
            return None
        contract = self.contract.at(version)
        mask = trained_by_tier(contract, public, [client])[contract.tier(client)]  # a mask that is fixed
        try:
            upload = decode_upload(contract, plan, version, client, flight.message, mask)
        except WireError:
            return None
        return upload._replace(staleness=staleness)
