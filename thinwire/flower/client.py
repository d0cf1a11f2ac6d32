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
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from thinwire.core.tree import Tree, same
from thinwire.errors import CheckpointError, Drifted, ThinwireError, WireError
from thinwire.federation.engine import EngineSettings
from thinwire.federation.federation import Federation
from thinwire.federation.job import Job
from thinwire.federation.transfer import to_host
from thinwire.flower.transport import ClientResponse, Deadline
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
from thinwire.runs.checkpoint import pack
from thinwire.runs.files import INVALID, unpack, write_atomically
from thinwire.secure.client import MakeCohort, SecureClient
from thinwire.secure.keys import need_cryptography
from thinwire.training.backends import LoopTrainer
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
    secure: bytes = b""

    def dump(self, first: PublicState) -> bytes:
        """As bytes: a SHA-256, then safetensors. A base equal to that of version 0 is left out.

        Args:
            first: the public state of version 0.
        """
        positions = tuple(
            at._replace(public=at.public._replace(base={})) if same(at.public.base, first.base) else at
            for at in self.positions
        )
        tensors: Tree = {}
        meta = {"thinwire": json.dumps(pack(self._replace(positions=positions), tensors))}
        data = save({name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}, meta)
        return hashlib.sha256(data).digest() + data

    @classmethod
    def load(cls, data: bytes, first: PublicState) -> ClientStore:
        """From bytes; a CheckpointError if they are damaged.

        Args:
            data: the result of `dump`.
            first: the public state of version 0.
        """
        body = data[32:]
        if hashlib.sha256(body).digest() != data[:32]:
            raise CheckpointError("what this client stored is damaged: its SHA-256 does not match")
        try:
            header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
            store: ClientStore = unpack(cls, json.loads(header["__metadata__"]["thinwire"]), load(body))
        except (*INVALID, SafetensorError) as error:
            raise CheckpointError(f"what this client stored cannot be read ({type(error).__name__})") from error
        positions = []
        for public, state in store.positions:
            trees = ({name: one.to(first.device) for name, one in tree.items()} for tree in public[1:])
            known = PublicState(public.version, *trees)
            positions.append(Position(known._replace(base=known.base or first.base), state))
        return store._replace(positions=tuple(positions))


class Client:
    """Clients that train one at a time, with the results of the simulation.

    Args:
        engine: the device and how to compute on it.
        job: what is trained, on which examples. Only those of the requested client are read.
    """

    def __init__(self, engine: EngineSettings, job: Job) -> None:
        self.federation = Federation(replace(engine, backend="loop", chunk=1), job)
        self.contract, self.job, self.first = self.federation.contract, job, self.federation.first
        self.model = replace(self.federation.model, products=None)
        self.trainer = self.federation.own_trainer or LoopTrainer()
        self.secure: SecureClient | None = None
        if job.method.secure_aggregation:
            need_cryptography()
            self.secure = SecureClient(self.contract.schema, len(job.task.clients), job.cohort)

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
                found = self.federation.client_evaluation(received.public, state, client)
            return Response(b"", evaluation=found), store
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
            evaluation = federation.client_evaluation(public, state, client) if evaluated else None
            inputs = training_inputs(self.contract, self.model, group, work)
            outcome = self.trainer.train(inputs)
            update = to_host(updates(self.contract, group, inputs, outcome))()
            loss, samples = float(update.loss[0]), work.samples[0]
            masks = cohort(loss, samples) if cohort else None
            ((message, after),) = make_uploads(self.contract, group, update, masks)
        return Response(bytes(message), loss, samples, evaluation=evaluation), after


def _is_same(one: PublicState, other: PublicState) -> bool:
    return all(same(ours, theirs) for ours, theirs in zip(one[1:], other[1:], strict=True))


class InMemory:
    """A transport to clients in the same process. What each stores is serialized, as on a disk."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.stored: dict[int, bytes] = {}
        self.waiting: dict[int, Request] = {}  # requests of exchanges that were ended before their last response

    def clients(self) -> Set[int]:
        """All clients of the task."""
        return frozenset(range(len(self.client.job.task.clients)))

    def name(self, client: int) -> str:
        """Its number: clients in memory have no names."""
        return f"client {client}"

    def sites(self) -> Mapping[int, str]:
        """None: there is no roster in memory."""
        return {}

    def exchange(self, requests: Mapping[int, Request], deadline: Deadline) -> Iterable[ClientResponse]:
        """Let one client after the other respond."""
        self.waiting |= requests
        for number, request in requests.items():
            del self.waiting[number]
            yield ClientResponse(number, self.respond(number, request))

    def remaining(self, deadline: Deadline) -> Iterable[ClientResponse]:
        """Let the clients respond whose exchange was ended before."""
        while self.waiting:
            number = next(iter(self.waiting))
            yield ClientResponse(number, self.respond(number, self.waiting.pop(number)))

    def respond(self, number: int, request: Request) -> Response:
        """The response of one client."""
        before = self.stored.get(number)
        store = ClientStore.load(before, self.client.first) if before else None
        response, store = self.client.respond(number, request, store)
        self.stored[number] = store.dump(self.client.first)
        return response


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
            clean_states(states)
        with _locked(states / f"{name}.lock"):
            file = states / f"{name}.kept"
            yield file.read_bytes() if file.is_file() else None, partial(write_atomically, file)


def clean_states(current: Path, runs: int = KEEP_RUNS) -> list[Path]:
    """Remove the states of past runs; returns the folders that were removed.

    Args:
        current: the folder of the run that begins, which is never removed.
        runs: number of past runs whose states are kept, the newest ones.

    A client of a removed run that is resumed nevertheless requests the full state. Folders whose names are not those
    of runs, and those of runs that are just training, are not touched.
    """
    past = [one for one in current.parent.iterdir() if one.is_dir() and _RUN.fullmatch(one.name) and one != current]
    return [one for one in sorted(past, key=_changed, reverse=True)[runs:] if _remove(one)]


def _changed(states: Path) -> float:
    """When a folder or a file in it changed last; a folder that another process has just removed counts as new."""
    try:
        return max(file.stat().st_mtime for file in (states, *states.iterdir()))
    except OSError:
        return math.inf


def _remove(states: Path) -> bool:
    """Remove the folder of a run, unless one of its clients is training."""
    with ExitStack() as locks:
        try:
            for lock in states.glob("client-*.lock"):
                locks.enter_context(_locked(lock, wait=False))
        except BlockingIOError:
            return False
        shutil.rmtree(states, ignore_errors=True)
    return True


@contextmanager
def _locked(file: Path, wait: bool = True) -> Iterator[None]:
    """Lock a file; a repeated request waits for the first."""
    with file.open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        yield
