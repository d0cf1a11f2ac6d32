"""What a client stores of secure aggregation: the secrets of its session, and the last version that it answered.

    keys      new secrets for a new session; the same answer for the same session
    shares    the list of keys is fixed: another list in the same session is refused
    upload    the members are fixed; the version counts as answered before the upload leaves
    unmask    the survivors are fixed: for each client either one secret or the other, never both

Everything is stored before an answer leaves, so a client that was killed continues with the same values.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from thinwire.errors import CheckpointError
from thinwire.flower.secure.frames import Advert, Head, Shares
from thinwire.flower.secure.keys import commit, draw_secret, public_key


class Session(NamedTuple):
    """One session of secure aggregation on a client."""

    head: Head
    mask_key: bytes  # private keys
    seal_key: bytes
    seed: bytes  # of its own mask
    advert: bytes = b""  # as it was sent
    listed: bytes = b""  # the request with all adverts
    own: Shares = Shares(0, 0)  # its shares of its own secrets
    sealed: bytes = b""  # its answer with the shares for others
    received: bytes = b""  # the sealed shares of others
    uploaded: bool = False
    survivors: tuple[int, ...] = ()

    @classmethod
    def draw(cls, head: Head) -> Session:
        """A session with new secrets."""
        return cls(head, draw_secret(), draw_secret(), draw_secret())

    def public(self, client: int, context: bytes) -> Advert:
        """The advert, without a signature."""
        return Advert(client, public_key(self.mask_key), public_key(self.seal_key), commit(self.seed, context))

    @property
    def listed_hash(self) -> bytes:
        """The hash of the list of adverts: all clients must have received the same."""
        return hashlib.sha256(self.listed).digest()


class SecureStore(NamedTuple):
    """What a client stores between messages."""

    answered: int = -1  # the highest version for which an upload left this client
    session: Session | None = None

    def dump(self) -> bytes:
        """As bytes (JSON)."""
        return json.dumps({"answered": self.answered, "session": self.session and _table(self.session)}).encode()

    @classmethod
    def load(cls, data: bytes) -> SecureStore:
        """From bytes; empty bytes are those of a client that has not taken part."""
        if not data:
            return cls()
        try:
            table = json.loads(data)
            return cls(int(table["answered"]), table["session"] and _session(table["session"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"what this client stored of secure aggregation cannot be read ({error})") from error


_BYTES = ("mask_key", "seal_key", "seed", "advert", "listed", "sealed", "received")


def _table(session: Session) -> dict[str, object]:
    """A session as JSON has it."""
    head = [session.head.session.hex(), session.head.version]
    rest = {"own": list(session.own), "uploaded": session.uploaded, "survivors": list(session.survivors)}
    return {"head": head, **{name: getattr(session, name).hex() for name in _BYTES}, **rest}


def _session(table: dict[str, object]) -> Session:
    """The inverse of `_table`."""
    head, own, survivors = table["head"], table["own"], table["survivors"]
    if not (isinstance(head, list) and isinstance(own, list) and isinstance(survivors, list)):
        raise ValueError("head, own and survivors must be lists")
    return Session(
        Head(bytes.fromhex(head[0]), int(head[1])),
        **{name: bytes.fromhex(str(table[name])) for name in _BYTES},
        own=Shares(*(int(value) for value in own)),
        uploaded=bool(table["uploaded"]),
        survivors=tuple(int(client) for client in survivors),
    )
