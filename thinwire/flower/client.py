"""One client's side of a deployment: a message in, a message out.

steps or state from version u to v
  our last answer counted, and we are at u        ->  train from v, answer
  it did not, and v is new                        ->  go back to where we were before it; then as above
  it did not, and v is what it was trained from   ->  the same answer again: nothing is trained twice
  we are not at u, or the guard says so           ->  `request_full_state`; the server sends the whole state
"""

from __future__ import annotations

from dataclasses import replace

from thinwire.errors import Drifted, ThinwireError
from thinwire.flower.client_store import Answer, Ask, ClientStore, Place
from thinwire.protocol.download import receive, request_full_state
from thinwire.protocol.round import cohort_round, forget, initial_client_state
from thinwire.protocol.state import Public
from thinwire.runtime.job import Job
from thinwire.simulation.engine import LocalEngine
from thinwire.simulation.simulation import Simulation
from thinwire.wire import message as wire


class Client(Simulation):
    """A client that trains alone what the simulation trains in its cohort.

    Args:
        engine: the device; clients of a deployment always train one by one.
        job: what is learnt, and from which examples. Only those of the asked client are touched.
    """

    def __init__(self, engine: LocalEngine, job: Job) -> None:
        super().__init__(replace(engine, backend="loop", chunk=1), job)

    @property
    def first(self) -> Public:
        """The public state of version 0."""
        return self.public

    def fresh(self, client: int) -> ClientStore:
        """What a client keeps that was never asked."""
        return ClientStore((Place(self.first, initial_client_state(self.contract, self.first, client)),))

    def answer(self, client: int, ask: Ask, kept: ClientStore | None = None) -> tuple[Answer, ClientStore]:
        """What a client answers, and what it keeps.

        Args:
            client: its number.
            ask: the server's message, not trusted.
            kept: what it kept; None if it was never asked, or lost it.
        """
        kept = kept or self.fresh(client)
        try:
            return self._answer(client, ask, kept)
        except ThinwireError as error:  # it is where it was, and says why
            return Answer(b"", error=f"{type(error).__name__}: {error}"), kept

    def _answer(self, client: int, ask: Ask, kept: ClientStore) -> tuple[Answer, ClientStore]:
        message = wire.unpack(ask.data, self.contract.schema)
        start, version = message.version - message.behind, message.version
        newest = kept.places[-1]
        arrived = kept.said is None or ask.heard == newest.public.version  # whether our last answer counted
        if kept.said and not arrived and version == newest.public.version:
            return kept.said, kept
        place = newest if arrived else kept.places[0]
        if place.public.version != start:
            return self._lost(client, ClientStore((place,)), version)
        known = place.public
        if message.kind == wire.STATE:  # holds all that is not as in version 0
            known = self.first._replace(version=start)
        try:
            public, touched, plan = receive(self.contract, known, ask.data, client)
        except Drifted:
            return Answer(request_full_state(self.contract, start, client)), ClientStore((place,))
        with self.kernels():
            work = self.draws.workload(version, (client,))
            reply = cohort_round(
                self.training,
                replace(self.model, products=None),
                public,
                self.contract.basis(version, self.device),
                plan,
                (client,),
                [forget(place.state, touched)],
                work,
                "loop",
            )
        said = Answer(bytes(reply.messages[0]), float(reply.loss[0]), work.samples[0])
        return said, ClientStore((place, Place(public, reply.states[0])), said)

    def _lost(self, client: int, kept: ClientStore, version: int) -> tuple[Answer, ClientStore]:
        """Ask for the whole state: from where we are, or, if the server is behind us, from the very beginning."""
        if kept.places[0].public.version > version:
            kept = self.fresh(client)
        return Answer(request_full_state(self.contract, kept.places[0].public.version, client)), kept
