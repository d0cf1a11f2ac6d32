"""The wire format: a header, bodies and a checksum. Messages hold no names, no shapes and no pickled objects.

    message                                        body
      1  format, now 3 (high four bits), and kind     v  bits: bit 0 if a bitmap follows; bit i if field i is present
         (low four): 1 up, 2 steps, 3 state, 4 lost      the plan, if bit 0 is set: a bitmap of ceil(blocks / 8)
      1  schema: the first byte of the hash                bytes; else all blocks
      v  version                                         per field, ids ascending: v length, payload; weight and
      v  behind (steps and state only)                     drift_check have no length
         bodies, up to the checksum
      4  CRC-32 (zlib's, little endian) of the full 8-byte schema; in messages of clients, of the client id
         (8 bytes, little endian); and of all preceding bytes

    v = unsigned LEB128 in its shortest form, at most 5 bytes; block i of the plan is bit i % 8 of byte i // 8;
    raw = the values of all blocks in order, little endian

The schema is a hash of the method with all its settings, the names, shapes and types of all blocks, the initial weights
and buffers, and the seed.

**up**, from a client: its upload, trained from `version`. One body; its plan is that of the round.

**steps** and **state**, to a client that holds version `version - behind`: they bring it to `version`. The last body is
the *request* for an upload; the bodies before it are the download.

- steps: each body continues from the version that the body before it ends at; the last one ends at `version`. With
  field 1 it is a *ledger entry*: the update of one version. With field 3 it is a *window snapshot*: the blocks of its
  plan at the end of the window in which it begins, or at `version`, whichever comes first, before any merge. With field
  9 it is the *sum* of all entries up to `version`, in a method that never merges and adds without rounding. A window
  is the rounds of one basis: from a multiple of `redraw_every` up to the next, or all rounds if that is 0. The receiver
  merges at the end of a window. A client that is up to date (behind = 0) receives no such body. There are at most 512,
  because each body can cost the receiver one pass over the model, however short it is; a longer download is sent as
  window snapshots or as a state.
- state: one body, the whole public state. Its plan names the blocks that were synchronized since the client's version;
  its fields hold all blocks.
- request: its plan names the blocks to upload. Its fields are the part of the public state besides the coordinates.

**lost**, from a client at `version` whose drift check failed: no body. It requests a state.

    field           in                payload
    1  coords       up, entry         the code of the plan's blocks, encoded by the codec of that direction
                    state             all blocks that are ever sent: raw; on full download, encoded by the down codec
    2  weight       up                the client's weight in the mean, if `client_weight` sends it: see `pack_weight`
    3  values       window snapshot   the plan's blocks, raw; at the end of a window, encoded by `merge_codec`
    4  drift_check  request           float32, on incremental download unless drift_check = false:
                                      see `protocol/drift_check.py`
    5  buffers      up                all buffers after training, raw, if the model has any
                    request           those of `version`, in a state or if behind > 0
    6  shared       up                what the correction sends to the server, raw, if anything
                    request           its shared state at `version`, raw, if it has one; in a state or if behind > 0
    7  report       up                what the schedule measures on the client, raw, if anything
    8  base         state             the base, raw, if it was ever merged into (`version` is in a later window than 0)
    9  sum          sum               the plan's blocks, encoded by `merge_codec`
    10 stack        entry             in a space that adds clients' adapters to the base: v how many are stacked, then
                                      their factors, encoded by the down codec: see `spaces/exact_lora.py`

Each length is checked against the available bytes before memory is allocated, and the kind and length of the message
before its bodies are read. Each message has exactly one encoding. All other bytes are refused with a WireError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

import numpy as np

from thinwire.core.parallel import empty_long
from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, pack as pack_bits, read_varint, unpack as unpack_bits, varint, width

try:
    from isal.isal_zlib import crc32  # ten times as fast as zlib
except ImportError:  # a machine for which there is no wheel
    from zlib import crc32  # type: ignore[assignment]

FORMAT = 3
UP, STEPS, STATE, LOST = 1, 2, 3, 4
KINDS = {UP: "up", STEPS: "steps", STATE: "state", LOST: "lost"}
FROM_CLIENTS = frozenset({UP, LOST})
_SHORT = 2048  # bytes of a message that is copied faster than a view of it is made
_SHORTEST = 7  # bytes: format and kind, schema, version, checksum
MAX_STEPS = 512  # bodies of steps before the request
# Ids of fields. They are part of the format. Bits 0 to 6 fit into one byte, so the frequent fields come first.
COORDS, WEIGHT, VALUES, DRIFT_CHECK, BUFFERS, SHARED, REPORT, BASE, SUM, STACK = FIELDS = range(1, 11)
_DRIFT_CHECK_BYTES = 4
_MAX_COUNT = 1 << 24  # the first integer after it is not a float32


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


@dataclass(frozen=True)
class Message:
    """A decoded message. Its bodies are views of the message; `unpack_body` decodes them."""

    kind: int
    version: int
    behind: int  # how many versions the receiver is behind; 0 in messages of clients
    bodies: Sequence[memoryview]
    first: Body | None  # the first body, decoded: messages of clients have at most one


def pack(
    kind: int,
    version: int,
    bodies: Iterable[Bytes],
    schema: Schema,
    behind: int = 0,
) -> Bytes:
    """Encode a message. The inverse of `unpack`.

    Args:
        kind: one of `KINDS`.
        version: the version that the message brings the receiver to, or from which the client trained.
        bodies: encoded bodies in order, whole or in parts (`body_parts`).
        schema: of the contract and the sender.
        behind: how many versions the receiver is behind.

    >>> schema = Schema(b"12345678", ("w",))
    >>> data = pack(UP, 3, [pack_body(Body(fields={COORDS: b"abcd"}), schema)], schema.sent_by(0))
    >>> len(data), bytes(unpack_body(unpack(data, schema.sent_by(0)).bodies[0], schema).fields[COORDS])
    (13, b'abcd')
    """
    return join(pack_parts(kind, version, bodies, schema, behind).parts)


@dataclass(frozen=True)
class Parts:
    """A message as the byte strings that it consists of, which several messages share."""

    parts: tuple[Bytes, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


def pack_parts(kind: int, version: int, bodies: Iterable[Bytes], schema: Schema, behind: int = 0) -> Parts:
    """Encode a message without copying its bodies; see `pack`."""
    head = bytes([FORMAT << 4 | kind]) + schema.digest[:1] + varint(version)
    parts = (head, varint(behind) if kind in (STEPS, STATE) else b"", *bodies)
    checksum = crc32(schema.digest + schema.sender)
    for part in parts:
        checksum = crc32(part, checksum)
    return Parts((*parts, checksum.to_bytes(4, "little")))


def join(parts: Sequence[Bytes], room: np.ndarray | None = None) -> Bytes:
    """Join byte strings; the longest part of a long result begins at a multiple of 8, so that torch reads it in place.

    Args:
        parts: the byte strings.
        room: a byte array. If it holds the longest part, with space before and after, the others are written there.

    numpy releases the GIL while it copies. Measured on an H200 with ten uploads of 4.6 MB a round (CIFAR CNN): 14 ms a
    round with room around the values, 22 with a copy of them, 36 with `bytes.join`.
    """
    size = sum(map(len, parts))
    if size < _SHORT:
        return b"".join(parts)
    longest = max(range(len(parts)), key=lambda i: len(parts[i]))
    before = sum(map(len, parts[:longest]))
    start = -1
    if room is not None:
        own, base = (one.__array_interface__["data"][0] for one in (np.frombuffer(parts[longest], np.uint8), room))
        start = own - base - before
    if room is not None and 0 <= start <= len(room) - size:
        out = room[start : start + size]
    else:
        start, out = -1, empty_long(size + -before % 8).numpy()[-before % 8 :]
    at = 0
    for i, part in enumerate(parts):
        if start < 0 or i != longest:
            out[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return out.data


def unpack(data: Bytes, schema: Schema, longest: int | None = None) -> Message:
    """Decode a message from untrusted bytes. The inverse of `pack`.

    Args:
        data: the bytes.
        schema: of the contract and the sender, which decides the kinds that are accepted.
        longest: the largest number of bytes that is accepted.
    """
    kind, payload = _check_head(data, schema, longest), memoryview(data)[:-4]
    if int.from_bytes(data[-4:], "little") != crc32(payload, crc32(schema.digest + schema.sender)):
        other = " by another client," if schema.sender else ""
        raise WireError(f"checksum does not match: damaged,{other} or for another method or model")
    version, position = read_varint(payload, 2)
    behind = 0
    if kind in (STEPS, STATE):
        behind, position = read_varint(payload, position)
        if behind > version:
            raise WireError(f"a message to version {version} cannot start {behind} versions before it")
    steps = min(behind, 1) + 1, min(behind, MAX_STEPS) + 1
    least, most = {UP: (1, 1), STEPS: steps, STATE: (2, 2), LOST: (0, 0)}[kind]
    bodies, first = list[memoryview](), None
    while position < len(payload) and len(bodies) <= most:  # stop at the first body too many
        body, end = _read_body(payload, position, schema)
        first = first or body
        bodies.append(payload[position:end])
        position = end
    if not least <= len(bodies) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        found = f"{len(bodies)}" + (" or more" if len(bodies) > most else "")
        raise WireError(f"a message of kind {KINDS[kind]!r} has {wanted} bodies, this one has {found}")
    return Message(kind, version, behind, bodies, first)


def _check_head(data: Bytes, schema: Schema, longest: int | None) -> int:
    """The kind of a message; header and length are checked before any body is read."""
    if len(data) < _SHORTEST:
        raise WireError(f"{len(data)} bytes are too few for a message (at least {_SHORTEST})")
    if longest is not None and len(data) > longest:
        raise WireError(f"the message has {len(data)} bytes, expected at most {longest}")
    if data[0] >> 4 != FORMAT:
        expected = f"expected {FORMAT}1 to {FORMAT}{max(KINDS)}"
        raise WireError(f"not a message of format {FORMAT}: its first byte is {data[0]:02x}, {expected}")
    kind = data[0] & 15
    if kind not in KINDS:
        raise WireError(f"message kind {kind} is not known, expected one of {sorted(KINDS)}")
    if data[1] != schema.digest[0]:
        raise WireError(
            f"message for another method or model: schema {data[1]:02x}, ours {schema.digest[0]:02x}; method, model, "
            "initial weights and seed must be the same on both sides"
        )
    if (kind in FROM_CLIENTS) is not bool(schema.sender):
        raise WireError(
            f"a message of kind {KINDS[kind]!r} came from {'a client' if schema.sender else 'the server'}, "
            f"which never sends it"
        )
    return kind


def pack_body(body: Body, schema: Schema) -> Bytes:
    """Encode a body. The inverse of `unpack_body`."""
    joined = join(body_parts(body, schema))
    return joined if isinstance(joined, bytes) else joined.toreadonly()  # ledgers keep bodies


def body_parts(body: Body, schema: Schema) -> list[Bytes]:
    """Encode a body as a list of byte strings, so that long payloads are not copied before they are joined."""
    bits = sum(1 << number for number in body.fields)
    out: list[Bytes] = [varint(bits)]
    if not (body.plan is None or body.plan == schema.everything):
        out = [varint(bits | 1), _bitmap(body.plan, schema.blocks)]
    for number, payload in sorted(body.fields.items()):
        if number not in (WEIGHT, DRIFT_CHECK):
            out.append(varint(len(payload)))
        out.append(payload)
    return out


def unpack_body(data: Bytes, schema: Schema) -> Body:
    """Decode a body from exactly these bytes; its fields are views of them. The inverse of `pack_body`."""
    body, end = _read_body(memoryview(data), 0, schema)
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the end of a body")
    return body


def _read_body(data: memoryview, position: int, schema: Schema) -> tuple[Body, int]:
    """Decode the body at this position; its fields are views of the data. Also returns the position after it."""
    if position >= len(data):
        raise WireError("message ends where a body should begin")
    bits, position = read_varint(data, position)
    if bits >> FIELDS.stop:
        raise WireError(f"field {bits.bit_length() - 1} is not known, expected one of {FIELDS[0]} to {FIELDS[-1]}")
    plan: frozenset[str] | None = None
    if bits & 1:
        end = position + width(len(schema.blocks), 1)
        plan, position = _read_bitmap(data[position:end], schema.blocks), end
    fields: dict[int, memoryview] = {}
    for number in FIELDS:
        if not bits >> number & 1:
            continue
        if number == WEIGHT:
            end = read_varint(data, position)[1]
        else:
            length = _DRIFT_CHECK_BYTES
            if number != DRIFT_CHECK:
                length, position = read_varint(data, position)
            end = position + length
            if end > len(data):
                raise WireError(f"field {number} announces {length} bytes, {len(data) - position} are left")
        fields[number], position = data[position:end], end
    return Body(plan, fields), position


def _bitmap(plan: frozenset[str], blocks: tuple[str, ...]) -> bytes:
    return pack_bits(np.array([name in plan for name in blocks], np.bool_), 1)


def _read_bitmap(data: memoryview, blocks: tuple[str, ...]) -> frozenset[str]:
    names = frozenset(compress(blocks, unpack_bits(data, len(blocks), 1)))
    if len(names) == len(blocks):
        raise WireError("a plan of all blocks must be written without a bitmap")
    return names


def pack_weight(weight: float) -> bytes:
    """The weight of a client in the mean, rounded to float32, as one variable-length integer. See `unpack_weight`.

        u = w                    for an integer w from 0 to 2^24: the number of examples, two bytes from 128 to 16,383
        u = 2^24 + float32(w)    otherwise: the bits of w as an unsigned integer, at most five bytes

    float32 represents all integers up to 2^24, so what is decoded is always float32(w), and a weight has one encoding.

    >>> pack_weight(600.0).hex(), unpack_weight(pack_weight(0.75)), len(pack_weight(0.75))
    ('d804', 0.75, 5)
    """
    bits = struct.pack("<f", weight)
    rounded: float = struct.unpack("<f", bits)[0]
    is_count = 0 <= rounded <= _MAX_COUNT and rounded.is_integer()
    return varint(int(rounded) if is_count else _MAX_COUNT + int.from_bytes(bits, "little"))


def unpack_weight(data: Bytes) -> float:
    """Decode a weight that `pack_weight` encoded. It is not checked to be positive or finite."""
    value, end = read_varint(data)
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the end of a weight")
    if value <= _MAX_COUNT:
        return float(value)
    if (bits := value - _MAX_COUNT) >> 32:
        raise WireError(f"a weight of {value} is neither a count nor a float32")
    weight: float = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    if 0 <= weight <= _MAX_COUNT and weight.is_integer():
        raise WireError(f"the weight {weight:g} must be written as a count")
    return weight
