"""One client of a deployment: a download in, an upload out; what it stores between messages, and where.

steps or state from version u to v
  our last upload was accepted, and we are at u   ->  train from v, upload
  it was not, and v is new                        ->  return to the state before it; then as above
  it was not, and v is what it was trained from   ->  the same upload again: nothing is trained twice (unless the server
                                                      went back, and made version v a second time)
  we are not at u, or the drift check fails       ->  `request_full_state`; the server sends the whole state
  the request is for an evaluation                ->  evaluate version v, and keep everything as it was

A client cannot know whether its upload arrived. It therefore stores two positions: the one that it trained from, and
the one after its upload. The next `Request` says which upload the server last accepted, and so which of the two is
valid; the other is dropped. Each upload counts exactly once on both sides, or on neither.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.tree import same, to_device
from thinwire.errors import Diverged, Drifted, ThinwireError, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation
from thinwire.federation.job import Job
from thinwire.federation.transfer import to_host
from thinwire.flower.records import dump, read
from thinwire.flower.sites import changing
from thinwire.protocol.client import (
    Group,
    drop_stale,
    initial_client_state,
    make_uploads,
    training_inputs,
    updates,
)
from thinwire.protocol.receive import Received, receive, request_full_state
from thinwire.protocol.round import EVALUATE, Request, Response
from thinwire.protocol.state import ClientState, PublicState
from thinwire.runs.files import write_atomically
from thinwire.secure.client import MakeCohort, SecureClient, SecureStore
from thinwire.training.backends import LoopTrainer
from thinwire.training.evaluation import Evaluation
from thinwire.wire import message as wire

KEEP_RUNS = 10  # past runs whose states a node keeps
_RUN = re.compile("[0-9a-f]{16}")  # the name of a run


class Position(NamedTuple):
    """The public state that a client has, and its own state."""

    public: PublicState
    state: ClientState


class ClientStore(NamedTuple):
    """Everything that a client stores.

    Args:
        positions: its position; or that before its last upload, and that after it.
        response: that upload.
        secure: what it stores of secure aggregation (`secure/client.py`).
    """

    positions: tuple[Position, ...]
    response: Response | None = None
    secure: SecureStore = SecureStore()

    def dump(self, first: PublicState) -> bytes:
        """As bytes: a SHA-256, then the record. A base equal to that of version 0 is left out.

        Args:
            first: the public state of version 0.
        """
        positions = tuple(
            at._replace(public=at.public._replace(base={})) if same(at.public.base, first.base) else at
            for at in self.positions
        )
        data = dump(self._replace(positions=positions))
        return hashlib.sha256(data).digest() + data

    @classmethod
    def load(cls, data: bytes, first: PublicState) -> ClientStore:
        """From bytes; a WireError if they are damaged.

        Args:
            data: the result of `dump`.
            first: the public state of version 0.
        """
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise WireError("its SHA-256 does not match")
        store: ClientStore = read(cls, data[32:])
        positions = []
        for public, state in store.positions:
            moved = PublicState(public.version, *(to_device(tree, first.device) for tree in public[1:]))
            positions.append(Position(moved._replace(base=moved.base or first.base), state))
        return store._replace(positions=tuple(positions))


class Client:
    """Clients that train one at a time, with the results of the simulation.

    Args:
        engine: the device and how to compute on it.
        job: what is trained, on which examples. Only those of the requested client are read.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self.federation = Federation(engine, job)
        self.contract, self.job, self.first = self.federation.contract, job, self.federation.first
        self.model = replace(self.federation.model, products=None)
        self.trainer = self.federation.own_trainer or LoopTrainer()
        self.secure: SecureClient | None = None
        if job.method.secure_aggregation:
            self.secure = SecureClient(self.contract.schema, len(job.task.clients), job.cohort)

    def fresh(self, client: int) -> ClientStore:
        """The store of a client that has not taken part."""
        return ClientStore((Position(self.first, initial_client_state(self.contract, self.first, client)),))

    def respond(self, client: int, request: Request, before: bytes | None = None) -> tuple[Response, bytes]:
        """The response of a client, and what it stores.

        Args:
            client: its number.
            request: the server's request, not trusted.
            before: what it stored; None if it has not taken part. If it is damaged, it is as if it were lost.
        """
        store = None
        with suppress(WireError):
            store = ClientStore.load(before, self.first) if before else None
        store = after = store or self.fresh(client)
        try:
            if self.secure is not None:
                response, after = self.secure.respond(client, request, store, self._respond)
            elif request.phase in ("", EVALUATE):
                response, after = self._respond(client, request, store)
            else:
                raise WireError(f"a request of phase {request.phase[:20]!r}, but this method has no secure aggregation")
        except ThinwireError as error:  # nothing was changed
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        return response, before if before and after is store else after.dump(self.first)

    def _respond(
        self, client: int, request: Request, store: ClientStore, cohort: MakeCohort | None = None
    ) -> tuple[Response, ClientStore]:
        message = wire.unpack(request.data, self.contract.schema)
        newest, version = store.positions[-1], message.version
        accepted = store.response is None or request.accepted == newest.public.version
        position = newest if accepted else store.positions[0]
        is_known = position.public.version == version - message.behind
        if request.phase == EVALUATE:
            if not is_known:
                raise WireError("it has another state than the server knows, and gets the whole one in its next round")
            received = self._receive(client, request, position, message)
            state = drop_stale(position.state, received.synced)
            with self.federation.compute():
                return Response(b"", evaluation=self._evaluate(received.public, state, client)), store
        drifted = False
        if is_known or (message.kind == wire.STATE and not accepted):
            try:
                received = self._receive(client, request, position, message)
                is_same = version == newest.public.version and _is_same(received.public, newest.public)
                # a server that went back makes a version a second time; what was trained from the first is not repeated
                if store.response and not accepted and is_same:
                    return store.response, store
            except Drifted:
                drifted = True
        if not is_known or drifted:  # the whole state: from our version or, if the server is behind us, from version 0
            own = self.fresh(client) if position.public.version > version else ClientStore((position,))
            return Response(request_full_state(self.contract, own.positions[0].public.version, client)), own
        state = drop_stale(position.state, received.synced)
        response, after = self._train(client, received, state, cohort)
        return response, ClientStore((position, Position(received.public, after)), response)

    def _receive(self, client: int, request: Request, position: Position, message: wire.Message) -> Received:
        """The public state of a download, read from a position."""
        known = position.public
        if message.kind == wire.STATE:  # contains everything that differs from version 0
            known = self.first._replace(version=message.version - message.behind)
        return receive(self.contract, known, request.data, client)

    def _train(
        self, client: int, received: Received, state: ClientState, cohort: MakeCohort | None = None
    ) -> tuple[Response, ClientState]:
        """Train one client from what it received; its response and next state."""
        public, federation = received.public, self.federation
        group = Group(public, received.plan, (client,), (state,))
        work = federation.sampler.workload(public.version, (client,))
        # where no machine has a test set, the server asks for evaluations apart, each of the newest version
        evaluated = federation.test is not None and public.version and federation.is_evaluated(public.version)
        with federation.compute():
            evaluation = self._evaluate(public, state, client) if evaluated else None
            inputs = training_inputs(self.contract, self.model, group, work)
            outcome = self.trainer.train(inputs)
            update = to_host(updates(self.contract, group, inputs, outcome))()
            loss, samples = float(update.loss[0]), work.samples[0]
            if not math.isfinite(loss):
                raise Diverged(f"its training loss is {loss} over {samples} examples; try a smaller learning rate")
            print(
                f"thinwire: client {client} trained version {public.version}: {samples} examples, loss {loss:.4f}",
                flush=True,
            )
            masks = cohort(loss, samples) if cohort else None
            ((message, after),) = make_uploads(self.contract, group, update, masks)
        return Response(bytes(message), loss, samples, evaluation=evaluation), after

    def _evaluate(self, public: PublicState, state: ClientState, client: int) -> Evaluation | None:
        """The evaluation of a client's model, as far as its numbers are finite."""
        found = self.federation.client_evaluation(public, state, client)
        if found is None or not math.isfinite(found.loss):
            return None
        return found._replace(metrics={name: x for name, x in found.metrics.items() if math.isfinite(x)})


def _is_same(one: PublicState, other: PublicState) -> bool:
    return all(same(ours, theirs) for ours, theirs in zip(one[1:], other[1:], strict=True))


# -- where a node stores the states of its clients -----------------------------------------------------------------


@contextmanager
def private() -> Iterator[None]:
    """Everything that is created inside the block can be read by its owner only (umask 077 of the whole process)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def client_file(context: Any, run: str, number: int) -> Iterator[tuple[bytes | None, Callable[[bytes], None]]]:
    """What a client stored, None if nothing, and a function that stores; locked while it is used.

    The files of a run are in a folder of `state-dir` with the name of the run; only their owner may read them. When a
    run begins, the folders of past runs are removed (`clean_states`). Without `state-dir`, Flower's context has them.
    """
    name = f"client-{number}"
    if not (folder := context.node_config.get("state-dir")):
        from flwr.app import ConfigRecord

        record = context.state.get(name)
        yield record and record["kept"], lambda data: context.state.update({name: ConfigRecord({"kept": data})})
        return
    if not _RUN.fullmatch(run):  # it is used as the name of a folder
        raise WireError(f"the name of the run must be 16 hexadecimal digits, not {run[:40]!r}")
    states = Path(str(folder)) / run
    with private():
        if not states.is_dir():
            states.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # another process removes them, too
                clean_states(states)
        file = states / f"{name}.kept"
        with changing(file):  # a repeated request waits for the first
            yield file.read_bytes() if file.is_file() else None, partial(write_atomically, file)


def clean_states(current: Path, runs: int = KEEP_RUNS) -> list[Path]:
    """Remove the states of past runs; returns the folders that were removed.

    Args:
        current: the folder of the run that begins, which is never removed.
        runs: number of past runs whose states are kept, those that trained last.

    A client of a removed run that is resumed nevertheless requests the full state. Folders whose names are not those
    of runs are not touched.
    """
    past = [one for one in current.parent.iterdir() if _RUN.fullmatch(one.name) and one != current and one.is_dir()]
    old = sorted(past, key=lambda states: states.stat().st_mtime)[: max(0, len(past) - runs)]
    for states in old:
        shutil.rmtree(states, ignore_errors=True)
    return old
