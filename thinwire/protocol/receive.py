"""From one public version to a later one: on a client from a download, on the server from its own step.

The client replays the entries that it missed, or takes over the whole state. If the result is not the server's state
(`Drifted`), it sends `request_full_state`, and the server responds with the whole state. `apply_step` and `advance` are
the same on the server and on every client.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from thinwire.core.tree import Tree, all_finite, to_device
from thinwire.errors import WireError
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.download import advance, apply_step, read_snapshot, read_step, read_sum
from thinwire.protocol.drift_check import check_drift
from thinwire.protocol.state import PublicState
from thinwire.protocol.upload import planned_names, unraw
from thinwire.schedules.base import Plan
from thinwire.spaces.base import Stack
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class Received(NamedTuple):
    """What a client knows after a download."""

    public: PublicState  # the current public state; for full downloads, as the download codec decodes it
    synced: frozenset[str]  # blocks synchronized since the client's version: what it kept of these is out of date
    plan: Plan  # which blocks the round requests


def receive(contract: Contract, public: PublicState, data: Bytes, client: int = EVERYONE) -> Received:
    """The current public state from a download.

    Raises Drifted if replaying does not give the server's state. The client then sends `request_full_state`, and reads
    the response starting from version 0: `receive(contract, first._replace(version=...), response)`.

    Args:
        contract: the contract.
        public: the public state that the client has.
        data: the message, not trusted.
        client: the number of the client; needed where tiers of clients have different codecs.
    """
    message = wire.unpack(data, contract.schema, max(stage.longest_down for stage in contract.stages))
    contract = contract.at(message.version)
    if message.kind == wire.STEPS and len(message.bodies) > contract.max_steps + 1:
        raise WireError(f"steps of {len(message.bodies) - 1} bodies, expected at most {contract.max_steps}")
    if (start := message.version - message.behind) != public.version:
        raise WireError(f"{wire.KINDS[message.kind]} from version {start} do not continue our version {public.version}")
    request, names = _read_request(contract, message)
    take = _take_state if message.kind == wire.STATE else _take_steps
    after, synced = take(contract, public, message, client)
    news = {wire.SHARED: contract.shared, wire.BUFFERS: contract.buffers}
    known = {
        n: to_device(unraw(request.fields[n], news[n]), public.device) for n in request.fields.keys() & news.keys()
    }
    after = after._replace(shared=known.get(wire.SHARED, after.shared), buffers=known.get(wire.BUFFERS, after.buffers))
    for old, new in zip(public[1:], after[1:], strict=True):
        if new is not old and not all_finite(new):  # a server never sends these: it stops
            raise WireError(f"the message leads to values of version {after.version} that are not finite")
    if wire.DRIFT_CHECK in request.fields:
        check_drift(contract, after, request.fields[wire.DRIFT_CHECK])
    return Received(after, synced, Plan(names, contract.method.schedule.resamples(message.version)))


def request_full_state(contract: Contract, version: int, client: int) -> bytes:
    """The message of a client whose public state is not the server's.

    Args:
        contract: the contract.
        version: the version that it had before the message that it could not apply.
        client: its number.
    """
    return bytes(wire.pack(wire.LOST, version, (), contract.schema.sent_by(client)))


def _read_request(contract: Contract, message: wire.Message) -> tuple[wire.Body, frozenset[str]]:
    """The last body of a download, with exactly the fields that this message must have, and its blocks."""
    request = wire.unpack_body(message.bodies[-1], contract.schema)
    expected = {wire.DRIFT_CHECK} if contract.has_drift_check else set()
    if message.behind or message.kind == wire.STATE:
        expected |= {wire.SHARED} if contract.shared.blocks else set()
        expected |= {wire.BUFFERS} if contract.buffers.blocks else set()
    return request, planned_names(contract, request, expected)


def _take_steps(
    contract: Contract, public: PublicState, message: wire.Message, client: int
) -> tuple[PublicState, frozenset[str]]:
    """Replay entries, sums and snapshots."""
    synced: frozenset[str] = frozenset()
    for data in islice(message.bodies, len(message.bodies) - 1):  # the last one is the request
        if public.version == message.version:
            raise WireError(f"steps continue beyond version {message.version}")
        taken = _take_body(contract, public, wire.unpack_body(data, contract.schema), message.version)
        names, coords, version, stack = taken
        if version == contract.window_end(public.version) and names != contract.sendable.named:
            # a server never sends this: a few bytes would cost a client the merge of a whole model
            raise WireError("steps merge a window without the coordinates of all blocks")
        public = advance(contract, public, coords, version, stack)
        synced |= names
    if public.version != message.version:
        raise WireError(f"steps to version {message.version} end at version {public.version}")
    return public, synced


def _take_body(
    contract: Contract, public: PublicState, body: wire.Body, last: int
) -> tuple[frozenset[str], Tree, int, Stack | None]:
    """The blocks of one entry, sum or snapshot, the coordinates after it, their version, and the stack of an entry."""
    if wire.SUM in body.fields:
        total = read_sum(contract, body, public.device)
        return total.names, apply_step(contract, public, total), last, None
    if wire.VALUES not in body.fields:
        step = read_step(contract, body, public.version, public.device)
        return step.names, apply_step(contract, public, step), public.version + 1, step.stack
    end = contract.window_end(public.version)
    version = last if end is None else min(last, end)
    values = read_snapshot(contract, body, public.device, end if version == end else None)
    return frozenset(values), {**public.coords, **values}, version, None


def _take_state(
    contract: Contract, public: PublicState, message: wire.Message, client: int
) -> tuple[PublicState, frozenset[str]]:
    """Take over the whole state."""
    body = wire.unpack_body(message.bodies[0], contract.schema)
    fields = {wire.COORDS, wire.BASE} if contract.window(message.version) else {wire.COORDS}
    synced = planned_names(contract, body, fields)
    if contract.method.download == "full":
        peer = contract.peer(message.version, EVERYONE, contract.moving)
        coords = contract.down(client).decode(body.fields[wire.COORDS], contract.sendable, peer)
        if contract.moving:
            coords = contract.with_fixed_values(coords, to_device(public.coords, "cpu"))
    else:
        coords = unraw(body.fields[wire.COORDS], contract.sendable)
    device, base = public.device, public.base
    if wire.BASE in body.fields:
        base = to_device(unraw(body.fields[wire.BASE], contract.weights), device)
    known = {**public.coords, **to_device(coords, device)}
    coords = {name: known[name] for name in contract.coords.names}  # without blocks of an earlier stage
    return PublicState(message.version, base, coords, public.shared, public.buffers), synced


def switch_stage(contract: Contract, later: Contract, public: PublicState) -> PublicState:
    """The same version in the coordinates of the second stage, on the same base.

    Only the server does this: full downloads send the result to clients.
    """
    basis = contract.basis(public.version - 1, public.device)
    weights = contract.method.space.expand(public.base, basis, public.coords)
    coords = later.method.space.from_weights(public.base, weights, contract.key.fold("init", public.version))
    shared = later.method.correction.init_shared(coords)
    return public._replace(coords=coords, shared=shared)
