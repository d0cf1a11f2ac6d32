"""Bodies of a message: a plan (which blocks) and fields (payloads by id).

    1  plan: 0 all blocks; 1 a bitmap of ceil(blocks / 8) bytes follows
    v  number of fields
       per field, ids ascending: 1 id, v length, payload

v is an unsigned LEB128 integer in its shortest form, at most 5 bytes. Block i of the plan is bit i % 8 of byte i // 8.
See `thinwire.wire.message` for the payload of each field.

>>> schema = Schema(b"12345678", ("conv", "fc"))
>>> data = pack_body(Body(frozenset({"fc"}), {COORDS: b"abcd"}), schema)
>>> data.hex(), bytes(unpack_body(data, schema).fields[COORDS])
('010201010461626364', b'abcd')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, read_varint, varint

# Ids of fields. They are part of the format.
COORDS, WEIGHT, BUFFERS, SHARED, REPORT, BASE, VALUES, DRIFT_CHECK = 1, 2, 3, 4, 5, 6, 7, 8


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
        thinwire.errors.WireError: checksum does not match: the message is damaged, or was sent by another client
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
    out: list[Bytes] = [
        b"\0" if everything else b"\1" + _bitmap(body.plan or frozenset(), schema.blocks),
        varint(len(body.fields)),
    ]
    for number, payload in sorted(body.fields.items()):
        out += [bytes([number]), varint(len(payload)), payload]
    return out


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
    flag, position = data[position], position + 1
    plan: frozenset[str] | None = None
    if flag == 1:
        width = -(-len(schema.blocks) // 8)
        plan, position = _read_bitmap(data[position : position + width], schema.blocks), position + width
    elif flag != 0:
        raise WireError(f"plan flag {flag} is not known, expected 0 or 1")
    count, position = read_varint(data, position)
    fields: dict[int, memoryview] = {}
    last = -1
    for _ in range(count):
        if position >= len(data):
            raise WireError("message ends where a field should begin")
        number, position = data[position], position + 1
        if number <= last:
            raise WireError(f"field {number} follows field {last}: fields must ascend")
        length, position = read_varint(data, position)
        if length > len(data) - position:
            raise WireError(f"field {number} announces {length} bytes, {len(data) - position} are left")
        fields[number], position = data[position : position + length], position + length
        last = number
    return plan, fields, position


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
