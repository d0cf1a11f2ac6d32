"""Trees to fields of a message and back: what a client says, and what a version adds.

Whatever arrives is checked against the contract: the version, the plan, exactly the fields that the method has, finite
numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Set
from functools import lru_cache
from typing import NamedTuple

import torch

from thinwire.codecs.base import Codec, Peer, Raw
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, all_finite, bring, norm, restrict, to_device
from thinwire.errors import WireError
from thinwire.protocol.method import Method
from thinwire.protocol.state import Contract, Public, device_of
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes

_RAW = Raw()
_NOBODY = Peer(Key(0))  # Raw needs to know nothing of the other side
EVERYONE = -1  # the peer of a broadcast
MOST_EXAMPLES = 1 << 40  # a weight beyond it is no number of examples


class Step(NamedTuple):
    """What one version adds: the averaged code of the planned blocks."""

    names: frozenset[str]
    code: Tree


class WindowSnapshot(NamedTuple):
    """Where some coordinates are after several versions of one basis."""

    names: frozenset[str]
    values: Tree


class Upload(NamedTuple):
    """What one client said, decoded, on the CPU."""

    code: Tree
    weight: float
    buffers: Tree
    report: Tree
    noted: Tree
    norm: float = 0.0  # of the code, as it came


def answer(contract: Contract, plan: Plan, version: int, client: int, data: Bytes) -> wire.Body:
    """A client's answer to a round, from bytes that may come from anywhere; its fields are not looked at yet."""
    message = wire.unpack(data, contract.schema.sent_by(client), contract.longest_up)
    body = message.first
    if message.kind != wire.UP or body is None:
        raise WireError(f"client {client} sent a message of kind {wire.KINDS[message.kind]!r}, expected 'up'")
    if message.version != version:
        raise WireError(f"client {client} trained version {message.version}, the round is at {version}")
    if planned_names(contract, body) != plan.names:
        raise WireError(f"client {client} answered for other blocks than the round asked for")
    return body


def unpack_up(
    contract: Contract, plan: Plan, version: int, client: int, data: Bytes, mask: Tree | None = None
) -> Upload:
    """What a client said, from bytes that may come from anywhere, if it trained the numbers under this mask."""
    method = contract.method
    body = answer(contract, plan, version, client, data)
    expected, spec, note = _expected(contract, plan)
    expect_fields(body, expected)
    fields, report = body.fields, contract.report
    code = contract.up(client).decode(fields[wire.COORDS], spec, contract.peer(version, client, mask))
    weight = _unpack_weight(fields[wire.WEIGHT]) if method.client_weight.sent else method.client_weight.weight(0)
    said = Upload(
        code,
        weight,
        unraw(fields[wire.BUFFERS], contract.buffers) if contract.buffers.blocks else {},
        unraw(fields[wire.SHARED], report) if report.blocks else {},
        unraw(fields[wire.REPORT], note) if note.blocks else {},
        norm(code),
    )
    _check_ranges(contract, client, said)
    return said


def _check_ranges(contract: Contract, client: int, said: Upload) -> None:
    """Refuse an upload with a field outside the range that it has by its meaning."""
    if not 0 < said.weight <= MOST_EXAMPLES:
        raise WireError(f"client {client} says that it counts {said.weight}; expected above 0, at most {MOST_EXAMPLES}")
    if not (math.isfinite(said.norm) and all(map(all_finite, (said.buffers, said.report, said.noted)))):
        raise WireError(f"client {client} sent a number that is not finite")
    for name, block in said.buffers.items():
        if name.endswith("running_var") and bool((block < 0).any()):
            raise WireError(f"client {client} sent a negative running variance in {name!r}")
    for name, block in said.noted.items():
        if bool((block < 0).any()):
            raise WireError(f"client {client} reports a negative size of {name!r}")
    contract.method.correction.factor(said.report)  # refuses what is no report


@lru_cache(maxsize=16)
def _expected(contract: Contract, plan: Plan) -> tuple[frozenset[int], Spec, Spec]:
    """The fields of a client's message, and what its code and its note for the schedule look like."""
    method, planned = contract.method, contract.coords.restrict(plan.names)
    note = Spec.of(method.schedule.report(planned.shapes(), plan))
    fields = {wire.COORDS}
    fields |= {wire.WEIGHT} if method.client_weight.sent else set()
    fields |= {wire.BUFFERS} if contract.buffers.blocks else set()
    fields |= {wire.SHARED} if contract.report.blocks else set()
    fields |= {wire.REPORT} if note.blocks else set()
    return frozenset(fields), method.sketch.spec(planned), note


def noted(contract: Contract, plan: Plan) -> Spec:
    """What a client notes for the schedule; often nothing."""
    return _expected(contract, plan)[2]


def pack_weight(weight: float) -> bytes:
    """A client's weight as a field: one float32."""
    return struct.pack("<f", weight)


def heard_weight(method: Method, samples: int) -> float:
    """How much the server will count a client with that many examples."""
    return (
        _unpack_weight(pack_weight(method.client_weight.weight(samples)))
        if method.client_weight.sent
        else method.client_weight.weight(0)
    )


def _unpack_weight(data: Bytes) -> float:
    if len(data) != 4:
        raise WireError(f"expected 4 bytes of raw numbers for a weight, got {len(data)}")
    weight: float = struct.unpack("<f", data)[0]
    return weight


def pack_step(contract: Contract, step: Step, version: int, codec: Tree) -> tuple[bytes, Tree]:
    """The entry that leads on from `version`, as it is broadcast, and the next state of the down codec."""
    payload, codec = contract.method.down.encode(step.code, codec, contract.peer(version, EVERYONE))
    return wire.pack_body(wire.Body(step.names, {wire.COORDS: payload}), contract.schema), codec


def pack_snapshot(contract: Contract, stretch: WindowSnapshot) -> bytes:
    """A stretch, as it is sent."""
    return wire.pack_body(wire.Body(stretch.names, {wire.VALUES: raw(stretch.values)}), contract.schema)


def pack_end(contract: Contract, stretch: WindowSnapshot, version: int) -> bytes:
    """Where the window ended that led to `version`, as it is sent: through the codec that settles it."""
    payload, _ = contract.method.merge_codec.encode(stretch.values, {}, contract.peer(version, EVERYONE))
    return wire.pack_body(wire.Body(stretch.names, {wire.VALUES: payload}), contract.schema)


def read_step(contract: Contract, body: wire.Body, version: int, device: torch.device) -> Step:
    """The entry that leads on from `version`, from a body that may come from anywhere."""
    names = planned_names(contract, body)
    expect_fields(body, {wire.COORDS})
    spec = contract.method.sketch.spec(contract.coords.restrict(names))
    code = contract.method.down.decode(body.fields[wire.COORDS], spec, contract.peer(version, EVERYONE))
    return Step(names, *bring((code,), device))


def read_snapshot(contract: Contract, body: wire.Body, device: torch.device, end: int | None = None) -> WindowSnapshot:
    """A stretch, from a body that may come from anywhere.

    Args:
        contract: the contract.
        body: the body.
        device: where the numbers are wanted.
        end: the version that it leads to, if its window ends there.
    """
    names = planned_names(contract, body)
    expect_fields(body, {wire.VALUES})
    data, spec = body.fields[wire.VALUES], contract.coords.restrict(names)
    if end is None:
        values = unraw(data, spec)
    else:
        values = contract.method.merge_codec.decode(data, spec, contract.peer(end, EVERYONE))
    return WindowSnapshot(names, *bring((values,), device))


def as_received(contract: Contract, public: Public, down: Codec) -> Public:
    """A public state as clients of a tier read it: on full download through its down codec, on a ledger as it is."""
    if contract.method.download == "incremental" or isinstance(down, Raw):
        return public
    peer = contract.peer(public.version, EVERYONE, contract.moving)
    coords = to_device(restrict(public.coords, contract.sendable.names), "cpu")
    heard = contract.heard(down.decode(down.encode(coords, {}, peer)[0], contract.sendable, peer), coords)
    return public._replace(coords={**public.coords, **to_device(heard, device_of(public))})


def planned_names(contract: Contract, body: wire.Body) -> frozenset[str]:
    """The blocks of a body's plan; refuses private ones, so that nobody can ask for them or overwrite them."""
    names = contract.coords.named if body.plan is None else body.plan
    if private := names - contract.sendable.named:
        raise WireError(f"the message is about block {min(private)!r}, which is private and never travels")
    return names


def expect_fields(body: wire.Body, expected: Set[int]) -> None:
    """Refuse a body that lacks a field, or has one that the method does not send."""
    if body.fields.keys() != expected:
        raise WireError(f"the message has fields {sorted(body.fields)}, expected {sorted(expected)}")


def raw(tree: Tree) -> Bytes:
    """A field of numbers as they are."""
    return _RAW.encode(tree, {}, _NOBODY)[0]


def unraw(data: Bytes, spec: Spec) -> Tree:
    """The numbers of such a field."""
    return _RAW.decode(data, spec, _NOBODY)
