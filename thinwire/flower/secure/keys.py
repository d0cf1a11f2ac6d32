"""X25519 key agreement, sealed messages, and commitments to a seed.

    secret of a pair   HKDF-SHA-256(X25519(own private key, other's public key), label and context)
    sealed             ChaCha20-Poly1305 with a key of one sender, one receiver and one session, used once
    commitment         SHA-256(label, context, seed)

The package `cryptography` computes them; it is imported when they are first used.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from importlib.util import find_spec

from thinwire.errors import ConfigError, WireError

KEY_BYTES, TAG_BYTES = 32, 16
_NONCE = bytes(12)  # a key seals one message: its sender stores what it sealed, and repeats it


def need_cryptography() -> None:
    """Raise ConfigError, with the line that installs it, if the package `cryptography` is not installed."""
    if find_spec("cryptography") is None:
        raise ConfigError(
            "secure_aggregation = true needs the package cryptography, which is not installed here; write: "
            "pip install 'thinwire[flower]'"
        )


def draw_secret() -> bytes:
    """32 bytes from the random source of the operating system: a private key, or a seed."""
    return secrets.token_bytes(KEY_BYTES)


def public_key(private: bytes) -> bytes:
    """The X25519 public key of a private key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return bytes(X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw())


def is_private_key(private: bytes, public: bytes) -> bool:
    """Whether a private key is that of this public key."""
    return public_key(private) == public


def agree(private: bytes, public: bytes, label: bytes, context: bytes) -> bytes:
    """The secret of two key pairs, for one purpose in one context; both sides compute the same.

    Args:
        private: one's own private key.
        public: the other's public key, not trusted.
        label: the purpose.
        context: session, and who takes part.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of small order: the secret would be 0 for any private key
        raise WireError("a public key is not valid") from error
    return bytes(HKDF(SHA256(), KEY_BYTES, salt=None, info=_join(label, context)).derive(shared))


def seal(key: bytes, text: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate a text; its context is authenticated, too."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return bytes(ChaCha20Poly1305(key).encrypt(_NONCE, text, context))


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """The text of `seal`; a WireError if it or its context was changed."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return bytes(ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context))
    except InvalidTag as error:
        raise WireError("a sealed message is damaged, or of another session") from error


def commit(seed: bytes, context: bytes) -> bytes:
    """A commitment to a seed of 32 random bytes: it fixes the seed and does not reveal it."""
    return hashlib.sha256(_join(b"thinwire secure aggregation: seed", context) + seed).digest()


def is_committed(seed: bytes, context: bytes, commitment: bytes) -> bool:
    """Whether a commitment is that of this seed."""
    return hmac.compare_digest(commit(seed, context), commitment)


def _join(label: bytes, context: bytes) -> bytes:
    """Label and context in one byte string, unambiguously."""
    return len(label).to_bytes(4, "big") + label + context
