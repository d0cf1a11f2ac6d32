"""Signatures with the keys of sites: without them, a server that lies could put itself between any two clients.

The keys are those of the roster. Each site needs its own copy of the roster, which it did not get from the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import WireError
from thinwire.flower.site_key import is_signed, sign


@dataclass(frozen=True)
class SiteKeys:
    """The private key of a site, and the public keys by which it knows the clients of all sites.

    Args:
        private: the file of the private key.
        public: the public key of each client's site, by client number. Those of revoked sites are left out.
    """

    private: Path
    public: Mapping[int, str]

    def sign(self, statement: bytes) -> bytes:
        """The signature of a statement."""
        return sign(self.private, statement)

    def check(self, client: int, statement: bytes, signature: bytes) -> None:
        """Raise WireError unless the site of this client signed this statement."""
        if client not in self.public:
            raise WireError(f"the roster of this site has no key for client {client}")
        if not is_signed(self.public[client], statement, signature):
            raise WireError(f"the signature of client {client} is not valid")
