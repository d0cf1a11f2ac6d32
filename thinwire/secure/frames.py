"""The messages of all phases of secure aggregation, as bytes; each is read with bounds and has one encoding.

    head      1 format (1), 1 phase, 16 session, 4 version
    list      4 count, then entries in ascending order of their client (4 bytes each), below the number of clients

    phase      request                                  answer
    keys       head                                     head, advert: 32 mask key, 32 seal key, 32 commitment,
                                                          1 length, signature
    shares     head, 4 threshold, list of adverts       head, list of (client, 82 sealed shares for it)
    (upload)   head, list of (client, 82 sealed         an upload of thinwire
                 shares of it), download of thinwire
    confirm    head, list of survivors                  head, 1 length, signature
    unmask     head, list of survivors, list of         head, list of (client, 1 kind, 33 share)
                 (client, 1 length, signature)

`REQUESTS` and `ANSWERS` are this table. Integers are little endian, shares big endian. A message with further or
missing bytes is refused with a WireError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.secure.keys import KEY_BYTES, LONGEST_SIGNATURE, PRIME, SHARE_BYTES, TAG_BYTES

KEYS, SHARES, UPLOAD, CONFIRM, UNMASK = "keys", "shares", "", "confirm", "unmask"
PHASES = (KEYS, SHARES, UPLOAD, CONFIRM, UNMASK)
MASK_KEY, SEED = 1, 2  # kinds of a share: of a client that dropped out, of a client that remains
SESSION_BYTES = 16
WORDS = 4  # of loss and number of examples, after the masked values
_FORMAT = 1
_BITS = 16


class Head(NamedTuple):
    """The session that a message belongs to, and the version that is trained from."""

    session: bytes
    version: int

    def pack(self, phase: str) -> bytes:
        """The first bytes of a message of this phase."""
        return bytes([_FORMAT, PHASES.index(phase)]) + HEAD.write(self)


class Advert(NamedTuple):
    """The public keys of one client for one session."""

    mask_key: bytes  # agrees on the masks of pairs; its private key is recovered if the client drops out
    seal_key: bytes  # seals shares; its private key never leaves the client
    commitment: bytes  # to the seed of the client's own mask
    signature: bytes = b""  # by the key of its site

    def statement(self, client: int, head: Head, schema: bytes) -> bytes:
        """What the site of the client signs."""
        unsigned = number(client) + ADVERT.write(self._replace(signature=b""))
        return b"thinwire secure aggregation: keys\n" + schema + head.pack(KEYS) + unsigned


class Shares(NamedTuple):
    """The shares of one client's two secrets that another client holds."""

    mask_key: int
    seed: int


# -- fields ------------------------------------------------------------------------------------------------------------


class Reader:
    """Reads a message from its start; every length is checked before anything is read.

    Args:
        data: the message, not trusted.
        clients: number of clients: bounds the entries of lists, and client numbers.
    """

    def __init__(self, data: bytes, clients: int) -> None:
        self.data, self.clients, self.at = data, clients, 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > len(self.data) - self.at:
            raise WireError(f"a message of secure aggregation ends at byte {len(self.data)}, in the middle of a field")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        """The next integer of 32 bits."""
        return int.from_bytes(self.take(4), "little")


class Field(NamedTuple):
    """How a value is written, and how it is read."""

    write: Callable[[Any], bytes]
    read: Callable[[Reader], Any]


def number(value: int) -> bytes:
    """An integer of 32 bits."""
    return value.to_bytes(4, "little")


def fixed(size: int) -> Field:
    """So many bytes."""
    return Field(bytes, lambda reader: reader.take(size))


def record(*fields: Field, of: Callable[[Iterable[Any]], Any] = tuple) -> Field:
    """Several fields, one after the other; `of` makes a value of those that were read."""
    return Field(
        lambda values: b"".join(field.write(value) for field, value in zip(fields, values, strict=True)),
        lambda reader: of(field.read(reader) for field in fields),
    )


def by_client(field: Field) -> Field:
    """A list: a value of each of some clients."""

    def write(entries: Mapping[int, Any]) -> bytes:
        return number(len(entries)) + b"".join(number(i) + field.write(entries[i]) for i in sorted(entries))

    def read(reader: Reader) -> dict[int, Any]:
        if (count := reader.number()) > reader.clients:
            raise WireError(f"a list has {count} entries, there are {reader.clients} clients")
        found: dict[int, Any] = {}
        last = -1
        for _ in range(count):
            if not last < (client := reader.number()) < reader.clients:
                raise WireError(f"client {client} follows client {last} in a list for {reader.clients} clients")
            found[client], last = field.read(reader), client
        return found

    return Field(write, read)


def _signature(reader: Reader) -> bytes:
    if (length := reader.take(1)[0]) > LONGEST_SIGNATURE:
        raise WireError(f"a signature has {length} bytes, at most {LONGEST_SIGNATURE} are possible")
    return reader.take(length)


def _share(reader: Reader) -> int:
    if (value := int.from_bytes(reader.take(SHARE_BYTES), "big")) >= PRIME:
        raise WireError("a share is not below the prime")
    return value


def _kind(reader: Reader) -> int:
    if (kind := reader.take(1)[0]) not in (MASK_KEY, SEED):
        raise WireError(f"a share of kind {kind}, expected {MASK_KEY} or {SEED}")
    return kind


def _adverts(reader: Reader) -> dict[int, Advert]:
    adverts: dict[int, Advert] = by_client(ADVERT).read(reader)
    keys = [key for one in adverts.values() for key in one[:3]]
    if len(set(keys)) < len(keys):
        raise WireError("two clients have the same key")
    return adverts


NUMBER, KEY = Field(number, Reader.number), fixed(KEY_BYTES)
SIGNATURE = Field(lambda value: bytes([len(value)]) + value, _signature)
SHARE = Field(lambda value: value.to_bytes(SHARE_BYTES, "big"), _share)
BOTH_SHARES = record(SHARE, SHARE, of=Shares._make)  # what is sealed
HEAD = record(fixed(SESSION_BYTES), NUMBER, of=Head._make)
ADVERT = record(KEY, KEY, KEY, SIGNATURE, of=Advert._make)
ADVERTS = Field(by_client(ADVERT).write, _adverts)
SEALED = by_client(fixed(2 * SHARE_BYTES + TAG_BYTES))
REVEALED = by_client(record(Field(lambda kind: bytes([kind]), _kind), SHARE))
CLIENTS, SIGNATURES = by_client(fixed(0)), by_client(SIGNATURE)
REQUESTS = {
    KEYS: record(),
    SHARES: record(NUMBER, ADVERTS),
    UPLOAD: record(SEALED),
    CONFIRM: record(CLIENTS),
    UNMASK: record(CLIENTS, SIGNATURES),
}
ANSWERS = {
    KEYS: record(ADVERT),
    SHARES: record(SEALED),
    CONFIRM: record(SIGNATURE),
    UNMASK: record(REVEALED),
}


def pack(fields: Mapping[str, Field], phase: str, head: Head, *values: Any) -> bytes:
    """A request or an answer.

    Args:
        fields: `REQUESTS` or `ANSWERS`.
        phase: its phase.
        head: its session.
        values: one for each of its fields.
    """
    return head.pack(phase) + fields[phase].write(values)


def read(fields: Mapping[str, Field], phase: str, data: bytes, clients: int) -> tuple[Head, Any, bytes]:
    """The inverse of `pack` for a message that is not trusted: its head, its values, and the download after them."""
    if phase not in fields:
        raise WireError(f"unknown phase {phase[:20]!r}")
    reader, expected = Reader(data, clients), bytes([_FORMAT, PHASES.index(phase)])
    if (found := reader.take(2)) != expected:
        what = f"expected {expected.hex()} ({phase or 'upload'!r})"
        raise WireError(f"a message of secure aggregation begins with {found.hex()}, {what}")
    head, values = HEAD.read(reader), fields[phase].read(reader)
    rest = data[reader.at :]
    if rest and phase != UPLOAD:
        raise WireError(f"a message of secure aggregation has {len(rest)} bytes too many")
    return head, values, rest


def threshold(clients: int) -> int:
    """The smallest threshold for so many clients: more than two thirds of them.

    More than half is needed so that a server cannot get the mask key and the seed of one client from two halves of the
    others. With more than two thirds that holds even if fewer than a third of the clients collude with the server.

    >>> [threshold(n) for n in (2, 3, 4, 8, 10)]
    [2, 3, 3, 6, 7]
    """
    return 2 * clients // 3 + 1


def tolerance(clients: int) -> str:
    """A warning if no client of a cohort may drop out; "" if one may.

    >>> tolerance(3)
    'secure aggregation of 3 clients needs all of them: while one is absent, no round is made; 4 tolerate one absence'
    >>> tolerance(4)
    ''
    """
    needs_all = f"secure aggregation of {clients} clients needs all of them: while one is absent, no round is made"
    return f"{needs_all}; 4 tolerate one absence" if threshold(clients) >= clients else ""


def pack_totals(loss: float, examples: int, clients: int) -> tuple[int, ...]:
    """Loss and number of examples as integers that are summed under the masks, so that no client reports its own.

    Two words for the examples, and two for round(2^16 loss examples): the upper bits and the lower 16.

    Args:
        loss: its mean training loss.
        examples: its number of examples.
        clients: number of clients of the sum, which must not overflow 32 bits.
    """
    most = ((1 << 31) - 1) // clients << _BITS
    values = examples, round(max(-1e30, min(1e30, loss * examples)) * (1 << _BITS))
    bounded = [max(-most, min(most, value)) for value in values]
    return tuple(word for value in bounded for word in (value >> _BITS, value & ((1 << _BITS) - 1)))


def read_totals(words: np.ndarray) -> tuple[float, int]:
    """The mean loss over all examples, and their number, from the sum of the words of all clients (uint32).

    >>> words = [pack_totals(0.5, 100, 8), pack_totals(0.25, 300, 8)]
    >>> read_totals(np.array(words).sum(0).astype(np.uint32))
    (0.3125, 400)
    """
    examples, loss = ((int(np.int32(high)) << _BITS) + int(low) for high, low in words.reshape(2, 2))
    return loss / max(1, examples) / (1 << _BITS), max(1, examples)
