"""What a node says of itself before it is used, and how the server checks it.

    server to node    run, and with a roster a nonce
    node to server    schema, version, format, app; and its clients, or with a roster its site and a signature
    server to node    refusal, if it is not used

A node of a site signs its `Claim` with the key of the site. The nonce is new for each node and each question, and
Flower's node id is that of the node which the server asked, so the proof of another node, run or time is worth nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from thinwire.core.text import visible
from thinwire.errors import WireError
from thinwire.flower.site_key import is_signed


class Software(NamedTuple):
    """What must be the same on the server and on every node.

    Args:
        schema: the hash of method, model, initial weights and seed.
        version: the version of thinwire.
        format: the number of the message format.
        app: the hash of the files of the app; "" where they are not known.
    """

    schema: bytes
    version: str
    format: int
    app: str = ""

    def difference(self, node: Software) -> str:
        """Why a node with this software cannot be used by a server with ours; "" if it can.

        >>> Software(b"s", "1.1", 3).difference(Software(b"s", "1.0", 3))
        'it runs thinwire 1.0, the server 1.1; install the same version on both'
        """
        if node.version != self.version:
            theirs = visible(node.version, 40) or "of an unknown version"
            return f"it runs thinwire {theirs}, the server {self.version}; install the same version on both"
        if node.format != self.format:
            return f"its messages have format {node.format}, expected {self.format}; install the same thinwire on both"
        if self.app and node.app != self.app:
            theirs = visible(node.app[:16], 40) or "unknown"
            return f"it runs another app (files {theirs}, ours {self.app[:16]}); start it with the app of the server"
        if node.schema != self.schema:
            return (
                f"it runs another method, model or seed (schema {node.schema[:16].hex()}, ours {self.schema.hex()}); "
                "start it with the same app and the same data"
            )
        return ""


class Claim(NamedTuple):
    """What a node of a site signs."""

    run: str
    nonce: bytes
    node: int  # Flower's node id
    site: str
    software: Software

    def statement(self) -> bytes:
        """The bytes that are signed; different claims have different bytes."""
        own = self.software
        software = [own.schema.hex(), own.version, own.format, own.app]
        return json.dumps(["thinwire site", 1, self.run, self.nonce.hex(), self.node, self.site, *software]).encode()


class Report(NamedTuple):
    """What a node reports of itself, not trusted."""

    software: Software
    clients: frozenset[int] = frozenset()  # without a roster
    site: str = ""  # with a roster
    signature: bytes = b""


@dataclass(frozen=True)
class Site:
    """A site of the roster.

    Args:
        name: letters, digits, - and _, at most 64.
        key: its public key in OpenSSH form.
        clients: the numbers of its clients.
        revoked: whether it may no longer take part.
    """

    name: str
    key: str
    clients: tuple[int, ...]
    revoked: bool = False

    def client_name(self, client: int) -> str:
        """What logs and records call one of its clients.

        >>> Site("north", "", (3,)).client_name(3), Site("south", "", (4, 5)).client_name(5)
        ('site north', 'site south, client 5')
        """
        return f"site {self.name}" + (f", client {client}" if len(self.clients) > 1 else "")


class Sites(Protocol):
    """The sites that the server knows: `thinwire.deployment.roster.Roster`."""

    def site(self, name: str) -> Site | None:
        """The site of a name; None if there is none."""
        ...

    def active(self) -> Iterable[Site]:
        """The sites that may take part."""
        ...


def proven_site(sites: Sites, claim: Claim, signature: bytes) -> Site:
    """The site that a node has proven to be; a WireError if it has not.

    Args:
        sites: those that are known.
        claim: what the node must have signed.
        signature: what it sent.
    """
    if not claim.site:
        raise WireError("it names no site, and the server has a roster; write --node-config 'site=\"NAME\"'")
    shown = repr(visible(claim.site, 64))
    site = sites.site(claim.site)
    if site is None:
        raise WireError(f"site {shown} is not on the roster; on the server write: thinwire site add NAME KEY.pub")
    if not is_signed(site.key, claim.statement(), signature):
        raise WireError(f"its key is not that of site {shown} on the roster")
    if site.revoked:
        raise WireError(f"site {shown} was revoked")
    return site
