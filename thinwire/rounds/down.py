"""The way down: the shortest message that brings a client from its version to the current one, and its reading.

On link 'ledger' that is the missed entries, or the blocks that changed, whichever is shorter. Version 0 is never sent:
everybody derives it from method, model and seed. On link 'snapshot' it is always the coordinates, through the down
codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from thinwire.codecs import message as wire
from thinwire.core.tree import all_finite, restrict, to_device
from thinwire.errors import WireError
from thinwire.rounds.advance import advance
from thinwire.rounds.lanes import EVERYONE, expect_lanes, planned_names, raw, unpack_step, unraw
from thinwire.rounds.protocol import plan_round
from thinwire.rounds.state import Contract, Public, ServerState, device_of
from thinwire.schedules.base import Plan


def open_round(contract: Contract, server: ServerState, versions: Mapping[int, int]) -> dict[int, bytes]:
    """One message to each client of the cohort, the shortest that brings it from its version to the current one.

    Args:
        contract: the contract.
        server: the server's state.
        versions: the version that each client of the cohort holds.
    """
    made = {version: _cheapest_way(contract, server, version) for version in set(versions.values())}
    return {client: made[version] for client, version in versions.items()}


def split_down(contract: Contract, server: ServerState, messages: Mapping[int, bytes]) -> tuple[int, int]:
    """Bytes of the ordinary broadcast, and bytes on top of it because clients had missed rounds.

    The ordinary part of a message is what a client that heard the previous version would have received.
    """
    total = sum(len(data) for data in messages.values())
    if contract.method.link == "snapshot":
        return total, 0
    ordinary = len(_cheapest_way(contract, server, max(0, server.public.version - 1)))
    down = sum(min(len(data), ordinary) for data in messages.values())
    return down, total - down


def _cheapest_way(contract: Contract, server: ServerState, version: int) -> bytes:
    """The missed entries or the changed state, whichever is shorter."""
    now = server.public.version
    if contract.method.link == "snapshot":
        return _state_message(contract, server, version)
    entries = server.ledger.since(version)
    ask = _ask(contract, server)
    steps = None if entries is None else wire.pack(wire.STEPS, now, (*entries, ask), contract.schema)
    if steps is not None and version >= now - 1:
        return steps  # one entry is never longer than the state it makes; do not build the state to find out
    state = _state_message(contract, server, version)
    return state if steps is None or len(state) < len(steps) else steps


def _state_message(contract: Contract, server: ServerState, version: int) -> bytes:
    """The public state as far as it changed since `version`; on link 'snapshot', all coordinates through the codec."""
    public, ledger, method = server.public, server.ledger, contract.method
    touched = ledger.touched(version)
    lanes = {}
    if method.link == "snapshot":
        peer = contract.peer(public.version, EVERYONE)
        lanes[wire.COORDS], _ = method.down.encode(restrict(public.coords, contract.sendable.names), {}, peer)
    else:
        lanes[wire.COORDS] = raw(restrict(public.coords, touched))
    if ledger.merged > version:
        lanes[wire.BASE] = raw(public.base)
    if public.shared:
        lanes[wire.SHARED] = raw(public.shared)
    if public.buffers:
        lanes[wire.BUFFERS] = raw(public.buffers)
    body = wire.pack_body(wire.Body(touched, lanes), contract.schema)
    return wire.pack(wire.STATE, public.version, [body, _ask(contract, server)], contract.schema)


def _ask(contract: Contract, server: ServerState) -> bytes:
    """The last body of every message down: which blocks this round wants to hear of."""
    return wire.pack_body(wire.Body(plan_round(contract, server).names), contract.schema)


class Received(NamedTuple):
    """What a client knows after it has read a message."""

    public: Public  # the current public state; on link 'snapshot', as far as the down codec lets it through
    touched: frozenset[str]  # synchronised since the client's version: what it held back of these is out of date
    plan: Plan  # which blocks the round wants to hear of


def receive(contract: Contract, public: Public, data: bytes) -> Received:
    """A client's way to the current version: replay the entries, or take over the state.

    Args:
        contract: the contract.
        public: the public state that the client holds.
        data: the message, not trusted.
    """
    message = wire.unpack(data, contract.schema)
    if message.kind == wire.UP:
        raise WireError("a client's message was sent to a client")
    ask = wire.unpack_body(message.bodies[-1], contract.schema)
    expect_lanes(ask, frozenset())
    plan = Plan(planned_names(contract, ask))
    if message.kind == wire.STATE:
        return _finite(public, Received(*_take_state(contract, public, message), plan))
    entries = message.bodies[:-1]
    if message.version - len(entries) != public.version:
        raise WireError(f"steps from version {message.version - len(entries)} do not continue version {public.version}")
    touched: frozenset[str] = frozenset()
    after = public
    for entry in entries:
        step = unpack_step(contract, entry, after.version, device_of(after))
        after = advance(contract, after, step)
        touched |= step.names
        del step  # before the next one is unpacked
    return _finite(public, Received(after, touched, plan))


def _finite(before: Public, received: Received) -> Received:
    """Refuse what leads to numbers that are not finite; the server does not send such, it stops."""
    after = received.public
    for old, new in zip(before[1:], after[1:], strict=True):
        if new is not old and not all_finite(new):
            raise WireError(f"the message leads to numbers of version {after.version} that are not finite")
    return received


def _take_state(contract: Contract, public: Public, message: wire.Message) -> tuple[Public, frozenset[str]]:
    method = contract.method
    body = wire.unpack_body(message.bodies[0], contract.schema)
    touched = planned_names(contract, body)
    expected = {wire.COORDS}
    expected |= {wire.SHARED} if contract.shared.blocks else set()
    expected |= {wire.BUFFERS} if contract.buffers.blocks else set()
    expected |= {wire.BASE} if contract.window(message.version) != contract.window(public.version) else set()
    expect_lanes(body, expected)
    if message.version < public.version:
        raise WireError(f"a state of version {message.version} is older than version {public.version}, which we hold")
    if method.link == "snapshot":
        peer = contract.peer(message.version, EVERYONE)
        coords = method.down.decode(body.lanes[wire.COORDS], contract.sendable, peer)
    else:
        coords = unraw(body.lanes[wire.COORDS], contract.coords.restrict(touched))
    device = device_of(public)
    base = public.base
    if wire.BASE in body.lanes:
        base = to_device(unraw(body.lanes[wire.BASE], contract.weights), device)
    shared = unraw(body.lanes[wire.SHARED], contract.shared) if contract.shared.blocks else {}
    buffers = unraw(body.lanes[wire.BUFFERS], contract.buffers) if contract.buffers.blocks else {}
    return (
        Public(
            message.version,
            base,
            {**public.coords, **to_device(coords, device)},
            to_device(shared, device),
            to_device(buffers, device),
        ),
        touched,
    )
