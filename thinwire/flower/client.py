"""One client of a deployment: a download in, an upload out.

steps or state from version u to v
  our last upload was accepted, and we are at u   ->  train from v, upload
  it was not, and v is new                        ->  return to the state before it; then as above
  it was not, and v is what it was trained from   ->  the same upload again: nothing is trained twice (unless the server
                                                      went back, and made version v a second time)
  we are not at u, or the drift check fails       ->  `request_full_state`; the server sends the whole state
  the request is for an evaluation                ->  evaluate version v, and keep everything as it was
"""

from __future__ import annotations

from dataclasses import replace

from thinwire.core.tree import same
from thinwire.errors import Drifted, ThinwireError, WireError
from thinwire.flower.client_store import EVALUATE, ClientStore, Position, Request, Response
from thinwire.flower.secure.client import MakeCohort, SecureClient
from thinwire.flower.secure.keys import need_cryptography
from thinwire.flower.secure.site_keys import SiteKeys
from thinwire.protocol.client import (
    Group,
    begin_updates,
    drop_stale,
    initial_client_state,
    make_uploads,
    training_inputs,
)
from thinwire.protocol.receive import Received, receive, request_full_state
from thinwire.protocol.state import ClientState, PublicState
from thinwire.runtime.engine import EngineSettings
from thinwire.runtime.federation import Federation
from thinwire.runtime.job import Job
from thinwire.training.backends import LoopTrainer
from thinwire.training.evaluation import Evaluation
from thinwire.wire import message as wire


class Client:
    """Clients that train one at a time, with the results of the simulation.

    Args:
        engine: the device and how to compute on it.
        job: what is trained, on which examples. Only those of the requested client are read.
        site_keys: the keys of sites, with which messages of secure aggregation are signed and checked.
    """

    def __init__(self, engine: EngineSettings, job: Job, site_keys: SiteKeys | None = None) -> None:
        self.federation = Federation(replace(engine, backend="loop", chunk=1), job)
        self.contract, self.job = self.federation.contract, job
        self.model = replace(self.federation.model, products=None)
        self.trainer = self.federation.own_trainer or LoopTrainer()
        self.secure: SecureClient | None = None
        if job.method.secure_aggregation:
            need_cryptography()
            self.secure = SecureClient(self.contract.schema, len(job.task.clients), job.cohort, site_keys)

    @property
    def first(self) -> PublicState:
        """The public state of version 0."""
        return self.federation.first

    def fresh(self, client: int) -> ClientStore:
        """The store of a client that has not taken part."""
        return ClientStore((Position(self.first, initial_client_state(self.contract, self.first, client)),))

    def respond(self, client: int, request: Request, store: ClientStore | None = None) -> tuple[Response, ClientStore]:
        """The response of a client, and what it stores.

        Args:
            client: its number.
            request: the server's request, not trusted.
            store: what it stored; None if it has not taken part, or lost it.
        """
        store = store or self.fresh(client)
        try:
            if self.secure is not None:
                return self.secure.respond(client, request, store, self._respond)
            if request.phase not in ("", EVALUATE):
                raise WireError(f"a request of phase {request.phase[:20]!r}, but this method has no secure aggregation")
            return self._respond(client, request, store)
        except ThinwireError as error:  # nothing was changed
            return Response(b"", error=f"{type(error).__name__}: {error}"), store

    def _respond(
        self, client: int, request: Request, store: ClientStore, cohort: MakeCohort | None = None
    ) -> tuple[Response, ClientStore]:
        message = wire.unpack(request.data, self.contract.schema)
        start, version = message.version - message.behind, message.version
        newest = store.positions[-1]
        accepted = store.response is None or request.accepted == newest.public.version
        repeated = not accepted and version == newest.public.version
        if store.response and repeated and request.phase != EVALUATE and self._is_same(client, request, store):
            return store.response, store
        position = newest if accepted else store.positions[0]
        if request.phase == EVALUATE:
            return self._evaluate(client, request, position, message), store
        if position.public.version != start:
            return self._lost(client, ClientStore((position,)), version)
        try:
            received = self._receive(client, request, position, message)
        except Drifted:
            return Response(request_full_state(self.contract, start, client)), ClientStore((position,))
        state = drop_stale(position.state, received.synced)
        response, after = self._train(client, received, state, cohort)
        return response, ClientStore((position, Position(received.public, after)), response)

    def _is_same(self, client: int, request: Request, store: ClientStore) -> bool:
        """Whether a request leads to the state that the last upload was trained from.

        A server that went back makes a version a second time; what was trained from the first is not sent again.
        """
        message = wire.unpack(request.data, self.contract.schema)
        start, before = message.version - message.behind, store.positions[0].public
        if message.kind == wire.STATE:
            before = self.first._replace(version=start)
        if before.version != start:
            return False
        try:
            public = receive(self.contract, before, request.data, client).public
        except Drifted:
            return False
        newest = store.positions[-1].public
        return all(same(ours, theirs) for ours, theirs in zip(public[1:], newest[1:], strict=True))

    def _receive(self, client: int, request: Request, position: Position, message: wire.Message) -> Received:
        """The public state of a download, read from a position."""
        known = position.public
        if message.kind == wire.STATE:  # contains everything that differs from version 0
            known = self.first._replace(version=message.version - message.behind)
        return receive(self.contract, known, request.data, client)

    def _evaluate(self, client: int, request: Request, position: Position, message: wire.Message) -> Response:
        """Evaluate the version of a download on the client's validation examples."""
        if position.public.version != message.version - message.behind:
            raise WireError("it has another state than the server knows, and gets the whole one in its next round")
        received = self._receive(client, request, position, message)
        state = drop_stale(position.state, received.synced)
        with self.federation.compute():
            return Response(b"", evaluation=self.federation.client_evaluation(received.public, state, client))

    def _train(
        self, client: int, received: Received, state: ClientState, cohort: MakeCohort | None = None
    ) -> tuple[Response, ClientState]:
        """Train one client from what it received; its response and next state."""
        public = received.public
        group = Group(public, received.plan, (client,), (state,))
        work = self.federation.sampler.workload(public.version, (client,))
        with self.federation.compute():
            evaluation = self._evaluation(client, public, state)
            inputs = training_inputs(self.contract, self.model, group, work)
            outcome = self.trainer.train(inputs)
            updates = begin_updates(self.contract, group, inputs.start, outcome)()
            secagg = cohort(float(updates.loss[0]), work.samples[0]) if cohort else None
            (message,), (after,) = make_uploads(self.contract, group, updates, work.samples, secagg)
        return Response(bytes(message), float(updates.loss[0]), work.samples[0], evaluation=evaluation), after

    def _evaluation(self, client: int, public: PublicState, state: ClientState) -> Evaluation | None:
        """The received model on the client's validation examples; None where it is not evaluated in training.

        Where no machine has a test set, the server asks for evaluations apart, each of the newest version.
        """
        asked = self.federation.test is None
        if asked or not public.version or not self.federation.is_evaluated(public.version):
            return None
        return self.federation.client_evaluation(public, state, client)

    def _lost(self, client: int, store: ClientStore, version: int) -> tuple[Response, ClientStore]:
        """Request the whole state: from our version, or, if the server is behind us, from version 0."""
        if store.positions[0].public.version > version:
            store = self.fresh(client)
        return Response(request_full_state(self.contract, store.positions[0].public.version, client)), store
