"""The messages of all phases of secure aggregation, as bytes; each is read with bounds and has one encoding.

    head      1 format (1), 1 phase, 16 session, 4 version
    list      4 count, then entries in ascending order of their client (4 bytes each), below the number of clients

    phase      request                                  answer
    keys       head                                     head, advert: client, 32 mask key, 32 seal key, 32 commitment,
                                                          1 length, signature
    shares     head, 4 threshold, list of adverts       head, list of (client, 90 sealed shares for it)
    (upload)   head, list of (client, 90 sealed         an upload of thinwire
                 shares of it), download of thinwire
    confirm    head, list of survivors                  head, 1 length, signature
    unmask     head, list of survivors, list of         head, list of (client, 1 kind, 33 share)
                 (client, 1 length, signature)

Integers are little endian, shares big endian. A message with further or missing bytes is refused with a WireError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from thinwire.errors import Diverged, WireError
from thinwire.secure.keys import KEY_BYTES, LONGEST_SIGNATURE, PRIME, SHARE_BYTES, TAG_BYTES
from thinwire.wire import message as wire

KEYS, SHARES, UPLOAD, CONFIRM, UNMASK = "keys", "shares", "", "confirm", "unmask"
PHASES = (KEYS, SHARES, UPLOAD, CONFIRM, UNMASK)
MASK_KEY, SEED = 1, 2  # kinds of a share: of a client that dropped out, of a client that remains
SESSION_BYTES = 16
WORDS = 4  # of loss and number of examples, after the masked values
_FORMAT = 1
_BITS = 16
_SEALED = 4 + 4 + 2 * SHARE_BYTES + TAG_BYTES
_Entry = TypeVar("_Entry")


class Head(NamedTuple):
    """The session that a message belongs to, and the version that is trained from."""

    session: bytes
    version: int

    def pack(self, phase: str) -> bytes:
        """The first bytes of a message of this phase."""
        return bytes([_FORMAT, PHASES.index(phase)]) + self.session + number(self.version)


class Advert(NamedTuple):
    """The public keys of one client for one session."""

    client: int
    mask_key: bytes  # agrees on the masks of pairs; its private key is recovered if the client drops out
    seal_key: bytes  # seals shares; its private key never leaves the client
    commitment: bytes  # to the seed of the client's own mask
    signature: bytes = b""  # by the key of its site

    def pack(self) -> bytes:
        """As bytes."""
        return number(self.client) + self.mask_key + self.seal_key + self.commitment + short(self.signature)

    def statement(self, head: Head, schema: bytes) -> bytes:
        """What the site of the client signs."""
        unsigned = self._replace(signature=b"").pack()
        return b"thinwire secure aggregation: keys\n" + schema + head.pack(KEYS) + unsigned


class Shares(NamedTuple):
    """The shares of one client's two secrets that another client holds."""

    mask_key: int
    seed: int


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
        """The next integer."""
        return int.from_bytes(self.take(4), "little")

    def client(self) -> int:
        """The next client number."""
        if (client := self.number()) >= self.clients:
            raise WireError(f"client {client} does not exist, there are {self.clients}")
        return client

    def short(self) -> bytes:
        """The next signature, which may be empty."""
        if (length := self.take(1)[0]) > LONGEST_SIGNATURE:
            raise WireError(f"a signature has {length} bytes, at most {LONGEST_SIGNATURE} are possible")
        return self.take(length)

    def share(self) -> int:
        """The next share of a secret."""
        if (value := int.from_bytes(self.take(SHARE_BYTES), "big")) >= PRIME:
            raise WireError("a share is not below the prime")
        return value

    def entries(self, read: Callable[[int], _Entry]) -> dict[int, _Entry]:
        """The next list, by client; `read` reads what follows the number of a client."""
        if (count := self.number()) > self.clients:
            raise WireError(f"a list has {count} entries, there are {self.clients} clients")
        found: dict[int, _Entry] = {}
        last = -1
        for _ in range(count):
            if (client := self.client()) <= last:
                raise WireError(f"client {client} follows client {last} in a list")
            found[client], last = read(client), client
        return found

    def rest(self) -> bytes:
        """All further bytes."""
        return self.take(len(self.data) - self.at)

    def end(self) -> None:
        """Raise WireError if there are further bytes."""
        if extra := len(self.data) - self.at:
            raise WireError(f"a message of secure aggregation has {extra} bytes too many")


def number(value: int) -> bytes:
    """An integer of 32 bits."""
    return value.to_bytes(4, "little")


def short(value: bytes) -> bytes:
    """A byte string of at most 255 bytes, after its length."""
    return bytes([len(value)]) + value


def pack_list(entries: Mapping[int, bytes]) -> bytes:
    """A list: the number of each client, and its bytes."""
    return number(len(entries)) + b"".join(number(client) + entries[client] for client in sorted(entries))


def pack_clients(clients: Iterable[int]) -> bytes:
    """A list of clients."""
    return pack_list(dict.fromkeys(clients, b""))


def read_head(data: bytes, phase: str, clients: int) -> tuple[Head, Reader]:
    """The head of a message of this phase, and a reader of what follows."""
    if phase not in PHASES:
        raise WireError(f"unknown phase {phase[:20]!r}; expected one of {', '.join(filter(None, PHASES))} or none")
    reader = Reader(data, clients)
    form, code = reader.take(2)
    if form != _FORMAT or code != PHASES.index(phase):
        raise WireError(
            f"a message of secure aggregation has format {form} and phase {code}, expected {_FORMAT} and "
            f"{PHASES.index(phase)} ({phase or 'upload'!r})"
        )
    return Head(reader.take(SESSION_BYTES), reader.number()), reader


def read_advert(reader: Reader, client: int | None = None) -> Advert:
    """The next advert; without its client number, if that was read."""
    who = reader.client() if client is None else client
    mask_key, seal_key, commitment = (reader.take(KEY_BYTES) for _ in range(3))
    return Advert(who, mask_key, seal_key, commitment, reader.short())


def read_adverts(reader: Reader) -> dict[int, Advert]:
    """A list of adverts, whose keys are all different."""
    adverts = reader.entries(lambda client: read_advert(reader, client))
    keys = [key for one in adverts.values() for key in (one.mask_key, one.seal_key)]
    if len(set(keys)) < len(keys) or len({one.commitment for one in adverts.values()}) < len(adverts):
        raise WireError("two clients have the same key")
    return adverts


def read_sealed(reader: Reader) -> dict[int, bytes]:
    """A list of sealed shares."""
    return reader.entries(lambda client: reader.take(_SEALED))


def read_clients(reader: Reader) -> tuple[int, ...]:
    """A list of clients."""
    return tuple(reader.entries(lambda client: None))


def read_signatures(reader: Reader) -> dict[int, bytes]:
    """A list of signatures."""
    return reader.entries(lambda client: reader.short())


def read_revealed(reader: Reader) -> dict[int, tuple[int, int]]:
    """A list of shares: kind and value, by client."""

    def entry(client: int) -> tuple[int, int]:
        if (kind := reader.take(1)[0]) not in (MASK_KEY, SEED):
            raise WireError(f"a share of kind {kind}, expected {MASK_KEY} or {SEED}")
        return kind, reader.share()

    return reader.entries(entry)


def pack_revealed(shares: Mapping[int, tuple[int, int]]) -> bytes:
    """The inverse of `read_revealed`."""
    return pack_list({client: bytes([kind]) + share_bytes(value) for client, (kind, value) in shares.items()})


def share_bytes(value: int) -> bytes:
    """A share as bytes."""
    return value.to_bytes(SHARE_BYTES, "big")


def pack_shares(sender: int, receiver: int, shares: Shares) -> bytes:
    """The text that is sealed: who shares with whom, and the shares."""
    return number(sender) + number(receiver) + share_bytes(shares.mask_key) + share_bytes(shares.seed)


def read_shares(text: bytes, sender: int, receiver: int) -> Shares:
    """The inverse of `pack_shares`, for this sender and receiver."""
    reader = Reader(text, 1 << 32)
    if (reader.number(), reader.number()) != (sender, receiver):
        raise WireError(f"sealed shares are not those of client {sender} for client {receiver}")
    shares = Shares(reader.share(), reader.share())
    reader.end()
    return shares


def survivors_statement(head: Head, schema: bytes, listed: bytes, members: Sequence[int], left: Sequence[int]) -> bytes:
    """What sites sign before masks are recovered: which clients began the sum, and which are in it.

    Args:
        head: the session.
        schema: the hash of method, model and seed.
        listed: the hash of the list of adverts.
        members: the clients whose masks are in the sum.
        left: those of them whose uploads are in it.
    """
    return b"thinwire secure aggregation: survivors\n" + b"".join(
        (schema, head.pack(CONFIRM), listed, pack_clients(members), pack_clients(left))
    )


def threshold(clients: int) -> int:
    """The smallest threshold for so many clients: more than two thirds of them.

    More than half is needed so that a server cannot get the mask key and the seed of one client from two halves of the
    others. With more than two thirds that holds even if fewer than a third of the clients collude with the server.

    >>> [threshold(n) for n in (2, 3, 4, 8, 10)]
    [2, 3, 3, 6, 7]
    """
    return 2 * clients // 3 + 1


def is_late(data: bytes, phase: str) -> bool:
    """Whether an answer is not of this phase but of an earlier one, which a transport may bring later.

    >>> upload = bytes([wire.FORMAT << 4 | wire.UP])
    >>> is_late(Head(bytes(16), 3).pack(KEYS), SHARES), is_late(upload, UPLOAD), is_late(upload, UNMASK)
    (True, False, True)
    """
    if data[:1] == bytes([_FORMAT]) and len(data) > 1:
        return data[1] < PHASES.index(phase)
    return bool(data) and data[0] >> 4 == wire.FORMAT and PHASES.index(phase) > PHASES.index(UPLOAD)


def pack_totals(loss: float, examples: int, clients: int) -> tuple[int, ...]:
    """Loss and number of examples as integers that are summed under the masks, so that no client reports its own.

    Two words for the examples, and two for round(2^16 loss examples): the upper bits and the lower 16.

    Args:
        loss: its mean training loss.
        examples: its number of examples.
        clients: number of clients of the sum, which must not overflow 32 bits.
    """
    if not math.isfinite(loss):
        raise Diverged(f"the training loss is {loss}; try a smaller learning rate")
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
