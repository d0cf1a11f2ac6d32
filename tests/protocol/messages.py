"""Helpers of these tests: what a message contains, and messages that were changed on the way."""

import torch

from tests.federation import SIZES, Federation, digits_task, perceptron, schema_of
from thinwire.codecs.base import Raw
from thinwire.core.tree import Spec, Tree
from thinwire.data.task import Task
from thinwire.wire import message as wire

ALL_CLIENTS = range(len(SIZES))
D = Spec.of(dict(perceptron().named_parameters())).size


def with_norm() -> Task:
    """A task whose model has batch norm, and so buffers."""
    return digits_task(perceptron(norm=True))


def assert_close(a: Tree, b: Tree, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def bodies_of(federation: Federation, data: bytes, client: int = 0) -> list[wire.Body]:
    """The bodies of a message."""
    schema = federation.contract.schema
    return [
        wire.unpack_body(body, schema)
        for body in wire.unpack(data, schema_of(federation.contract, data, client)).bodies
    ]


def forged(
    federation: Federation, data: bytes, version=None, kind=None, plan=None, behind=None, **fields: bytes | None
) -> bytes:
    """The same message with some of its content replaced, and a correct checksum."""
    schema = schema_of(federation.contract, data)
    message = wire.unpack(data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    content = dict(body.fields)
    for name, payload in fields.items():
        field = getattr(wire, name)
        content.pop(field, None)
        if payload is not None:
            content[field] = payload
    packed = wire.pack_body(wire.Body(plan or body.plan, content), schema)
    bodies = [packed, *message.bodies[1:]]  # a download keeps its request
    return wire.pack(
        kind or message.kind,
        message.version if version is None else version,
        bodies,
        schema,
        message.behind if behind is None else behind,
    )


def value_bytes(value: float) -> bytes:
    """The bytes of one float32 value."""
    return Raw().encode({"x": torch.tensor(value)}, {}, None)[0]
