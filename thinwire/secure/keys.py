"""Keys of secure aggregation and of sites: shares of secrets, key agreement, sealed messages, commitments, signatures.

    shares of a secret   f(x) = secret + a_1 x + ... + a_(t-1) x^(t-1)   mod p = 2^256 + 297;  any t values give f(0)
                         (Shamir, 1979); a_1, ... are drawn from the random source of the operating system
    secret of a pair     HKDF-SHA-256(X25519(own private key, other's public key), label and context)
    sealed               ChaCha20-Poly1305 with a key of one sender, one receiver and one session, used once
    commitment           SHA-256(label, context, seed)
    signature of a site  ECDSA with SHA-384; keys in OpenSSH form, as `ssh-keygen -t ecdsa` and `thinwire site key`
                         write them. A site signs with the key by which its node authenticates to Flower.

The package `cryptography` computes all but shares; it is imported when it is first used.

>>> shares = split(bytes(31) + b"!", [1, 2, 3, 7], 3)
>>> combine({x: shares[x] for x in (1, 3, 7)})[-1:]
b'!'
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from thinwire.core.text import visible
from thinwire.errors import ConfigError, WireError

PRIME = (1 << 256) + 297
SHARE_BYTES, KEY_BYTES, TAG_BYTES = 33, 32, 16
LONGEST_FILE = 1 << 16  # bytes of a key file; the longest key has a few hundred
LONGEST_SIGNATURE = 160  # bytes: of ECDSA with P-521 at most 139
_SUBSETS = 200  # how many sets of shares are tried if some of them are wrong
_NONCE = bytes(12)  # a key seals one message: its sender stores what it sealed, and repeats it


def need_cryptography(what: str = "secure_aggregation = true") -> None:
    """Raise ConfigError, with the line that installs it, if the package `cryptography` is not installed."""
    if find_spec("cryptography") is None:
        raise ConfigError(
            f"{what} needs the package cryptography, which is not installed here; write: pip install 'thinwire[flower]'"
        )


# -- shares of a secret ------------------------------------------------------------------------------------------------


def split(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, int]:
    """The shares of a secret, by point.

    Args:
        secret: 32 bytes.
        points: different integers above 0.
        threshold: how many shares recover the secret.
    """
    terms = [*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), int.from_bytes(secret, "big")]
    shares = dict.fromkeys(points, 0)
    for x in points:
        for term in terms:
            shares[x] = (shares[x] * x + term) % PRIME
    return shares


def combine(shares: Mapping[int, int]) -> bytes:
    """The secret from as many shares as the threshold; a WireError if it is none of 32 bytes."""
    points = tuple(sorted(shares))
    total = sum(shares[x] * factor for x, factor in zip(points, _factors(points), strict=True)) % PRIME
    if total >> 256:
        raise WireError("the shares do not belong together")
    return total.to_bytes(KEY_BYTES, "big")


def recover(shares: Mapping[int, int], threshold: int, is_right: Callable[[bytes], bool]) -> bytes:
    """The secret from at least as many shares as the threshold, of which some may be wrong.

    Args:
        shares: the shares, by point.
        threshold: how many recover the secret.
        is_right: whether this is the secret.
    """
    if len(shares) < threshold:
        raise WireError(f"{len(shares)} shares of a secret, {threshold} are needed")
    chosen, draw = sorted(shares)[:threshold], secrets.SystemRandom()
    for _ in range(_SUBSETS if len(shares) > threshold else 1):
        try:
            if is_right(secret := combine({x: shares[x] for x in chosen})):
                return secret
        except WireError:
            pass
        chosen = draw.sample(sorted(shares), threshold)
    raise WireError("the shares of a secret are not those that its owner made")


@lru_cache(maxsize=64)
def _factors(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's factors of the values at these points for the value at 0."""
    factors = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)


# -- keys of one session -----------------------------------------------------------------------------------------------


def session_key(private: bytes) -> bytes:
    """The X25519 public key of a private key, which is 32 random bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return bytes(X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw())


def agree(private: bytes, public: bytes, label: bytes, context: bytes) -> bytes:
    """The secret of two key pairs, for one purpose in one context; both sides compute the same.

    Args:
        private: one's own private key.
        public: the other's public key, not trusted.
        label: the purpose; none begins with another.
        context: session, and who takes part.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of small order: the secret would be 0 for any private key
        raise WireError("a public key is not valid") from error
    return bytes(HKDF(SHA256(), KEY_BYTES, salt=None, info=label + context).derive(shared))


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
    return hashlib.sha256(b"thinwire secure aggregation: seed" + context + seed).digest()


# -- keys of sites -----------------------------------------------------------------------------------------------------


def make_key(path: Path) -> Path:
    """Write the private key of a site, and its public key, whose name has `.pub` added."""
    need_cryptography("a key of a site")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, form = ec.generate_private_key(ec.SECP384R1()), serialization.PrivateFormat.OpenSSH
    path.touch(0o600, exist_ok=False)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")
    return path


def public_key(text: str, what: str) -> str:
    """The type and value of a public key, without its comment; a ConfigError if it is something else.

    Args:
        text: one line in OpenSSH form.
        what: where it was found, for errors.
    """
    need_cryptography("a key of a site")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if "PRIVATE KEY" in text:
        raise ConfigError(f"{what} is a private key, which must stay at its site; give the file that ends in .pub")
    try:
        lines = text.strip().splitlines()
        key = serialization.load_ssh_public_key(lines[0].encode()) if len(lines) == 1 else None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        given = visible(text.strip(), 60)
        form = "expected a key such as ecdsa-sha2-nistp384 AAAA...; write: thinwire site key FILE"
        raise ConfigError(f"{what} is {given!r}, {form}")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def read_public_key(file: Path) -> str:
    """The public key in a file."""
    return public_key(_read(file).decode("utf-8", "replace"), str(file))


def fingerprint(key: str) -> str:
    """The SHA-256 of a public key, as `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def sign(file: Path, statement: bytes) -> bytes:
    """The signature of a statement by the private key in a file."""
    need_cryptography("a key of a site")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_ssh_private_key(_read(file), None)
        why = "it is of another type"
    except (ValueError, TypeError) as error:  # TypeError: it has a passphrase
        key, why = None, visible(str(error), 100)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        expected = "expected a private ECDSA key without a passphrase; write: thinwire site key FILE"
        raise ConfigError(f"{file} cannot be read ({why}), {expected}")
    return bytes(key.sign(statement, ec.ECDSA(hashes.SHA384())))


def is_signed(key: str, statement: bytes, signature: bytes) -> bool:
    """Whether the holder of a public key has signed a statement; the signature is not trusted."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if len(signature) > LONGEST_SIGNATURE:
        return False
    try:
        public = serialization.load_ssh_public_key(key.encode())
        assert isinstance(public, ec.EllipticCurvePublicKey)
        public.verify(signature, statement, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):  # ValueError: the point of the key is not on the curve
        return False
    return True


@dataclass(frozen=True)
class SiteKeys:
    """The private key of a site, and the public keys by which it knows the clients of all sites.

    Without signatures a server that lies could put itself between any two clients. The public keys are those of the
    roster; each site needs its own copy of it, which it did not get from the server.

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


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(LONGEST_FILE)
    except OSError as error:
        raise ConfigError(f"the key {file} cannot be read: {error.strerror}") from error
