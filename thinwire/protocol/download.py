"""The way down: the shortest message that brings a client from its version to the current one, and its reading.

On incremental download each window (the rounds of one basis) that a client missed costs the missed entries or the coordinates
at its end, whichever is shorter; and all of it never more than the whole state, nor more than 512 bodies (128 under a
sketch): a client that is further behind is sent the state. Version 0 is never sent: all derive it from method, model
and seed. On full download it is always the coordinates, through the down codec.

A client that arrives and finds that its state is not the server's (`Drifted`) says so with `request_full_state`; the server
answers with `repair`, the whole state.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from thinwire.core.tree import all_finite, bring, restrict, to_device
from thinwire.errors import WireError
from thinwire.protocol.advance import advance, moved
from thinwire.protocol.drift_check import check_drift, pack_drift_check
from thinwire.protocol.fields import (
    EVERYONE,
    WindowSnapshot,
    expect_fields,
    pack_snapshot,
    planned_names,
    raw,
    read_snapshot,
    read_step,
    unraw,
)
from thinwire.protocol.setup import plan_round
from thinwire.protocol.state import Contract, Public, ServerState, device_of
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes

# -- on the server -----------------------------------------------------------------------------------------------------


def open_round(contract: Contract, server: ServerState, versions: Mapping[int, int]) -> dict[int, bytes]:
    """One message to each client of the cohort, the shortest that brings it from its version to the current one.

    Args:
        contract: the contract.
        server: the server's state.
        versions: the version that each client of the cohort holds.
    """
    return {client: b"".join(pieces) for client, pieces in RoundOpening(contract, server).messages(versions).items()}


def split_down(contract: Contract, server: ServerState, messages: Mapping[int, bytes]) -> tuple[int, int]:
    """Bytes of the ordinary broadcast, and bytes on top of it because clients had missed rounds.

    The ordinary part of a message is what a client that heard the previous version would have received.
    """
    return RoundOpening(contract, server).split([len(data) for data in messages.values()])


def repair(contract: Contract, server: ServerState, data: bytes, client: int) -> bytes:
    """The whole state, for a client that said it was lost.

    Args:
        contract: the contract.
        server: the server's state.
        data: what the client said (`request_full_state`), not trusted.
        client: its number.
    """
    contract = contract.at(server.public.version)
    message = wire.unpack(data, contract.schema.sent_by(client), contract.longest_up)
    if message.kind != wire.LOST:
        raise WireError(f"a message of kind {wire.KINDS[message.kind]!r} asks for no state, expected 'lost'")
    if message.version > server.public.version:
        raise WireError(f"a client is lost at version {message.version}, the server is at {server.public.version}")
    return b"".join(RoundOpening(contract, server).state(message.version, client))


class RoundOpening:
    """The messages that open one round; what they share is made at most once."""

    def __init__(self, contract: Contract, server: ServerState) -> None:
        self.contract, self.server = contract.at(server.public.version), server
        self._snapshots: dict[int, Bytes] = {}  # by tier
        self._stretches: dict[frozenset[str], bytes] = {}  # by the blocks in them
        self._asks: dict[bool, bytes] = {}  # with news or without
        self._crcs: dict[int, tuple[Bytes, int]] = {}  # by the id of a body, which is held so that the id stays its own

    def messages(self, versions: Mapping[int, int]) -> dict[int, wire.Pieces]:
        """One message to each client, in pieces; see `open_round`."""
        contract, out = self.contract, {}
        made: dict[tuple[int, int], wire.Pieces] = {}
        for client, version in versions.items():
            # on incremental download all tiers hear the same
            like = (version, contract.tier(client) if contract.method.download == "full" else 0)
            if like not in made:
                made[like] = self.shortest(version, client)
            out[client] = made[like]
        return out

    def split(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Ordinary bytes, and those of catching up, of messages of these sizes; see `split_down`."""
        total = sum(sizes)
        if self.contract.method.download == "full":
            return total, 0
        ordinary = wire.length(self.shortest(max(0, self.server.public.version - 1)))
        down = sum(min(one, ordinary) for one in sizes)
        return down, total - down

    def shortest(self, version: int, client: int = EVERYONE) -> wire.Pieces:
        """The shortest message to a client that holds this version; on incremental download it does not matter who it is."""
        contract = self.contract
        if contract.method.download == "full":
            return self.state(version, client)
        past = self.server.ledger.past_way(version)
        if past is None or len(past) >= contract.longest_way:  # at least one body is left for the open window
            return self.state(version, client)
        steps = self.steps(version, past)
        if (
            contract.window(self.server.public.version)
            and wire.length(steps) > contract.weights.nbytes + contract.coords.nbytes
        ):
            return min(steps, self.state(version, client), key=wire.length)
        return steps  # before the first merge no state is shorter: do not build it to find out

    def steps(self, version: int, past: tuple[bytes, ...]) -> wire.Pieces:
        """The way over entries and stretches."""
        now = self.server.public.version
        bodies = self._way(version, past)
        return wire.pack_pieces(wire.STEPS, now, bodies, self.contract.schema, now - version, self._crc)

    def _way(self, version: int, past: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The bodies of steps: past windows, the open one, and the ask."""
        left = self.contract.longest_way - len(past)
        return (*past, *self._open_window(version, left), self._ask(news=self.server.public.version > version))

    def state(self, version: int, client: int) -> wire.Pieces:
        """The whole state. Its plan says which blocks were synchronised since the client's version."""
        now = self.server.public.version
        snapshot = self.contract.method.download == "full"
        fields = {wire.COORDS: self._snapshot(client)} if snapshot else self._whole
        body = wire.pack_body(wire.Body(self.server.ledger.touched(version), fields), self.contract.schema)
        return wire.pack_pieces(wire.STATE, now, (body, self._ask(news=True)), self.contract.schema, now - version)

    def _open_window(self, version: int, most: int) -> tuple[bytes, ...]:
        """From a version, or else from the beginning of the open window, to now, in so many bodies at most."""
        contract, ledger = self.contract, self.server.ledger
        start = max(version, ledger.opened)
        entries, touched = ledger.since(start), ledger.touched(start)
        if entries is not None and len(entries) > most:
            entries = None
        if entries is not None and sum(map(len, entries)) <= contract.coords.restrict(touched).nbytes:
            return entries
        stretch = self._stretch(touched)
        return (stretch,) if entries is None or len(stretch) < sum(map(len, entries)) else entries

    def _stretch(self, touched: frozenset[str]) -> bytes:
        """Where these blocks are now."""
        if touched not in self._stretches:
            coords = restrict(self.public.coords, touched)
            self._stretches[touched] = pack_snapshot(self.contract, WindowSnapshot(touched, coords))
        return self._stretches[touched]

    def _crc(self, body: Bytes) -> int:
        """The CRC-32 of a body; many clients are sent the same."""
        if id(body) not in self._crcs:
            self._crcs[id(body)] = (body, zlib.crc32(body))
        return self._crcs[id(body)][1]

    @cached_property
    def public(self) -> Public:
        """The public state on the CPU, where bytes are made."""
        public = self.server.public
        return Public(public.version, *bring(public[1:], "cpu"))

    @cached_property
    def _whole(self) -> dict[int, Bytes]:
        contract, public = self.contract, self.public
        base = {wire.BASE: raw(public.base)} if contract.window(public.version) else {}
        return {wire.COORDS: raw(restrict(public.coords, contract.sendable.names)), **base}

    def _snapshot(self, client: int) -> Bytes:
        contract, public = self.contract, self.public
        tier = contract.tier(client)
        if tier not in self._snapshots:
            coords = restrict(public.coords, contract.sendable.names)
            # all clients of a tier read the same
            peer = contract.peer(public.version, EVERYONE, contract.moving)
            self._snapshots[tier], _ = contract.down(client).encode(coords, {}, peer)
        return self._snapshots[tier]

    @cached_property
    def _news(self) -> dict[int, Bytes]:
        public = self.public
        fields = {wire.SHARED: public.shared, wire.BUFFERS: public.buffers}
        return {field: raw(tree) for field, tree in fields.items() if tree}

    @cached_property
    def _guard(self) -> dict[int, Bytes]:
        contract = self.contract
        return {wire.DRIFT_CHECK: pack_drift_check(contract, self.server.public)} if _guarded(contract) else {}

    @cached_property
    def _plan(self) -> frozenset[str]:
        return plan_round(self.contract, self.server).names

    def _ask(self, *, news: bool) -> bytes:
        if news not in self._asks:
            fields = {**(self._news if news else {}), **self._guard}
            self._asks[news] = wire.pack_body(wire.Body(self._plan, fields), self.contract.schema)
        return self._asks[news]


def _guarded(contract: Contract) -> bool:
    """Whether messages down carry a guard: on full download there is nothing to come apart."""
    return contract.method.drift_check and contract.method.download == "incremental"


# -- on the clients ----------------------------------------------------------------------------------------------------


class Received(NamedTuple):
    """What a client knows after it has read a message."""

    public: Public  # the current public state; on full download, as far as the down codec lets it through
    touched: frozenset[str]  # synchronised since the client's version: what it held back of these is out of date
    plan: Plan  # which blocks the round wants to hear of


def receive(contract: Contract, public: Public, data: bytes, client: int = EVERYONE) -> Received:
    """A client's way to the current version: replay the entries, or take over the state.

    Raises Drifted where that does not lead to the server's state. The client then sends `request_full_state`, and reads the
    answer as one who knows nothing but the first state: `receive(contract, first._replace(version=...), answer)`.

    Args:
        contract: the contract.
        public: the public state that the client holds.
        data: the message, not trusted.
        client: the number of the client; needed where tiers of clients hear different codecs.
    """
    longest = max(stage.longest_down for stage in contract.stages)
    message = wire.unpack(data, contract.schema, longest)
    contract = contract.at(message.version)
    if message.kind == wire.STEPS and len(message.bodies) > contract.longest_way + 1:
        raise WireError(f"steps of {len(message.bodies) - 1} bodies, expected at most {contract.longest_way}")
    if (start := message.version - message.behind) != public.version:
        raise WireError(
            f"{wire.KINDS[message.kind]} from version {start} cannot continue version {public.version}, which we hold"
        )
    ask = wire.unpack_body(message.bodies[-1], contract.schema)
    expected = {wire.DRIFT_CHECK} if _guarded(contract) else set()
    if message.behind or message.kind == wire.STATE:
        expected |= {wire.SHARED} if contract.shared.blocks else set()
        expected |= {wire.BUFFERS} if contract.buffers.blocks else set()
    expect_fields(ask, expected)
    names, before = planned_names(contract, ask), public
    if message.kind == wire.STATE:
        public, touched = _take_state(contract, public, message, client)
    else:
        public, touched = _take_steps(contract, public, message)
    device = device_of(public)
    if wire.SHARED in ask.fields:
        public = public._replace(shared=to_device(unraw(ask.fields[wire.SHARED], contract.shared), device))
    if wire.BUFFERS in ask.fields:
        public = public._replace(buffers=to_device(unraw(ask.fields[wire.BUFFERS], contract.buffers), device))
    _expect_finite(before, public)
    if wire.DRIFT_CHECK in ask.fields:
        check_drift(contract, public, ask.fields[wire.DRIFT_CHECK])
    return Received(public, touched, Plan(names, contract.method.schedule.resamples(message.version)))


def request_full_state(contract: Contract, version: int, client: int) -> bytes:
    """What a client says that holds a version which is not the server's.

    Args:
        contract: the contract.
        version: the version that it held before the message that it could not follow.
        client: its number.
    """
    return wire.pack(wire.LOST, version, (), contract.schema.sent_by(client))


def _expect_finite(before: Public, after: Public) -> None:
    """Refuse what leads to numbers that are not finite; the server does not send such, it stops."""
    for old, new in zip(before[1:], after[1:], strict=True):
        if new is not old and not all_finite(new):
            raise WireError(f"the message leads to numbers of version {after.version} that are not finite")


def _take_steps(contract: Contract, public: Public, message: wire.Message) -> tuple[Public, frozenset[str]]:
    touched: frozenset[str] = frozenset()
    for data in islice(message.bodies, len(message.bodies) - 1):  # the last one is the ask
        if public.version == message.version:
            raise WireError(f"steps lead on beyond version {message.version}")
        body = wire.unpack_body(data, contract.schema)
        if wire.VALUES in body.fields:
            end = contract.window_end(public.version)
            version = message.version if end is None else min(message.version, end)
            stretch = read_snapshot(contract, body, device_of(public), end if version == end else None)
            names, coords = stretch.names, {**public.coords, **stretch.values}
            del stretch
        else:
            step = read_step(contract, body, public.version, device_of(public))
            names, coords, version = step.names, moved(contract, public, step), public.version + 1
            del step  # before the next one is unpacked
        if version == contract.window_end(public.version) and names != contract.sendable.named:
            # a server never does: a few bytes would cost a client the merge of a whole model
            raise WireError("steps merge a window without the coordinates of all blocks")
        public = advance(contract, public, coords, version)
        touched |= names
    if public.version != message.version:
        raise WireError(f"steps to version {message.version} end at version {public.version}")
    return public, touched


def _take_state(
    contract: Contract, public: Public, message: wire.Message, client: int
) -> tuple[Public, frozenset[str]]:
    body = wire.unpack_body(message.bodies[0], contract.schema)
    touched = planned_names(contract, body)
    expect_fields(body, {wire.COORDS, wire.BASE} if contract.window(message.version) else {wire.COORDS})
    if contract.method.download == "full":
        peer = contract.peer(message.version, EVERYONE, contract.moving)
        coords = contract.down(client).decode(body.fields[wire.COORDS], contract.sendable, peer)
        if contract.moving:
            coords = contract.heard(coords, to_device(public.coords, "cpu"))
    else:
        coords = unraw(body.fields[wire.COORDS], contract.sendable)
    device = device_of(public)
    base = (
        to_device(unraw(body.fields[wire.BASE], contract.weights), device) if wire.BASE in body.fields else public.base
    )
    known = {**public.coords, **to_device(coords, device)}
    coords = {name: known[name] for name in contract.coords.names}  # of an earlier stage others may be known
    return Public(message.version, base, coords, public.shared, public.buffers), touched
