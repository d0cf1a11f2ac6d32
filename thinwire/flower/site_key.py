"""Keys of sites: ECDSA keys in OpenSSH form, as `ssh-keygen -t ecdsa` and `thinwire site key` write them.

A site signs with the private key by which its node authenticates to Flower; the server has the public key. The form of
a public key is checked without other packages; signatures need `cryptography`, which the extra `flower` installs.

>>> public_key("ssh-rsa AAAA", "north.pub")  # doctest: +ELLIPSIS
Traceback (most recent call last):
thinwire.errors.ConfigError: north.pub is 'ssh-rsa AAAA', expected a key such as ecdsa-sha2-nistp384 AAAA...
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.errors import ConfigError
from thinwire.flower import INSTALL

CURVES = {"nistp256": 32, "nistp384": 48, "nistp521": 66}  # bytes of a coordinate
LONGEST_FILE = 1 << 16  # bytes of a key file; the longest key has a few hundred
LONGEST_SIGNATURE = 256  # bytes; DER of two numbers of 66 bytes has at most 139


def public_key(text: str, what: str) -> str:
    """The type and value of a public key, without its comment; a ConfigError if it is something else.

    Args:
        text: one line in OpenSSH form.
        what: where it was found, for errors.
    """
    if "PRIVATE KEY" in text:
        raise ConfigError(f"{what} is a private key, which must stay at its site; give the file that ends in .pub")
    kind, value, *_ = [*text.split(), "", ""]
    curve = kind.removeprefix("ecdsa-sha2-")
    try:
        fields = _fields(base64.b64decode(value, validate=True))
    except (binascii.Error, ValueError):
        fields = []
    if (
        len(text.strip().splitlines()) != 1
        or curve not in CURVES
        or fields[:2] != [kind.encode(), curve.encode()]
        or [len(point) for point in fields[2:]] != [1 + 2 * CURVES[curve]]
        or fields[2][:1] != b"\x04"
    ):
        given = visible(text.strip(), 60)
        form = "expected a key such as ecdsa-sha2-nistp384 AAAA...; write: thinwire site key FILE"
        raise ConfigError(f"{what} is {given!r}, {form}")
    return f"{kind} {value}"


def _fields(data: bytes) -> list[bytes]:
    """The fields of the binary form: each has its length in four bytes."""
    found = []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        if len(data) < end:
            raise ValueError("it is too short")
        found.append(data[4:end])
        data = data[end:]
    return found


def read_public_key(file: Path) -> str:
    """The public key in a file."""
    return public_key(_read(file).decode("utf-8", "replace"), str(file))


def fingerprint(key: str) -> str:
    """The SHA-256 of a public key, as `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def sign(file: Path, statement: bytes) -> bytes:
    """The signature of a statement: ECDSA with SHA-384.

    Args:
        file: the private key.
        statement: what is signed.
    """
    serialization, ec, hashes, _ = _cryptography()
    try:
        key = serialization.load_ssh_private_key(_read(file), None)
    except (ValueError, TypeError) as error:  # TypeError: it has a passphrase
        raise ConfigError(
            f"{file} cannot be read ({visible(str(error), 100)}), expected a private ECDSA key without a passphrase; "
            "write: thinwire site key FILE"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{file} is not an ECDSA key; write: thinwire site key FILE")
    return bytes(key.sign(statement, ec.ECDSA(hashes.SHA384())))


def is_signed(key: str, statement: bytes, signature: bytes) -> bool:
    """Whether the holder of a key has signed a statement.

    Args:
        key: the public key.
        statement: what was signed.
        signature: the signature, not trusted.
    """
    serialization, ec, hashes, invalid = _cryptography()
    if len(signature) > LONGEST_SIGNATURE:
        return False
    try:
        public = serialization.load_ssh_public_key(key.encode())
        public.verify(signature, statement, ec.ECDSA(hashes.SHA384()))
    except (invalid, ValueError):  # ValueError: the point of the key is not on the curve
        return False
    return True


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(LONGEST_FILE)
    except OSError as error:
        raise ConfigError(f"the key {file} cannot be read: {error.strerror}") from error


def _cryptography() -> tuple[Any, Any, Any, Any]:
    """The modules that sign; a ConfigError with the line that installs them."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(f"keys of sites need cryptography, which is not installed; write: {INSTALL}") from error
    return serialization, ec, hashes, InvalidSignature
