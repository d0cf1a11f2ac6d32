"""One client of a deployment: a download in, an upload out.

steps or state from version u to v
  our last upload was accepted, and we are at u   ->  train from v, upload
  it was not, and v is new                        ->  return to the state before it; then as above
  it was not, and v is what it was trained from   ->  the same upload again: nothing is trained twice
  we are not at u, or the drift check fails       ->  `request_full_state`; the server sends the whole state
"""

from __future__ import annotations

from dataclasses import replace

from thinwire.errors import Drifted, ThinwireError, WireError
from thinwire.flower.client_store import ClientStore, Position, Request, Response
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
from thinwire.training.loop import LoopTrainer
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
            if request.phase:
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
        if store.response and not accepted and version == newest.public.version:
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
        response, after = self._train(client, received, state, cohort)
        return response, ClientStore((position, Position(received.public, after)), response)

    def _train(
        self, client: int, received: Received, state: ClientState, cohort: MakeCohort | None = None
    ) -> tuple[Response, ClientState]:
        """Train one client from what it received; its response and next state."""
        public = received.public
        group = Group(public, received.plan, (client,), (state,))
        work = self.federation.sampler.workload(public.version, (client,))
        with self.federation.compute():
            accuracy = self._accuracy(client, public, state)
            inputs = training_inputs(self.contract, self.model, group, work)
            outcome = LoopTrainer().train(inputs)
            updates = begin_updates(self.contract, group, inputs.start, outcome)()
            secagg = cohort(float(updates.loss[0]), work.samples[0]) if cohort else None
            (message,), (after,) = make_uploads(self.contract, group, updates, work.samples, secagg)
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
