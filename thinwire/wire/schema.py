"""The schema of a federation: what server and clients agree on before the first message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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
