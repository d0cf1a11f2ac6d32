"""Uploads: what a client sends after local training, and its decoding on the server.

Received bytes are not trusted. They are checked against the contract: sender, version, plan, exactly the fields that
the method has, finite values, and the range of each field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from thinwire.codecs.base import Codec
from thinwire.core.threads import each
from thinwire.core.tree import Tree, all_finite, norm, restrict, to_device
from thinwire.errors import WireError
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.fields import expect_fields, planned_names, raw, unraw
from thinwire.protocol.state import PublicState
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes
from thinwire.wire.weight import decode as decode_weight, encode as encode_weight

MOST_EXAMPLES = 1 << 40  # a larger weight is not a number of examples


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


class UploadContent(NamedTuple):
    """What one client puts into an upload, besides the encoded update."""

    weight: float
    buffers: Tree
    report: Tree
    schedule_report: Tree


def pack_upload(
    contract: Contract, plan: Plan, version: int, client: int, payload: Bytes, content: UploadContent | None
) -> wire.Pieces:
    """The message of one client, in pieces; without `content` (secure aggregation) only the payload is sent."""
    fields = {wire.COORDS: payload}
    if content is not None:
        if contract.method.client_weight.sent:
            fields[wire.WEIGHT] = encode_weight(content.weight)
        trees = {wire.BUFFERS: content.buffers, wire.SHARED: content.report, wire.REPORT: content.schedule_report}
        fields |= {number: raw(tree) for number, tree in trees.items() if tree}
    body = wire.body_parts(wire.Body(plan.names, fields), contract.schema)
    return wire.pack_pieces(wire.UP, version, body, contract.schema.sent_by(client))


def received_weight(contract: Contract, samples: int) -> float:
    """The weight that the server receives from a client with this number of examples: a float32."""
    weight = contract.method.client_weight
    return decode_weight(encode_weight(weight.weight(samples))) if weight.sent else weight.weight(0)


def decode_uploads(
    contract: Contract, public: PublicState, plan: Plan, messages: Mapping[int, Bytes]
) -> dict[int, Upload]:
    """Decode and check the uploads of a round, in the order of client numbers. Raises WireError for a bad message."""
    contract, clients = contract.at(public.version), sorted(messages)
    hints = trained_by_tier(contract, public, clients) if contract.has_hints else {}

    def decode(i: int) -> Upload:
        return decode_upload(contract, plan, public.version, i, messages[i], hints.get(contract.tier(i)))

    return dict(zip(clients, each(decode, clients, contract.code.nbytes), strict=True))


def decode_upload(
    contract: Contract, plan: Plan, version: int, client: int, data: Bytes, hints: Tree | None = None
) -> Upload:
    """Decode and check one upload.

    Args:
        contract: the contract at `version`.
        plan: the plan of the round.
        version: the version that the client trained from.
        client: its number.
        data: the message, not trusted.
        hints: what both ends know about the values (`Contract.hints`); None for nothing.
    """
    message = wire.unpack(data, contract.schema.sent_by(client), contract.longest_up)
    fields, method = _fields(contract, plan, version, client, message), contract.method
    if method.secure_aggregation:
        return Upload({}, 1.0, {}, {}, {}, masked=fields[wire.COORDS])
    _, spec, report = contract.upload_fields(plan)
    code = contract.up(client).decode(fields[wire.COORDS], spec, contract.peer(version, client, hints))
    upload = Upload(
        code,
        decode_weight(fields[wire.WEIGHT]) if method.client_weight.sent else method.client_weight.weight(0),
        unraw(fields[wire.BUFFERS], contract.buffers) if contract.buffers.blocks else {},
        unraw(fields[wire.SHARED], contract.report) if contract.report.blocks else {},
        unraw(fields[wire.REPORT], report) if report.blocks else {},
        norm(code),
    )
    _check_ranges(contract, client, upload)
    return upload


def _fields(contract: Contract, plan: Plan, version: int, client: int, message: wire.Message) -> Mapping[int, Bytes]:
    """The fields of an upload for this round."""
    body = message.first
    if message.kind != wire.UP or body is None:
        raise WireError(f"client {client} sent a message of kind {wire.KINDS[message.kind]!r}, expected 'up'")
    if message.version != version:
        raise WireError(f"client {client} trained version {message.version}, the round is at {version}")
    if planned_names(contract, body) != plan.names:
        raise WireError(f"client {client} sent other blocks than the round requested")
    expect_fields(body, contract.upload_fields(plan)[0])
    return body.fields


def _check_ranges(contract: Contract, client: int, upload: Upload) -> None:
    """Raise WireError for a field outside its range."""
    if not 0 < upload.weight <= MOST_EXAMPLES:
        raise WireError(f"client {client} sent weight {upload.weight}; expected above 0 and at most {MOST_EXAMPLES}")
    trees = (upload.buffers, upload.report, upload.schedule_report)
    if not (math.isfinite(upload.norm) and all(all_finite(tree) for tree in trees if tree)):
        raise WireError(f"client {client} sent a value that is not finite")
    for name, block in upload.buffers.items():
        if name.endswith("running_var") and bool((block < 0).any()):
            raise WireError(f"client {client} sent a negative running variance in {name!r}")
    for name, block in upload.schedule_report.items():
        if bool((block < 0).any()):
            raise WireError(f"client {client} reports a negative size of {name!r}")
    if contract.method.correction.active:
        contract.method.correction.factor(upload.report)  # raises WireError for a report that no client sends


def trained_by_tier(contract: Contract, public: PublicState, clients: Iterable[int]) -> dict[int, Tree]:
    """The hints of uploads of each tier (`Contract.hints`); they depend on the coordinates that clients received."""
    contract = contract.at(public.version)
    downs = {contract.tier(client): contract.down(client) for client in clients}
    if not contract.has_hints:
        return {tier: {} for tier in downs}
    return {tier: contract.hints(as_received(contract, public, down)) for tier, down in downs.items()}


def as_received(contract: Contract, public: PublicState, down: Codec) -> PublicState:
    """A public state as clients with this download codec receive it; incremental downloads are exact."""
    if contract.method.download == "incremental" or down.exact:
        return public
    peer = contract.peer(public.version, EVERYONE, contract.moving)
    coords = to_device(restrict(public.coords, contract.sendable.names), "cpu")
    decoded = down.decode(down.encode(coords, {}, peer)[0], contract.sendable, peer)
    received = contract.with_fixed_values(decoded, coords)
    return public._replace(coords={**public.coords, **to_device(received, public.device)})
