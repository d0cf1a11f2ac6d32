"""Updates of another program as bytes: the codecs without our rounds.

    sender      data, state = encode_update(update, codec, state, key)
    receiver    update = decode_update(data, like, codec, key)

    data = 8 bytes check, v length of the payload, payload of coded arrays as float32, the others as they are

Floating-point arrays are coded, but for short vectors: biases, and statistics of batch norm, which a lossy code would
ruin. Both ends know codec, key, names, shapes and types; the check covers them and all bytes. `Published` is the other
direction: the arrays as receivers have them, and the steps that lead there.

>>> old, new = {"w": np.zeros((20, 50), np.float32)}, {"w": np.linspace(-1, 1, 1000, dtype=np.float32).reshape(20, 50)}
>>> codec = codec_of("topk+int4")
>>> data, state = encode_update({"w": new["w"] - old["w"]}, codec)
>>> len(data) < 100, round(float(decode_update(data, old, codec)["w"].max()), 2)
(True, 1.0)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from thinwire.codecs.base import Codec, Peer, Raw
from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.core.tree import Block, Spec, Tree, all_finite
from thinwire.errors import ConfigError, Diverged, WireError
from thinwire.protocol.method import Method
from thinwire.wire.bits import Bytes, prefixed, read_prefixed

Arrays = Mapping[str, np.ndarray]
_CHECK = 8
STEPS = 100  # that are kept for receivers that missed some
SHORT = 4096  # the longest vector that is not coded


def codec_of(text: str | Codec) -> Codec:
    """A codec by the name of a method or its own; several with +, as in `topk+int4`.

    >>> codec_of("int4").bits
    4
    """
    if isinstance(text, Codec):
        return text
    parts = [Method(up=name).up for name in text.split("+")]  # type: ignore[arg-type]
    return parts[0] if len(parts) == 1 else lookup("codec", "chain").make.of(*parts)  # type: ignore[attr-defined,no-any-return]


def encode_update(update: Arrays, codec: Codec, state: Tree | None = None, key: int = 0) -> tuple[bytes, Tree]:
    """An update as bytes, and the next state of the sender.

    Args:
        update: by name, new minus old of coded arrays, the new values of others: see `difference`.
        codec: the codec.
        state: what the last call returned; None at first.
        key: a number that both ends know, another one for each message.
    """
    coded, spec, others = _split(update)
    tree = {name: torch.from_numpy(np.array(update[name], np.float32)) for name in coded}
    if not all_finite(tree) or not _finite(update, others):
        raise Diverged("the update is not finite; try a smaller learning rate")
    payload, state = codec.encode(tree, codec.init(spec) if state is None else state, Peer(Key(key)))
    body = prefixed(bytes(payload)) + b"".join(np.ascontiguousarray(update[name]).tobytes() for name in others)
    return _check(body, update, codec, key) + body, state


def decode_update(data: Bytes, like: Arrays, codec: Codec, key: int = 0) -> dict[str, np.ndarray]:
    """The update in bytes that are not trusted; raises WireError where they are not of `encode_update`.

    Args:
        data: the bytes.
        like: arrays with the names, shapes and types of the update.
        codec: the codec of the sender.
        key: the key of the sender.
    """
    body = memoryview(data)[_CHECK:]
    if bytes(data[:_CHECK]) != _check(body, like, codec, key):
        raise WireError("the message is damaged, or its sender has another codec, key or other arrays")
    coded, spec, others = _split(like)
    payload, rest = read_prefixed(body, "a payload")
    tree = codec.decode(payload, spec, Peer(Key(key)))
    if len(rest) != sum(like[name].nbytes for name in others):
        raise WireError(f"expected {sum(like[name].nbytes for name in others)} bytes of other arrays, got {len(rest)}")
    out, start = dict[str, np.ndarray](), 0
    for name, one in like.items():
        if name in coded:
            out[name] = tree[name].numpy()
        else:
            out[name] = np.frombuffer(rest[start : start + one.nbytes], one.dtype).reshape(one.shape)
            start += one.nbytes
    if not all_finite(tree) or not _finite(out, others):
        raise WireError("the update is not finite")
    return out


def added(old: Arrays, update: Arrays) -> dict[str, np.ndarray]:
    """The new arrays, in the types of the old ones."""
    coded = _split(old)[0]
    return {
        name: (one + update[name]).astype(one.dtype) if name in coded else update[name] for name, one in old.items()
    }


def difference(new: Arrays, old: Arrays) -> dict[str, np.ndarray]:
    """The update between two arrays; the new values where they are not coded, in the types of the old ones.

    Raises:
        ConfigError: for other names or shapes.
    """
    if _shapes(new) != _shapes(old):
        raise ConfigError("the arrays have other names or shapes than those that were received; send them uncoded")
    coded = _split(old)[0]
    return {
        name: np.subtract(new[name], one, dtype=np.float32) if name in coded else new[name].astype(one.dtype)
        for name, one in old.items()
    }


@dataclass(frozen=True)
class Published:
    """What a server has sent: versions of arrays, each with a step from the one before, the first from zeros.

        step v = C(arrays_v - sent_(v-1))          sent_v = sent_(v-1) + decoded step

    What a step leaves out is part of the next difference, so C has no error feedback of its own.

    Args:
        codec: C.
        key: a number that both ends know.
        first: C of the first arrays.
        version: of the newest arrays; -1 before the first.
        base: the version whose step is from zeros: the first with these shapes.
        sent: the newest arrays, as receivers have them.
        steps: the latest steps.
    """

    codec: Codec
    key: int = 0
    first: Codec = Raw()
    version: int = -1
    base: int = 0
    sent: Arrays = field(default_factory=dict)
    steps: tuple[bytes, ...] = ()

    def after(self, arrays: Arrays) -> Published:
        """With a new version.

        >>> first = Published(codec_of("int8")).after({"w": np.zeros((1, 4), np.float32)})
        >>> later = first.after({"w": np.full((1, 4), 0.5, np.float32)})
        >>> have = received(first.sent, later.since(0), later.codec, key=0, version=0)
        >>> later.version, have["w"].round(3).tolist(), bool((have["w"] == later.sent["w"]).all())
        (1, [[0.5, 0.5, 0.5, 0.5]], True)
        """
        codec, old, steps, base = self.codec, self.sent, self.steps, self.base
        if _shapes(arrays) != _shapes(old):
            codec, old = self.first, {name: np.zeros_like(one) for name, one in arrays.items()}
            steps, base = (), self.version + 1
        if codec.init(_split(old)[1]):
            raise ConfigError("downloads send later what they left out anyway; write a codec without error feedback")
        step, _ = encode_update(difference(arrays, old), codec, key=self.key + self.version + 1)
        sent = received(old, [step], codec, self.key, self.version)
        return replace(self, version=self.version + 1, base=base, sent=sent, steps=(*steps, step)[-STEPS:])

    def since(self, version: int) -> list[bytes] | None:
        """The steps from a version, `base - 1` for zeros; None if all arrays are shorter, or the version is too old."""
        steps = list(self.steps[len(self.steps) - (self.version - version) :]) if version < self.version else []
        known = self.version - len(self.steps) <= version <= self.version
        whole = sum(one.nbytes for one in self.sent.values())
        return steps if known and sum(map(len, steps)) < whole else None

    def parts(self, version: int) -> tuple[int, list[bytes]] | None:
        """What a receiver of a version is sent, -1 for one without arrays: see `joined`. None: it is sent `sent`."""
        since = max(version, self.base - 1)
        steps = self.since(since)
        head = [(name, one.dtype.str, one.shape) for name, one in self.sent.items()] if since < self.base else None
        return None if steps is None else (since, [json.dumps(head).encode(), *steps])


def joined(
    since: int, parts: list[bytes], version: int, arrays: Arrays, codec: Codec, first: Codec, key: int
) -> dict[str, np.ndarray] | None:
    """The newest arrays, of `Published.parts`, from those of a version; None if that is too old."""
    head, *steps = parts
    if names := json.loads(bytes(head)):
        empty = {name: np.zeros(shape, dtype) for name, dtype, shape in names}
        version, arrays = since + 1, received(empty, steps[:1], first, key, since)
    elif not since <= version <= since + len(steps):
        return None
    return received(arrays, steps[version - since :], codec, key, version)


def received(old: Arrays, steps: list[bytes], codec: Codec, key: int, version: int) -> dict[str, np.ndarray]:
    """The arrays of a later version, after these steps from `version`."""
    arrays = dict(old)
    for i, step in enumerate(steps, version + 1):
        arrays = added(arrays, decode_update(step, arrays, codec, key + i))
    return arrays


def upload_key(session: int, sender: int | str, version: int) -> int:
    """The key of an upload: the same at both ends."""
    return Key(session).fold("upload", sender, version).value


def _split(arrays: Arrays) -> tuple[list[str], Spec, list[str]]:
    """The names of coded arrays, their spec as float32, and the other names."""
    coded = [name for name, one in arrays.items() if _is_coded(one)]
    spec = Spec(tuple(Block(name, arrays[name].shape, torch.float32) for name in coded))
    return coded, spec, [name for name in arrays if name not in coded]


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for name, one in arrays.items()}


def _is_coded(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and (array.ndim > 1 or array.size > SHORT)


def _finite(arrays: Arrays, names: list[str]) -> bool:
    return all(bool(np.isfinite(arrays[name]).all()) for name in names if arrays[name].dtype.kind == "f")


def _layout(arrays: Arrays) -> list[Any]:
    """Names, shapes and types; all types of coded arrays are one, as differences are float32."""
    return [(name, one.shape, "coded" if _is_coded(one) else one.dtype.str) for name, one in arrays.items()]


def _check(body: Bytes, like: Arrays, codec: Codec, key: int) -> bytes:
    hashed = blake2b(repr((_layout(like), codec, key)).encode(), digest_size=_CHECK)
    hashed.update(body)
    return hashed.digest()
