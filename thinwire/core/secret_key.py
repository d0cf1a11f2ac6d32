"""Secret keys: cryptographic randomness, such as for the noise of differential privacy in a deployment."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Device, Key, encode_labels


@dataclass(frozen=True)
class SecretKey(Key):
    """A key of 256 bits for draws that an adversary must not predict, such as the noise of differential privacy.

        word(j) = word j of SHAKE-256(key)

    Philox, which `Key` uses, is fast but not cryptographically secure. A secret key stays in one process; it draws on
    the CPU.

    >>> SecretKey(5).fold("noise").words_numpy(3).tolist() == SecretKey(5).fold("noise").words_numpy(3).tolist()
    True
    """

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 256:
            raise ValueError("a secret key must be an integer from 0 to 2**256 - 1")

    @classmethod
    def draw(cls) -> SecretKey:
        """A new key from the random source of the operating system."""
        return cls(secrets.randbits(256))

    def fold(self, *parts: str | int) -> SecretKey:
        """Derive a key from this one and some strings or integers (BLAKE2b, 256 bits)."""
        digest = hashlib.blake2b(
            encode_labels(parts), digest_size=32, key=self._bytes(), person=b"thinwire.key"
        ).digest()
        return SecretKey(int.from_bytes(digest, "little"))

    def words_numpy(self, n: int, start: int = 0) -> np.ndarray:
        """n uint32 words of the stream, from position `start`; all words before it are computed as well."""
        stream = hashlib.shake_256(self._bytes()).digest(4 * (start + n))
        return np.frombuffer(stream, "<u4")[start:].astype(np.uint32)

    def words_torch(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """As `words`, copied to that device."""
        return torch.from_numpy(self.words_numpy(n, start).astype(np.int64)).to(device)

    def _bytes(self) -> bytes:
        return self.value.to_bytes(32, "little")
