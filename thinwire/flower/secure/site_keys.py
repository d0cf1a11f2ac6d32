"""Signatures with the keys of sites: without them, a server that lies could put itself between any two clients.

The keys are those of the roster, in OpenSSH form. Each site needs its own copy of the public keys of all sites, which
it did not get from the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thinwire.errors import ConfigError, WireError

LONGEST = 160  # bytes of a signature: of ECDSA with P-521 at most 139


@dataclass(frozen=True)
class SiteKeys:
    """The private key of a site, and the public keys by which it knows the clients of all sites.

    Args:
        private: the private key, in OpenSSH form, without a passphrase.
        public: the public key of each client's site, by client number, in OpenSSH form. Revoked ones are left out.
    """

    private: bytes
    public: Mapping[int, str]

    def sign(self, statement: bytes) -> bytes:
        """The signature of a statement."""
        return _sign(self._key, statement)

    def check(self, client: int, statement: bytes, signature: bytes) -> None:
        """Raise WireError unless the site of this client signed this statement."""
        if client not in self._known:
            raise WireError(f"the roster of this site has no key for client {client}")
        if not _verifies(self._known[client], statement, signature):
            raise WireError(f"the signature of client {client} is not valid")

    @cached_property
    def _key(self) -> Any:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            return _supported(load_ssh_private_key(self.private, password=None))
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"the private key of this site cannot be read ({error}); write it by ssh-keygen"
            ) from error

    @cached_property
    def _known(self) -> dict[int, Any]:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        known = {}
        for client, text in self.public.items():
            try:
                known[client] = _supported(load_ssh_public_key(text.encode()))
            except (ValueError, UnsupportedAlgorithm) as error:
                raise ConfigError(f"the public key of client {client} cannot be read ({error})") from error
        return known


def _supported(key: Any) -> Any:
    """The key, if it is one of ECDSA or Ed25519."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    kinds = (ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)
    if not isinstance(key, (*kinds, ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey)):
        raise ValueError(f"{type(key).__name__} is not a key of ECDSA or Ed25519")
    return key


def _sign(key: Any, statement: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA384

    if isinstance(key, ec.EllipticCurvePrivateKey):
        return bytes(key.sign(statement, ec.ECDSA(SHA384())))
    return bytes(key.sign(statement))


def _verifies(key: Any, statement: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA384

    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, statement, ec.ECDSA(SHA384()))
        else:
            key.verify(signature, statement)
    except InvalidSignature:
        return False
    return True
