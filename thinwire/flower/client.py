"""One client of a deployment: a download in, an upload out.

steps or state from version u to v
  our last upload was accepted, and we are at u   ->  train from v, upload
  it was not, and v is new                        ->  return to the state before it; then as above
  it was not, and v is what it was trained from   ->  the same upload again: nothing is trained twice (unless the server
                                                      went back, and made version v anew)
  we are not at u, or the drift check fails       ->  `request_full_state`; the server sends the whole state
"""

from __future__ import annotations

from dataclasses import replace

from thinwire.core.tree import same
from thinwire.errors import Drifted, ThinwireError
from thinwire.flower.client_store import ClientStore, Position, Request, Response
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
from thinwire.training.loop import LoopTrainer
from thinwire.wire import message as wire


class Client:
    """Clients that train one at a time, with the results of the simulation.

    Args:
        engine: the device and how to compute on it.
        job: what is trained, on which examples. Only those of the requested client are read.
    """

    def __init__(self, engine: EngineSettings, job: Job) -> None:
        self.federation = Federation(replace(engine, backend="loop", chunk=1), job)
        self.contract, self.job = self.federation.contract, job
        self.model = replace(self.federation.model, products=None)

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
            return self._respond(client, request, store)
        except ThinwireError as error:  # nothing was changed
            return Response(b"", error=f"{type(error).__name__}: {error}"), store

    def _respond(self, client: int, request: Request, store: ClientStore) -> tuple[Response, ClientStore]:
        message = wire.unpack(request.data, self.contract.schema)
        start, version = message.version - message.behind, message.version
        newest = store.positions[-1]
        accepted = store.response is None or request.accepted == newest.public.version
        repeated = not accepted and version == newest.public.version
        if store.response and repeated and self._is_same(client, request, store):
            return store.response, store
        position = newest if accepted else store.positions[0]
        if position.public.version != start:
            return self._lost(client, ClientStore((position,)), version)
        known = position.public
        if message.kind == wire.STATE:  # contains everything that differs from version 0
            known = self.first._replace(version=start)
        try:
            received = receive(self.contract, known, request.data, client)
        except Drifted:
            return Response(request_full_state(self.contract, start, client)), ClientStore((position,))
        state = drop_stale(position.state, received.synced)
        response, after = self._train(client, received, state)
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

    def _train(self, client: int, received: Received, state: ClientState) -> tuple[Response, ClientState]:
        """Train one client from what it received; its response and next state."""
        public = received.public
        group = Group(public, received.plan, (client,), (state,))
        work = self.federation.sampler.workload(public.version, (client,))
        with self.federation.compute():
            accuracy = self._accuracy(client, public, state)
            inputs = training_inputs(self.contract, self.model, group, work)
            outcome = LoopTrainer().train(inputs)
            updates = begin_updates(self.contract, group, inputs.start, outcome)()
            (message,), (after,) = make_uploads(self.contract, group, updates, work.samples)
        return Response(bytes(message), float(updates.loss[0]), work.samples[0], accuracy=accuracy), after

    def _accuracy(self, client: int, public: PublicState, state: ClientState) -> float:
        """The accuracy of the received model on the client's validation examples; -1 where it is not evaluated."""
        if not public.version or not self.federation.is_evaluated(public.version):
            return -1.0
        found = self.federation.client_evaluation(public, state, client)
        return -1.0 if found is None or found.accuracy is None else found.accuracy

    def _lost(self, client: int, store: ClientStore, version: int) -> tuple[Response, ClientStore]:
        """Request the whole state: from our version, or, if the server is behind us, from version 0."""
        if store.positions[0].public.version > version:
            store = self.fresh(client)
        return Response(request_full_state(self.contract, store.positions[0].public.version, client)), store
