"""Corrupt responses of clients: damaged on the way, or made by a malicious client."""

from __future__ import annotations

import torch

from thinwire.flower.client import Client
from thinwire.flower.client_store import Response
from thinwire.wire import message as wire


def cut(client: Client, number: int, response: Response) -> Response:
    """Three bytes are missing."""
    return response._replace(data=response.data[:-3])


def flipped(client: Client, number: int, response: Response) -> Response:
    """One bit is flipped."""
    middle = len(response.data) // 2
    return response._replace(
        data=response.data[:middle] + bytes([response.data[middle] ^ 1]) + response.data[middle + 1 :]
    )


def repacked(client: Client, number: int, response: Response, field: int, payload: bytes, later: int = 0) -> Response:
    """The same message with another field and a valid checksum."""
    schema = client.contract.schema.sent_by(number)
    message = wire.unpack(response.data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    fields = {**body.fields, field: payload or body.fields[field]}
    body = wire.pack_body(wire.Body(body.plan, fields), schema)
    return response._replace(data=wire.pack(wire.UP, message.version + later, [body], schema))


def not_finite(client: Client, number: int, response: Response) -> Response:
    """Values of NaN."""
    size = client.contract.code.size
    return repacked(client, number, response, wire.COORDS, torch.full((size,), torch.nan).numpy().tobytes())


def exploded(client: Client, number: int, response: Response) -> Response:
    """An update of a million times the length in the opposite direction: finite, so the server only bounds it."""
    return rescaled(client, number, response, wire.COORDS, -1e6)


def many_examples(client: Client, number: int, response: Response) -> Response:
    """A weight of a billion times the number of examples: only bounded, too."""
    return rescaled(client, number, response, wire.WEIGHT, 1e9)


def rescaled(client: Client, number: int, response: Response, field: int, factor: float) -> Response:
    """The same message with one field of raw values multiplied by a factor."""
    schema = client.contract.schema.sent_by(number)
    fields = wire.unpack_body(wire.unpack(response.data, schema).bodies[0], schema).fields
    values = torch.frombuffer(bytearray(fields[field]), dtype=torch.float32) * factor
    return repacked(client, number, response, field, values.numpy().tobytes())


def infinite_weight(client: Client, number: int, response: Response) -> Response:
    """A weight of infinity."""
    return repacked(client, number, response, wire.WEIGHT, torch.tensor([torch.inf]).numpy().tobytes())


def future_version(client: Client, number: int, response: Response) -> Response:
    """An upload of the next version."""
    return repacked(client, number, response, wire.COORDS, b"", later=1)


def other_format(client: Client, number: int, response: Response) -> Response:
    """A message of an unknown format."""
    return response._replace(data=response.data[:2] + b"\x07" + response.data[3:])


def no_message(client: Client, number: int, response: Response) -> Response:
    """Bytes that are not a message."""
    return Response(b"hello", 1.0, 1)


def too_long(client: Client, number: int, response: Response) -> Response:
    """Ten times as long as allowed."""
    return response._replace(data=response.data * 10)


def nan_loss(client: Client, number: int, response: Response) -> Response:
    """A training loss of NaN."""
    return response._replace(loss=float("nan"))


def crashed(client: Client, number: int, response: Response) -> Response:
    """An error message instead of an upload."""
    return Response(b"", error="it ran out of memory")


_REFUSED = (cut, flipped, not_finite, infinite_weight, future_version, other_format, no_message, too_long, nan_loss)
CORRUPT = {f.__name__: f for f in (*_REFUSED, crashed)}  # the server must refuse these
SCALED = {f.__name__: f for f in (exploded, many_examples)}  # well-formed: the server bounds them
