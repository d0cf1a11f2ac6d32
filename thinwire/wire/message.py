"""The wire format: one header, some bodies, one checksum. Nothing is pickled, named or described.

    message                                        body
      2  magic "TW"                                  1  plan: 0 all blocks; 1 a bitmap of ceil(blocks / 8) bytes follows
      1  format, now 2                               v  number of fields
      1  kind: 1 up, 2 steps, 3 state, 4 lost           per field, ids ascending: 1 id, v length, payload
      4  schema: method and model, hashed
      v  version                                   v = unsigned LEB128 in its shortest form, at most 5 bytes;
      v  behind (steps and state only)             block i of the plan is bit i % 8 of byte i // 8;
         bodies, up to the checksum                raw = the blocks one after another, as they are, little endian
      4  CRC-32 (that of zlib, little endian) of the full 8-byte schema, in what a client sends of its number
         (8 bytes, little endian), and of all that stands before

The schema is a hash of the method with all its settings, the names, shapes and types of all blocks, the initial weights
and buffers, and the seed.

**up**, from a client: what it has to say, trained from `version`. One body; its plan is that of the round.

**steps** and **state**, to a client that holds version `version - behind`, and to no other: they bring it to `version`.
Their last body is the *ask*; what stands before it is the way.

- steps: each body leads on from where the one before it ended, the last to `version`. With field 1 it is the *entry* of
  one version. With field 7 it is a *stretch*: the blocks of its plan as they are at the end of the window that it begins
  in, or at `version`, whichever comes first, and before any merge. A window is the rounds of one frame, from a multiple
  of `redraw_every` up to the next (one window for ever if that is 0). Where a window ends, the receiver merges. There is
  no such body for a client that is up to date (behind = 0), and there are at most 512: each may cost the receiver as
  much work as the model is large, however short it is. A longer way is sent as a stretch or a state.
- state: one body, the whole public state. Its plan names the blocks that were synchronised since the client's version;
  its fields hold them all.
- the ask: its plan says which blocks the round wants to hear of. Its fields are what is new besides coordinates.

**lost**, from a client that holds `version` and found that it is not the server's: no body. The answer is a state.

    field           in               payload
    1  coords      up, entry        the code of the plan's blocks, through the codec of that direction
                   state            all blocks that are ever sent: raw; on full download, through the down codec
    2  weight      up               how much the client counts in the mean, float32, where the weighing sends it
    3  buffers     up               all buffers after training, raw, if the model has any
                   ask              those of `version`, in a state or if behind > 0
    4  shared      up               what the correction tells the server, raw, if it does
                   ask              its shared memory at `version`, raw, if it has one; in a state or if behind > 0
    5  report      up               what the schedule wants to know, raw, if anything
    6  base        state            the base, raw, if it was ever merged into (`version` is in a later window than 0)
    7  values      stretch          the plan's blocks, raw; where a window ends, by the codec `settle`
    8  guard       ask              float32, on incremental download unless drift_check = false: see `protocol/drift_check.py`

Every length is checked against the bytes that are there before anything is made, the kind and the length of the whole
message before its bodies are read; each message has exactly one encoding, and whatever else arrives is refused with a
WireError.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, overload

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, read_varint, varint
from thinwire.wire.crc import joined_crc

Pieces: TypeAlias = tuple[Bytes, ...]  # of one message, in order

MAGIC = b"TW"
_LONG = 2048  # bytes of a part of a message that is worth to be left where it is
FORMAT = 2
UP, STEPS, STATE, LOST = 1, 2, 3, 4
KINDS = {UP: "up", STEPS: "steps", STATE: "state", LOST: "lost"}
FROM_CLIENTS = frozenset({UP, LOST})
LONGEST_WAY = 512  # bodies of steps before the ask

# Lanes: payloads of different meaning in one body. Their ids are part of the format.
COORDS, WEIGHT, BUFFERS, SHARED, REPORT, BASE, VALUES, DRIFT_CHECK = 1, 2, 3, 4, 5, 6, 7, 8


@dataclass(frozen=True)
class Body:
    """One entry of a message: which blocks it covers, and its fields.

    Args:
        plan: names of the blocks, or None for all of them.
        fields: payload of each field by id.
    """

    plan: frozenset[str] | None = None
    fields: Mapping[int, Bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Schema:
    """What both ends agreed on before the first message: a hash of method and model, and the names of the blocks."""

    digest: bytes  # eight bytes
    blocks: tuple[str, ...]
    sender: bytes = b""  # the client that sends, eight bytes; empty for what the server sends

    def sent_by(self, client: int) -> Schema:
        """The schema of what this client sends: its number is part of the checksum, and costs no bytes.

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
class Message:
    """A decoded message; the bodies are still bytes until `unpack_body`: views of the message, not copies."""

    kind: int
    version: int
    behind: int  # how many versions the receiver is behind; 0 in what a client sends
    bodies: Sequence[memoryview]
    first: Body | None  # the first of them, read: messages from clients have no other


class _Bodies(Sequence[memoryview]):
    """The bodies of a message, cut out when asked for: views of all would take far more memory than the bytes."""

    def __init__(self, data: memoryview, ends: array[int]) -> None:
        self._data, self._ends = data, ends  # where the first begins, and where each ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, which: int) -> memoryview: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[memoryview, ...]: ...
    def __getitem__(self, which: int | slice) -> memoryview | tuple[memoryview, ...]:
        if isinstance(which, slice):
            return tuple(self[at] for at in range(len(self))[which])
        at = range(len(self))[which]
        return self._data[self._ends[at] : self._ends[at + 1]]


def pack_body(body: Body, schema: Schema) -> bytes:
    """A body as bytes."""
    return b"".join(body_parts(body, schema))


def body_parts(body: Body, schema: Schema) -> list[Bytes]:
    """A body as pieces of bytes, for whoever joins them with others: payloads may be long."""
    everything = body.plan is None or body.plan == schema.everything
    out: list[Bytes] = [
        b"\0" if everything else b"\1" + _bitmap(body.plan or frozenset(), schema.blocks),
        varint(len(body.fields)),
    ]
    for number, payload in sorted(body.fields.items()):
        out += [bytes([number]), varint(len(payload)), payload]
    return out


def unpack_body(data: Bytes, schema: Schema) -> Body:
    """A body from exactly these bytes; its fields are views of them."""
    plan, fields, end = _read_body(memoryview(data), 0, schema)
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the end of a body")
    return Body(plan, fields)


def pack(kind: int, version: int, bodies: Sequence[Bytes], schema: Schema, behind: int = 0) -> bytes:
    """A whole message as bytes.

    >>> schema = Schema(b"12345678", ("w",))
    >>> data = pack(UP, 3, [pack_body(Body(fields={COORDS: b"abcd"}), schema)], schema.sent_by(0))
    >>> len(data), bytes(unpack_body(unpack(data, schema.sent_by(0)).bodies[0], schema).fields[COORDS])
    (21, b'abcd')
    """
    return b"".join(pack_pieces(kind, version, bodies, schema, behind))


def pack_pieces(
    kind: int,
    version: int,
    bodies: Sequence[Bytes],
    schema: Schema,
    behind: int = 0,
    crc: Callable[[Bytes], int] = zlib.crc32,
) -> Pieces:
    """A whole message as pieces of bytes that are sent one after another; long ones are shared, not copied.

    Args:
        kind: one of the numbers above.
        version: the version that it leads to, or that was trained.
        bodies: one after another, whole or in pieces.
        schema: of the contract.
        behind: how many versions the receiver is behind.
        crc: zlib's CRC-32 of a body; for whoever sends one body in many messages and remembers it.
    """
    head = MAGIC + bytes([FORMAT, kind]) + schema.digest[:4] + varint(version)
    parts = _merged((head, varint(behind) if kind in (STEPS, STATE) else b"", *bodies))
    return (*parts, _checksum(parts, schema, crc))


def length(pieces: Pieces) -> int:
    """How long a message in pieces is."""
    return sum(map(len, pieces))


def laid_out(pieces: Pieces, allocate: Callable[[int], np.ndarray] | None = None) -> Bytes:
    """A message in one piece; of a long one, a view.

    Args:
        pieces: of the message.
        allocate: for messages of megabytes: gives so many bytes to write it to, at an address that 8 divides.

    The longest piece, which holds the numbers, is put where they can be read without another copy. numpy lets other
    threads work while it copies; Python's `join`, which is quick to begin, does not.
    """
    if length(pieces) < _LONG:
        return b"".join(pieces)
    longest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
    position = -length(pieces[:longest]) % 8
    if allocate is None:
        return memoryview(bytearray().join((bytes(position), *pieces)))[position:]
    message = allocate(position + length(pieces))
    start = position
    for piece in pieces:
        np.copyto(message[position : position + len(piece)], np.frombuffer(piece, np.uint8))
        position += len(piece)
    return message[start:].data


def unpack(data: Bytes, schema: Schema, longest: int | None = None) -> Message:
    """A message from bytes that may come from anywhere.

    Args:
        data: the bytes.
        schema: of the contract and the sender: it decides which kinds are read.
        longest: how many bytes a message may have here.
    """
    _check_head(data, schema, longest)
    payload = memoryview(data)[:-4]
    if data[-4:] != _checksum([payload], schema):
        other = "is damaged, or was sent by another client" if schema.sender else "was damaged on its way"
        raise WireError(f"checksum does not match: the message {other}")
    kind = data[3]
    version, position = read_varint(payload, 8)
    behind = 0
    if kind in (STEPS, STATE):
        behind, position = read_varint(payload, position)
        if behind > version:
            raise WireError(f"a message to version {version} cannot start {behind} versions before it")
    way = min(behind, 1), min(behind, LONGEST_WAY)
    least, most = {UP: (1, 1), STEPS: (way[0] + 1, way[1] + 1), STATE: (2, 2), LOST: (0, 0)}[kind]
    ends = array("I" if len(payload) < 1 << 32 else "Q", [position])
    first = None
    while position < len(payload) and len(ends) - 1 <= most:  # one too many is enough to know
        plan, fields, position = _read_body(payload, position, schema)
        first = first or Body(plan, fields)
        ends.append(position)
    bodies = _Bodies(payload, ends)
    if not least <= len(bodies) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        found = f"{len(bodies)}" + (" or more" if len(bodies) > most else "")
        raise WireError(f"a message of kind {KINDS[kind]!r} has {wanted} bodies, this one has {found}")
    return Message(kind, version, behind, bodies, first)


def _check_head(data: Bytes, schema: Schema, longest: int | None) -> None:
    """Refuse what is no message, not meant for here, or too long, before any of its bodies is read."""
    if len(data) < 13:
        raise WireError(f"{len(data)} bytes are too few for a message (at least 13)")
    if longest is not None and len(data) > longest:
        raise WireError(f"the message has {len(data)} bytes, expected at most {longest}")
    if data[:2] != MAGIC:
        raise WireError(f"not a thinwire message: it starts with {data[:2].hex()}, expected {MAGIC.hex()}")
    if data[2] != FORMAT:
        raise WireError(f"message format {data[2]} is not known, expected {FORMAT}")
    if data[3] not in KINDS:
        raise WireError(f"message kind {data[3]} is not known, expected one of {sorted(KINDS)}")
    if data[4:8] != schema.digest[:4]:
        raise WireError(
            f"message for another method or model: schema {data[4:8].hex()}, ours {schema.digest[:4].hex()}; method, "
            "model, initial weights and seed must be the same on both sides"
        )
    if (data[3] in FROM_CLIENTS) is not bool(schema.sender):
        raise WireError(
            f"a message of kind {KINDS[data[3]]!r} came from {'a client' if schema.sender else 'the server'}, "
            f"which never sends it"
        )


def _read_body(
    data: memoryview, position: int, schema: Schema
) -> tuple[frozenset[str] | None, dict[int, memoryview], int]:
    """Plan, fields as views of the data, and where the body ends."""
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
        field, position = data[position], position + 1
        if field <= last:
            raise WireError(f"field {field} follows field {last}: fields must ascend")
        length, position = read_varint(data, position)
        if length > len(data) - position:
            raise WireError(f"field {field} announces {length} bytes, {len(data) - position} are left")
        fields[field], position = data[position : position + length], position + length
        last = field
    return plan, fields, position


def _merged(parts: Sequence[Bytes]) -> list[Bytes]:
    """The same bytes in fewer parts: short ones are joined, long ones stay as they are."""
    out: list[Bytes] = []
    short: list[Bytes] = []
    for part in parts:
        if len(part) < _LONG:
            short.append(part)
        else:
            out += [b"".join(short), part] if short else [part]
            short = []
    return [*out, b"".join(short)] if short else out


def _checksum(parts: Sequence[Bytes], schema: Schema, crc: Callable[..., int] = zlib.crc32) -> bytes:
    value = zlib.crc32(schema.digest + schema.sender)
    for part in parts:
        if crc is not zlib.crc32 and len(part) >= _LONG:
            value = joined_crc(value, crc(part), len(part))
        else:
            value = zlib.crc32(part, value)
    return value.to_bytes(4, "little")


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
