"""Bodies of a message: a plan (which blocks) and fields (payloads by id).

    v  bits: bit 0 if a bitmap follows; bit i if field i is present
       the plan, if bit 0 is set: a bitmap of ceil(blocks / 8) bytes; all blocks otherwise
       per field, ids ascending: v length, payload; weight is one v and drift_check four bytes, both without a length

v is an unsigned LEB128 integer in its shortest form, at most 5 bytes. Block i of the plan is bit i % 8 of byte i // 8.
See `thinwire.wire.message` for the payload of each field.

>>> schema = Schema(b"12345678", ("conv", "fc"))
>>> data = pack_body(Body(frozenset({"fc"}), {COORDS: b"abcd"}), schema)
>>> data.hex(), bytes(unpack_body(data, schema).fields[COORDS])
('03020461626364', b'abcd')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, read_varint, varint

# Ids of fields. They are part of the format. Bits 0 to 6 fit into one byte, so the frequent fields come first.
COORDS, WEIGHT, VALUES, DRIFT_CHECK, BUFFERS, SHARED, REPORT, BASE, SUM, STACK = FIELDS = range(1, 11)
_DRIFT_CHECK_BYTES = 4


@dataclass(frozen=True)
class Schema:
    """A hash of method and model, the names of all blocks, and who sends.

    Args:
        digest: eight bytes: the hash of method, model, initial weights and seed.
        blocks: names of all blocks, in the order of the bitmap of a plan.
        sender: the id of the client that sends, eight bytes; empty for messages of the server.
    """

    digest: bytes
    blocks: tuple[str, ...]
    sender: bytes = b""

    def sent_by(self, client: int) -> Schema:
        """The schema of messages of this client. Its id is part of the checksum and takes no bytes.

        >>> from thinwire.wire.message import LOST, pack, unpack
        >>> schema = Schema(b"12345678", ("w",))
        >>> data = pack(LOST, 3, (), schema.sent_by(5))
        >>> unpack(data, schema.sent_by(6))
        Traceback (most recent call last):
        thinwire.errors.WireError: checksum does not match: damaged, by another client, or for another method or model
        """
        return Schema(self.digest, self.blocks, client.to_bytes(8, "little", signed=True))

    @cached_property
    def everything(self) -> frozenset[str]:
        """The plan of all blocks."""
        return frozenset(self.blocks)


@dataclass(frozen=True)
class Body:
    """Which blocks a part of a message is about, and its fields.

    Args:
        plan: names of the blocks, or None for all of them.
        fields: the payload of each field by id.
    """

    plan: frozenset[str] | None = None
    fields: Mapping[int, Bytes] = field(default_factory=dict)


def pack_body(body: Body, schema: Schema) -> bytes:
    """Encode a body. The inverse of `unpack_body`."""
    return b"".join(body_parts(body, schema))


def body_parts(body: Body, schema: Schema) -> list[Bytes]:
    """Encode a body as a list of byte strings, so that long payloads are not copied before they are joined."""
    everything = body.plan is None or body.plan == schema.everything
    if unknown := [number for number in body.fields if number not in FIELDS]:
        raise WireError(f"field {unknown[0]} is not known, expected one of {FIELDS[0]} to {FIELDS[-1]}")
    out: list[Bytes] = [varint(_bits(body.fields) | (not everything))]
    if not everything:
        out.append(_bitmap(body.plan or frozenset(), schema.blocks))
    for number, payload in sorted(body.fields.items()):
        if number not in (WEIGHT, DRIFT_CHECK):
            out.append(varint(len(payload)))
        elif (end := _field(payload, 0, number)[1]) != len(payload):
            raise WireError(f"{len(payload) - end} bytes follow the end of field {number}")
        out.append(payload)
    return out


def body_length(plan: frozenset[str], lengths: Mapping[int, int], schema: Schema) -> int:
    """The length of a body with these blocks, and with payloads of these lengths by field id.

    >>> schema = Schema(b"12345678", ("conv", "fc"))
    >>> body_length(frozenset({"fc"}), {COORDS: 4}, schema)
    7
    """
    bare = len(pack_body(Body(plan), schema)) - 1
    prefixes = (len(varint(size)) for number, size in lengths.items() if number not in (WEIGHT, DRIFT_CHECK))
    return bare + len(varint(_bits(lengths))) + sum(lengths.values()) + sum(prefixes)


def unpack_body(data: Bytes, schema: Schema) -> Body:
    """Decode a body from exactly these bytes; its fields are views of them. The inverse of `pack_body`."""
    plan, fields, end = read_body(memoryview(data), 0, schema)
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the end of a body")
    return Body(plan, fields)


def read_body(
    data: memoryview, position: int, schema: Schema
) -> tuple[frozenset[str] | None, dict[int, memoryview], int]:
    """Decode the body at this position: its plan, its fields (views of the data), and the position after it."""
    if position >= len(data):
        raise WireError("message ends where a body should begin")
    bits, position = read_varint(data, position)
    if bits >> FIELDS.stop:
        raise WireError(f"field {bits.bit_length() - 1} is not known, expected one of {FIELDS[0]} to {FIELDS[-1]}")
    plan: frozenset[str] | None = None
    if bits & 1:
        width = -(-len(schema.blocks) // 8)
        plan, position = _read_bitmap(data[position : position + width], schema.blocks), position + width
    fields: dict[int, memoryview] = {}
    for number in FIELDS:
        if bits >> number & 1:
            start, position = _field(data, position, number)
            fields[number] = data[start:position]
    return plan, fields, position


def _bits(numbers: Iterable[int]) -> int:
    """Field ids as the bits of an integer."""
    return sum(1 << number for number in numbers)


def _field(data: Bytes, position: int, number: int) -> tuple[int, int]:
    """Where the payload of the field at this position starts and ends."""
    if number == WEIGHT:
        return position, read_varint(data, position)[1]
    length = _DRIFT_CHECK_BYTES
    if number != DRIFT_CHECK:
        length, position = read_varint(data, position)
    if length > len(data) - position:
        raise WireError(f"field {number} announces {length} bytes, {len(data) - position} are left")
    return position, position + length


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
        raise WireError("a plan of all blocks must be written without a bitmap")
    return names
