"""Answers of clients as they should not be: what broken networks and liars make of them."""

from __future__ import annotations

import torch

from thinwire.flower.client import Client
from thinwire.flower.client_store import Answer
from thinwire.wire import message as wire


def cut(client: Client, number: int, answer: Answer) -> Answer:
    """Three bytes short."""
    return answer._replace(data=answer.data[:-3])


def flipped(client: Client, number: int, answer: Answer) -> Answer:
    """One bit is wrong."""
    middle = len(answer.data) // 2
    return answer._replace(data=answer.data[:middle] + bytes([answer.data[middle] ^ 1]) + answer.data[middle + 1 :])


def repacked(client: Client, number: int, answer: Answer, field: int, payload: bytes, later: int = 0) -> Answer:
    """The same message with a valid checksum and another field: what a liar sends."""
    schema = client.contract.schema.sent_by(number)
    message = wire.unpack(answer.data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    fields = {**body.fields, field: payload or body.fields[field]}
    body = wire.pack_body(wire.Body(body.plan, fields), schema)
    return answer._replace(data=wire.pack(wire.UP, message.version + later, [body], schema))


def not_finite(client: Client, number: int, answer: Answer) -> Answer:
    """Numbers that are none."""
    size = client.contract.code.size
    return repacked(client, number, answer, wire.COORDS, torch.full((size,), torch.nan).numpy().tobytes())


def exploded(client: Client, number: int, answer: Answer) -> Answer:
    """An update a million times too long, the wrong way: finite, so it is accepted; the method's mean must bear it."""
    return rescaled(client, number, answer, wire.COORDS, -1e6)


def many_examples(client: Client, number: int, answer: Answer) -> Answer:
    """A client that says it has a billion times as many examples: accepted, as above."""
    return rescaled(client, number, answer, wire.WEIGHT, 1e9)


def rescaled(client: Client, number: int, answer: Answer, field: int, factor: float) -> Answer:
    """The same message with one field of raw numbers times a factor."""
    schema = client.contract.schema.sent_by(number)
    fields = wire.unpack_body(wire.unpack(answer.data, schema).bodies[0], schema).fields
    numbers = torch.frombuffer(bytearray(fields[field]), dtype=torch.float32) * factor
    return repacked(client, number, answer, field, numbers.numpy().tobytes())


def endless_weight(client: Client, number: int, answer: Answer) -> Answer:
    """A client that counts infinitely."""
    return repacked(client, number, answer, wire.WEIGHT, torch.tensor([torch.inf]).numpy().tobytes())


def from_the_future(client: Client, number: int, answer: Answer) -> Answer:
    """Of a version that there is not yet."""
    return repacked(client, number, answer, wire.COORDS, b"", later=1)


def other_format(client: Client, number: int, answer: Answer) -> Answer:
    """A message of a format that does not exist yet."""
    return answer._replace(data=answer.data[:2] + b"\x07" + answer.data[3:])


def nonsense(client: Client, number: int, answer: Answer) -> Answer:
    """No message at all."""
    return Answer(b"hello", 1.0, 1)


def too_long(client: Client, number: int, answer: Answer) -> Answer:
    """Ten times as long as it may be."""
    return answer._replace(data=answer.data * 10)


def absurd_loss(client: Client, number: int, answer: Answer) -> Answer:
    """A training loss that is no number."""
    return answer._replace(loss=float("nan"))


def crashed(client: Client, number: int, answer: Answer) -> Answer:
    """An error instead of an answer."""
    return Answer(b"", error="it ran out of memory")


_REFUSED = (cut, flipped, not_finite, endless_weight, from_the_future, other_format, nonsense, too_long, absurd_loss)
SPOILT = {f.__name__: f for f in (*_REFUSED, crashed)}  # what the server must refuse
LIES = {f.__name__: f for f in (exploded, many_examples)}  # what it cannot tell from the truth
