"""Corrupted and forged client responses: what faulty networks and malicious clients send."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thinwire.flower.client import Client
from thinwire.protocol.round import Response
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


def truncated(client: Client, number: int, response: Response) -> Response:
    """The message without its last three bytes."""
    return response._replace(data=response.data[:-3])


def bit_flip(client: Client, number: int, response: Response) -> Response:
    """The message with one flipped bit."""
    middle = len(response.data) // 2
    return response._replace(
        data=response.data[:middle] + bytes([response.data[middle] ^ 1]) + response.data[middle + 1 :]
    )


def fields_of(client: Client, number: int, response: Response) -> Mapping[int, Bytes]:
    """The fields of an upload."""
    schema = client.contract.schema.sent_by(number)
    return wire.unpack_body(wire.unpack(response.data, schema).bodies[0], schema).fields


def with_field(
    client: Client, number: int, response: Response, field: int, payload: bytes, version_offset: int = 0
) -> Response:
    """The message with one field replaced and a valid checksum."""
    schema = client.contract.schema.sent_by(number)
    message = wire.unpack(response.data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    fields = {**body.fields, field: payload or body.fields[field]}
    body = wire.pack_body(wire.Body(body.plan, fields), schema)
    return response._replace(data=bytes(wire.pack(wire.UP, message.version + version_offset, [body], schema)))


def not_finite(client: Client, number: int, response: Response) -> Response:
    """Coordinates that are NaN."""
    size = client.contract.code.size
    return with_field(client, number, response, wire.COORDS, torch.full((size,), torch.nan).numpy().tobytes())


def scaled_update(client: Client, number: int, response: Response) -> Response:
    """An update multiplied by -1e6: it is finite, and refused for its norm."""
    fields = fields_of(client, number, response)
    values = torch.frombuffer(bytearray(fields[wire.COORDS]), dtype=torch.float32) * -1e6
    return with_field(client, number, response, wire.COORDS, values.numpy().tobytes())


def inflated_examples(client: Client, number: int, response: Response) -> Response:
    """A number of examples multiplied by 1e9: refused, as above."""
    fields = fields_of(client, number, response)
    return with_field(
        client, number, response, wire.WEIGHT, wire.pack_weight(1e9 * wire.unpack_weight(fields[wire.WEIGHT]))
    )


def infinite_weight(client: Client, number: int, response: Response) -> Response:
    """An infinite aggregation weight."""
    return with_field(client, number, response, wire.WEIGHT, wire.pack_weight(torch.inf))


def future_version(client: Client, number: int, response: Response) -> Response:
    """A version that the server has not reached."""
    return with_field(client, number, response, wire.COORDS, b"", version_offset=1)


def unknown_format(client: Client, number: int, response: Response) -> Response:
    """An unknown format version."""
    return response._replace(data=bytes([0x70 | response.data[0] & 15]) + response.data[1:])


def garbage(client: Client, number: int, response: Response) -> Response:
    """Bytes that are not a message."""
    return Response(b"hello", 1.0, 1)


def oversized(client: Client, number: int, response: Response) -> Response:
    """The message repeated ten times, which exceeds the maximal length."""
    return response._replace(data=response.data * 10)


def nan_loss(client: Client, number: int, response: Response) -> Response:
    """A training loss of NaN."""
    return response._replace(loss=float("nan"))


def client_error(client: Client, number: int, response: Response) -> Response:
    """An error instead of a message."""
    return Response(b"", error="it ran out of memory")


_REFUSED = (
    truncated,
    bit_flip,
    not_finite,
    infinite_weight,
    future_version,
    unknown_format,
    garbage,
    oversized,
    nan_loss,
)
CORRUPTIONS = {f.__name__: f for f in (*_REFUSED, client_error)}  # the server must reject these
FORGERIES = {
    f.__name__: f for f in (scaled_update, inflated_examples)
}  # valid messages, which only the values of other clients show to be wrong
