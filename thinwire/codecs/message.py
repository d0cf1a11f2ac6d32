"""The wire format: one header, some bodies, one checksum. Nothing is pickled, named or described.

    message                                        body: what one version adds, or what one client says
      2  magic "TW"                                  1  plan: 0 all blocks; 1 a bitmap of ceil(blocks / 8) bytes follows
      1  format, now 1                               v  number of lanes
      1  kind: 1 up, 2 steps, 3 state                   per lane, ids ascending: 1 id, v length, payload
      4  schema: method and model, hashed
      v  version                                   v = unsigned LEB128 in its shortest form, at most 5 bytes;
      v  number of bodies                          block i of the plan is bit i % 8 of byte i // 8
         bodies
      4  CRC-32 (that of zlib, little endian) of the full 8-byte schema and all that stands before

An `up` message has one body: a client's change, trained from `version`. `steps` carries the bodies of the versions
`version - n` to `version - 1`, the way of a client from there to `version` (n = 0: "you are up to date"). `state`
carries one body: the blocks that changed since the client's version, whole. Both end in one more body, the *ask*,
which has no lanes: its plan says which blocks the round that they open wants to hear of.

Every length is checked against the bytes that are there before anything is made, each message has exactly one
encoding, and whatever else arrives is refused with a WireError.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.codecs.bits import read_varint, varint
from thinwire.errors import WireError

MAGIC = b"TW"
FORMAT = 1
UP, STEPS, STATE = 1, 2, 3
KINDS = {UP: "up", STEPS: "steps", STATE: "state"}

# Lanes: payloads of different meaning in one body. Their ids are part of the format.
COORDS, WEIGHT, BUFFERS, SHARED, REPORT, BASE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Body:
    """One entry of a message: which blocks it covers, and its lanes.

    Args:
        plan: names of the blocks, or None for all of them.
        lanes: payload of each lane by id.
    """

    plan: frozenset[str] | None = None
    lanes: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Schema:
    """What both ends agreed on before the first message: a hash of method and model, and the names of the blocks."""

    digest: bytes  # eight bytes
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Message:
    """A decoded message; the bodies are still bytes until `unpack_body`: views of the message, not copies."""

    kind: int
    version: int
    bodies: tuple[memoryview, ...]


def pack_body(body: Body, schema: Schema) -> bytes:
    """A body as bytes."""
    everything = body.plan is None or body.plan == frozenset(schema.blocks)
    out = [b"\0" if everything else b"\1" + _bitmap(body.plan or frozenset(), schema.blocks), varint(len(body.lanes))]
    for lane, payload in sorted(body.lanes.items()):
        out += [bytes([lane]), varint(len(payload)), payload]
    return b"".join(out)


def unpack_body(data: bytes | memoryview, schema: Schema) -> Body:
    """A body from exactly these bytes."""
    plan, lanes, end = _read_body(memoryview(data), 0, schema)
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the end of a body")
    return Body(plan, {lane: bytes(payload) for lane, payload in lanes.items()})


def pack(kind: int, version: int, bodies: Sequence[bytes], schema: Schema) -> bytes:
    """A whole message as bytes.

    >>> schema = Schema(b"12345678", ("w",))
    >>> data = pack(UP, 3, [pack_body(Body(lanes={COORDS: b"abcd"}), schema)], schema)
    >>> len(data), unpack_body(unpack(data, schema).bodies[0], schema).lanes
    (22, {1: b'abcd'})
    """
    head = MAGIC + bytes([FORMAT, kind]) + schema.digest[:4] + varint(version) + varint(len(bodies))
    data = head + b"".join(bodies)
    return data + _checksum(data, schema)


def unpack(data: bytes, schema: Schema) -> Message:
    """A message from bytes that may come from anywhere."""
    if len(data) < 14:
        raise WireError(f"{len(data)} bytes are too few for a message (at least 14)")
    if data[:2] != MAGIC:
        raise WireError(f"not a thinwire message: it starts with {data[:2].hex()}, expected {MAGIC.hex()}")
    if data[2] != FORMAT:
        raise WireError(f"message format {data[2]} is not known, expected {FORMAT}")
    if data[3] not in KINDS:
        raise WireError(f"message kind {data[3]} is not known, expected one of {sorted(KINDS)}")
    if data[4:8] != schema.digest[:4]:
        raise WireError(
            f"message for another method or model: schema {data[4:8].hex()}, ours {schema.digest[:4].hex()}"
        )
    payload = memoryview(data)[:-4]
    if data[-4:] != _checksum(payload, schema):
        raise WireError("checksum does not match: the message was damaged on its way")
    version, position = read_varint(payload, 8)
    count, position = read_varint(payload, position)
    bodies = []
    for _ in range(count):
        _, _, end = _read_body(payload, position, schema)
        bodies.append(payload[position:end])
        position = end
    if position != len(payload):
        raise WireError(f"{len(payload) - position} bytes follow the last body")
    wanted = {UP: (1, 1), STATE: (2, 2), STEPS: (1, count)}[data[3]]
    if not wanted[0] <= count <= wanted[1]:
        more = " or more" if data[3] == STEPS else ""
        raise WireError(f"a message of kind {KINDS[data[3]]!r} has {wanted[0]}{more} bodies, this one has {count}")
    return Message(data[3], version, tuple(bodies))


def _read_body(
    data: memoryview, position: int, schema: Schema
) -> tuple[frozenset[str] | None, dict[int, memoryview], int]:
    """Plan, lanes as views of the data, and where the body ends."""
    if position >= len(data):
        raise WireError("message ends where a body should begin")
    flag, position = data[position], position + 1
    plan: frozenset[str] | None = None
    if flag == 1:
        width = -(-len(schema.blocks) // 8)
        plan, position = _read_bitmap(data[position : position + width], schema.blocks), position + width
    elif flag != 0:
        raise WireError(f"plan flag {flag} is not known, expected 0 or 1")
    count, position = read_varint(data, position)
    lanes: dict[int, memoryview] = {}
    last = -1
    for _ in range(count):
        if position >= len(data):
            raise WireError("message ends where a lane should begin")
        lane, position = data[position], position + 1
        if lane <= last:
            raise WireError(f"lane {lane} follows lane {last}: lanes must ascend")
        length, position = read_varint(data, position)
        if length > len(data) - position:
            raise WireError(f"lane {lane} announces {length} bytes, {len(data) - position} are left")
        lanes[lane], position = data[position : position + length], position + length
        last = lane
    return plan, lanes, position


def _checksum(data: bytes | memoryview, schema: Schema) -> bytes:
    return zlib.crc32(data, zlib.crc32(schema.digest)).to_bytes(4, "little")


def _bitmap(plan: frozenset[str], blocks: tuple[str, ...]) -> bytes:
    out = bytearray(-(-len(blocks) // 8))
    for i, name in enumerate(blocks):
        if name in plan:
            out[i // 8] |= 1 << i % 8
    return bytes(out)


def _read_bitmap(data: memoryview, blocks: tuple[str, ...]) -> frozenset[str]:
    if len(data) != -(-len(blocks) // 8):
        raise WireError("message ends inside the plan")
    names = frozenset(name for i, name in enumerate(blocks) if data[i // 8] >> i % 8 & 1)
    if _bitmap(names, blocks) != data:
        raise WireError("the plan names a block that does not exist")
    if len(names) == len(blocks):
        raise WireError("a plan of all blocks must be written as 0")
    return names
