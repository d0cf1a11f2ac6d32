"""Mutated messages that pass the outer checks: for `fuzz_wire.py`.

`repaired` turns any bytes into a message: kind, plans, fields and lengths are corrected, and the checksum is valid.
`built` starts from the parts of a real message, changes them with knowledge of the format, and packs it again: a body
of another message, a body repeated up to thousands of times with matching versions, other plans with matching values,
values at the limits of their range, other lengths in a payload.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.wire import message as wire
from thinwire.wire.bits import read_varint, varint
from thinwire.wire.message import _MAX_COUNT as MAX_COUNT, FIELDS

LARGEST = (1 << 35) - 1  # the values of a varint
FLOATS = tuple(
    struct.pack("<I", bits)
    for bits in (
        0x7F7FFFFF, 0xFF7FFFFF,  # the largest finite values
        0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001,  # infinities and NaNs
        0x00000001, 0x80000001, 0x007FFFFF, 0x00800000,  # subnormal values, and the smallest normal one
        0x00000000, 0x80000000, 0x3F800000,
    )
)  # fmt: skip
EXTREMES = (3.4028235e38, -3.4028235e38, 1e30, -1e20, 1e25, 1e10, 1e-45, -1e-39, 1e-38, 0.0, -0.0, float("nan"))
EXTREMES += (float("inf"), float("-inf"))
REPEATS = (2, 3, 5, 9, 17, 40)
MANY = (127, 128, 129, 511, 512, 513, 5000)

Encode = Callable[[frozenset[str], float], bytes]  # these blocks filled with one value, encoded by the codec


class Parts(NamedTuple):
    """The parts of a message."""

    kind: int
    version: int
    behind: int
    bodies: list[wire.Body]

    def packed(self, schema: wire.Schema) -> bytes:
        """The message, with valid lengths and checksum."""
        bodies = [packed_body(body, schema) for body in self.bodies]
        version, behind = min(self.version, LARGEST), min(self.behind, LARGEST)
        return bytes(wire.pack(self.kind, version, bodies, schema, behind))


def repaired(data: bytes, schema: wire.Schema, kind: int) -> bytes:
    """A message with a valid structure from any bytes.

    Args:
        data: starts like a message; the rest is arbitrary.
        schema: the schema of the contract.
        kind: replaces an unknown kind.
    """
    kind = data[0] & 15 if data and data[0] & 15 in wire.KINDS else kind
    body = data[2:-4]
    version, at = _number(body, 0)
    behind = 0
    if kind in (wire.STEPS, wire.STATE):
        behind, at = _number(body, at)
    bodies = []
    while at < len(body) and len(bodies) <= wire.MAX_STEPS:
        one, at = _body(body, at, schema)
        bodies.append(one)
    return Parts(kind, version, min(behind, version), bodies).packed(schema)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A varint, possibly not in its shortest form, and its end."""
    with suppress(WireError):
        return read_varint(data, at)
    return (data[at] & 0x7F if at < len(data) else 0), at + 1


def _body(data: bytes, at: int, schema: wire.Schema) -> tuple[wire.Body, int]:
    """A body from arbitrary bytes; consumes at least one byte."""
    present, at = _number(data, at)
    plan = None
    if present & 1:
        width = -(-len(schema.blocks) // 8)
        bits = int.from_bytes(data[at : at + width], "little")
        plan = frozenset(name for i, name in enumerate(schema.blocks) if bits >> i & 1)
        at += width
    fields: dict[int, bytes] = {}
    for field in FIELDS:
        if at >= len(data):
            break
        if present >> field & 1:
            length = len(varint(_number(data, at)[0])) if field == wire.WEIGHT else 4
            if field not in (wire.WEIGHT, wire.DRIFT_CHECK):
                length, at = _number(data, at)
            fields[field] = data[at : at + length]
            at += len(fields[field])
    return wire.Body(plan, fields), at


def packed_body(body: wire.Body, schema: wire.Schema) -> bytes:
    """A body with any payloads: a weight that is no integer becomes one, a drift check gets four bytes.

    Fields that the format does not have are written as their bit and a payload with a length.
    """
    known = {field: payload for field, payload in body.fields.items() if field in FIELDS}
    if wire.WEIGHT in known:
        known[wire.WEIGHT] = varint(_number(known[wire.WEIGHT], 0)[0])
    if wire.DRIFT_CHECK in known:
        known[wire.DRIFT_CHECK] = (known[wire.DRIFT_CHECK] + bytes(4))[:4]
    data = wire.pack_body(wire.Body(body.plan, known), schema)
    others = {field: payload for field, payload in body.fields.items() if field not in FIELDS}
    if not others:
        return data
    bits, start = read_varint(data)
    tail = b"".join(varint(len(others[field])) + others[field] for field in sorted(others))
    return varint(bits | sum(1 << field for field in others)) + data[start:] + tail


def built(
    rng: random.Random, parts: Parts, schema: wire.Schema, others: Sequence[Parts], encode: Encode | None
) -> bytes:
    """A message of changed parts; mostly with versions that continue from the receiver's."""
    held = parts.version - parts.behind
    for _ in range(rng.choice((1, 1, 2, 3))):
        change = rng.choice((_repeat, _swap, _replan, _extreme, _extreme, _relength, _cross, _rekind))
        parts = change(rng, parts, others)
    if encode is not None and parts.bodies and rng.random() < 0.5:
        parts = _encoded(rng, parts, encode, schema)
    if parts.kind == wire.STEPS and rng.random() < 0.9:
        way = max(0, len(parts.bodies) - 1)
        parts = parts._replace(version=held + way, behind=way)
    elif parts.kind == wire.STATE and rng.random() < 0.9:
        parts = parts._replace(behind=max(0, parts.version - held))
    return parts.packed(schema)


def _at(rng: random.Random, parts: Parts) -> tuple[int, wire.Body]:
    if not parts.bodies:
        return 0, wire.Body()
    at = rng.randrange(len(parts.bodies))
    return at, parts.bodies[at]


def _with(parts: Parts, at: int, *bodies: wire.Body) -> Parts:
    return parts._replace(bodies=[*parts.bodies[:at], *bodies, *parts.bodies[at + 1 :]])


def _repeat(rng: random.Random, parts: Parts, others: Sequence[Parts]) -> Parts:
    """Repeat one body; long ones up to half a megabyte in total."""
    at, body = _at(rng, parts)
    size = 8 + sum(map(len, body.fields.values()))
    if rng.random() < 0.2:
        body, size = wire.Body(frozenset(), dict.fromkeys(body.fields, b"")), 8
    times = rng.choice(MANY if rng.random() < 0.1 else REPEATS)
    return _with(parts, at, *[body] * max(2, min(times, 500_000 // size)))


def _swap(rng: random.Random, parts: Parts, others: Sequence[Parts]) -> Parts:
    """Replace a body by one of another message."""
    at, _ = _at(rng, parts)
    theirs = rng.choice(others).bodies or parts.bodies or [wire.Body()]
    return _with(parts, at, rng.choice(theirs))


def _replan(rng: random.Random, parts: Parts, others: Sequence[Parts]) -> Parts:
    """Combine the plan of another body with the fields of this one, or vice versa."""
    at, body = _at(rng, parts)
    bodies = [b for one in others for b in one.bodies] or [wire.Body()]
    plan = rng.choice((None, frozenset(), rng.choice(bodies).plan))
    return _with(parts, at, wire.Body(plan, body.fields))


def _extreme(rng: random.Random, parts: Parts, others: Sequence[Parts]) -> Parts:
    """Set some or all values of a field to the limits of their range."""
    at, body = _at(rng, parts)
    if not body.fields:
        return parts
    field = rng.choice(sorted(body.fields))
    if field == wire.WEIGHT:
        limit = rng.choice((0, 1, MAX_COUNT, MAX_COUNT + int.from_bytes(rng.choice(FLOATS), "little"), LARGEST))
        return _with(parts, at, wire.Body(body.plan, {**body.fields, field: varint(limit)}))
    data, value = bytearray(body.fields[field]), rng.choice(FLOATS)
    first = rng.choice((0, 0, 1, 2, 3, 5))  # after the header of a codec
    count = max(0, (len(data) - first) // 4)
    where = range(count) if rng.random() < 0.3 else [rng.randrange(count) for _ in range(min(count, 3))]
    for i in where:
        data[first + 4 * i : first + 4 * i + 4] = value if rng.random() < 0.9 else rng.choice(FLOATS)
    return _with(parts, at, wire.Body(body.plan, {**body.fields, field: bytes(data)}))


def _relength(rng: random.Random, parts: Parts, others: Sequence[Parts]) -> Parts:
    """Change the leading length of a field, or its size."""
    at, body = _at(rng, parts)
    if not body.fields:
        return parts
    field = rng.choice(sorted(body.fields))
    data = body.fields[field]
    if rng.random() < 0.5:
        first, end = _number(data, 0)
        other = rng.choice((0, 1, first + 1, max(0, first - 1), len(data), 4095, 4096, 16_730, LARGEST))
        data = varint(min(other, LARGEST)) + data[end:]
    else:
        size = len(rng.choice(list(body.fields.values()))) + rng.choice((-1, 0, 1, 4))
        data = (data + bytes(max(0, size)))[: max(0, size)]
    return _with(parts, at, wire.Body(body.plan, {**body.fields, field: data}))


def _cross(rng: random.Random, parts: Parts, others: Sequence[Parts]) -> Parts:
    """Replace or add a field of another message."""
    at, body = _at(rng, parts)
    fields = [field for one in others for b in one.bodies for field in b.fields.items()]
    if not fields:
        return parts
    field, data = rng.choice(fields)
    field = rng.choice((field, *body.fields))
    return _with(parts, at, wire.Body(body.plan, {**body.fields, field: data}))


def _rekind(rng: random.Random, parts: Parts, others: Sequence[Parts]) -> Parts:
    """Change the kind, with a matching number of bodies, or the version."""
    if rng.random() < 0.4:
        version = rng.choice((0, parts.version + 1, parts.version + 255, 1 << 31, LARGEST))
        return parts._replace(version=version, behind=min(version, parts.behind))
    kind = rng.choice((wire.UP, wire.STEPS, wire.STATE, wire.LOST))
    count = {wire.UP: 1, wire.STEPS: len(parts.bodies), wire.STATE: 2, wire.LOST: 0}[kind]
    bodies = (parts.bodies + [b for one in others for b in one.bodies])[:count]
    return parts._replace(kind=kind, bodies=bodies)


def _encoded(rng: random.Random, parts: Parts, encode: Encode, schema: wire.Schema) -> Parts:
    """Encode values at the limits of their range, so that all bytes are those of a real sender."""
    at, body = _at(rng, parts)
    plan = schema.everything if body.plan is None else body.plan
    try:
        with np.errstate(all="ignore"):
            payload = encode(plan, rng.choice(EXTREMES))
    except Exception:  # a codec need not encode values that no sender has
        return parts
    return _with(parts, at, wire.Body(body.plan, {**body.fields, wire.COORDS: payload}))
