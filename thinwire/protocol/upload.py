"""Uploads: what a client sends after local training, and its decoding on the server.

Received bytes are not trusted. They are checked against the contract: sender, version, plan, exactly the fields that
the method has, finite values, and the range of each field.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import NamedTuple

from thinwire.codecs.base import Codec, Peer, Raw
from thinwire.core.key import Key
from thinwire.core.tree import Spec, Tree, all_finite, norm, restrict, to_device
from thinwire.errors import WireError
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.state import PublicState
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes

MAX_EXAMPLES = 1 << 40  # a larger weight is not a number of examples
_RAW = Raw()
_NO_PEER = Peer(Key(0))  # Raw uses no shared randomness


class Upload(NamedTuple):
    """A decoded upload, on the CPU."""

    code: Tree  # the update, or its sketch
    weight: float
    buffers: Tree
    report: Tree  # of the correction
    schedule_report: Tree
    norm: float = 0.0  # of the code, as received
    masked: Bytes = b""  # under secure aggregation: the payload, which says nothing by itself; all else is empty
    began: tuple[int, int] = (0, 0)  # the clients that began a masked sum, and those that had to remain; 0: those in it
    staleness: int = 0  # versions since the one that it is based on


def received_weight(contract: Contract, samples: int) -> float:
    """The weight that the server receives from a client with this number of examples: a float32."""
    weight = contract.method.client_weight
    return wire.unpack_weight(wire.pack_weight(weight.weight(samples))) if weight.sent else weight.weight(0)


def decode_upload(
    contract: Contract, plan: Plan, version: int, client: int, data: Bytes, hints: Tree | None = None
) -> Upload:
    """Decode and check one upload; raises WireError if it is refused.

    Args:
        contract: the contract at `version`.
        plan: the plan of the round.
        version: the version that the client trained from.
        client: its number.
        data: the message, not trusted.
        hints: what both ends know about the values (`Contract.hints`); None for nothing.
    """
    message, method = wire.unpack(data, contract.schema.sent_by(client), contract.longest_up), contract.method
    body = message.first
    if message.kind != wire.UP or body is None:
        raise WireError(f"client {client} sent a message of kind {wire.KINDS[message.kind]!r}, expected 'up'")
    if message.version != version:
        raise WireError(f"client {client} trained version {message.version}, the round is at {version}")
    sent, fields = contract.sent(plan), body.fields
    if planned_names(contract, body, sent.fields) != plan.names:
        raise WireError(f"client {client} sent other blocks than the round requested")
    if method.secure_aggregation:
        return Upload({}, 1.0, {}, {}, {}, masked=fields[wire.COORDS])
    code = contract.up(client).decode(fields[wire.COORDS], sent.code, contract.peer(version, client, hints))
    upload = Upload(
        code,
        wire.unpack_weight(fields[wire.WEIGHT]) if method.client_weight.sent else method.client_weight.weight(0),
        unraw(fields[wire.BUFFERS], contract.buffers) if contract.buffers.blocks else {},
        unraw(fields[wire.SHARED], contract.report) if contract.report.blocks else {},
        unraw(fields[wire.REPORT], sent.report) if sent.report.blocks else {},
        norm(code),
    )
    if not 0 < upload.weight <= MAX_EXAMPLES:
        raise WireError(f"client {client} sent weight {upload.weight}; expected above 0 and at most {MAX_EXAMPLES}")
    trees = (upload.buffers, upload.report, upload.schedule_report)
    if not (math.isfinite(upload.norm) and all(all_finite(tree) for tree in trees if tree)):
        raise WireError(f"client {client} sent a value that is not finite")
    for name, block in upload.buffers.items():
        if name.endswith("running_var") and bool((block < 0).any()):
            raise WireError(f"client {client} sent a negative running variance in {name!r}")
    for name, block in upload.schedule_report.items():
        if bool((block < 0).any()):
            raise WireError(f"client {client} reports a negative size of {name!r}")
    if method.correction.active:
        method.correction.factor(upload.report)  # raises WireError for a report that no client sends
    return upload


def as_received(contract: Contract, public: PublicState, down: Codec) -> PublicState:
    """A public state as clients with this download codec receive it; incremental downloads are exact."""
    if contract.method.download == "incremental" or down.exact:
        return public
    peer = contract.peer(public.version, EVERYONE, contract.moving)
    coords = to_device(restrict(public.coords, contract.sendable.names), "cpu")
    decoded = down.decode(down.encode(coords, {}, peer)[0], contract.sendable, peer)
    received = contract.with_fixed_values(decoded, coords)
    return public._replace(coords={**public.coords, **to_device(received, public.device)})


# -- fields of messages ------------------------------------------------------------------------------------------------


def raw(tree: Tree) -> Bytes:
    """A tree as the bytes of its values; inverse: `unraw`."""
    return _RAW.encode(tree, {}, _NO_PEER)[0]


def unraw(data: Bytes, spec: Spec) -> Tree:
    """The tree with this spec from the bytes of its values; inverse: `raw`."""
    return _RAW.decode(data, spec, _NO_PEER)


def planned_names(contract: Contract, body: wire.Body, fields: Set[int]) -> frozenset[str]:
    """The blocks of a body that must have exactly these fields; raises WireError otherwise.

    Private blocks are refused, so that no message can read or overwrite them.
    """
    if body.fields.keys() != fields:
        raise WireError(f"the message has fields {sorted(body.fields)}, expected {sorted(fields)}")
    names = contract.coords.named if body.plan is None else body.plan
    if private := names - contract.sendable.named:
        raise WireError(f"the message contains block {min(private)!r}, which is private and never sent")
    return names
