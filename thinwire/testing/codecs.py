"""Conformance check of codecs, including damaged bytes."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from thinwire.codecs.base import Codec, Peer
from thinwire.core.spec import DTYPES, Spec
from thinwire.core.tree import Tree, add, restrict, same
from thinwire.errors import ConfigError, WireError
from thinwire.testing.common import (
    COORDS,
    KEY,
    check_part,
    check_spec,
    pure,
    random_tree,
    typed,
)


def check_codec(codec: Codec, *, lossless: bool = False) -> None:
    """Check that a codec decodes to a tree of the right shape, for any tree and for damaged bytes.

    Trees: all types that it accepts (ConfigError for others; float32 is required), scalars, empty blocks, no blocks,
    and some of the blocks while its state is of all. Every truncation and some hundred mutations of its bytes must
    decode to a tree of the right shape or raise WireError.

    Args:
        codec: the part.
        lossless: whether values must be restored bit for bit.

    >>> from thinwire.codecs import Raw
    >>> check_codec(Raw(), lossless=True)
    """
    check_part(codec)
    assert codec.exact or not codec.encodes_sums, "a codec of sums must be exact"
    accepted = []
    for dtype in DTYPES:
        tree = {name: typed(block, dtype) for name, block in random_tree(COORDS, KEY.fold("tree")).items()}
        try:
            _check_round_trip(codec, tree, lossless)
            accepted.append(dtype)
        except ConfigError:
            assert dtype is not torch.float32, "a codec must accept float32"
    whole = random_tree(COORDS, KEY.fold("tree"))
    transposed = {**whole, "fc.weight/a": whole["fc.weight/a"].t().contiguous().t()}
    first, second = (codec.encode(tree, codec.init(Spec.of(tree)), Peer(KEY))[0] for tree in (whole, transposed))
    assert first == second, "the bytes depend on the memory layout of a block; make it contiguous first"
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3e38]
    for tree in (
        {},
        {"w": torch.tensor(1.5)},
        {"w": torch.zeros(0, 3), "v": torch.ones(2)},
        {name: torch.zeros_like(block) for name, block in whole.items()},
        {name: torch.full_like(block, -2.5) for name, block in whole.items()},
        *([{"w": torch.tensor(special)}] if lossless else []),
        *([{name: typed(block, d) for (name, block), d in zip(whole.items(), accepted, strict=False)}]),
    ):
        _check_round_trip(codec, tree, lossless)
    _check_some_blocks(codec, whole)
    _check_sums(codec, whole)
    _check_magnitudes(codec, whole)
    _check_mutations(codec, whole)


def _check_round_trip(codec: Codec, tree: Tree, lossless: bool) -> None:
    spec, peer = Spec.of(tree), Peer(KEY.fold("peer"))
    state = pure("init", codec.init, spec)
    for _ in range(3):  # the state of a codec is trivial before the first messages
        data, after = pure("encode", codec.encode, tree, state, peer)
        assert isinstance(data, (bytes, memoryview)), f"encode must return bytes, not {type(data).__name__}"
        check_spec("the state after encode", after, Spec.of(state))
        size = codec.size(spec)
        assert size is None or size == len(data), f"size returns {size} bytes, encode {len(data)}"
        back = pure("decode", codec.decode, data, spec, peer)
        check_spec("decode", back, spec)
        view = codec.decode(memoryview(b"ab" + data + b"c")[2:-1], spec, peer)
        assert same(view, back), "decode must accept a memoryview, with the same result as for bytes"
        for name, block in back.items():
            assert block.device.type == "cpu", f"decode must return blocks on the CPU, {name!r} is on {block.device}"
        if lossless:
            assert same(back, tree), f"the values of {spec} are not restored bit for bit"
        state = after


def _check_some_blocks(codec: Codec, whole: Tree) -> None:
    """Check a round that synchronizes only some blocks: the state of the others must not change."""
    peer = Peer(KEY.fold("some"))
    _, state = codec.encode(whole, codec.init(Spec.of(whole)), peer)
    some = restrict(whole, ("fc.weight/b", "scale"))
    data, after = pure("encode", codec.encode, some, state, peer)
    check_spec("decode", codec.decode(data, Spec.of(some), peer), Spec.of(some))
    check_spec("the state after a message of some blocks", after, Spec.of(state))
    for name in state:
        if any(name == block or name.endswith(f"/{block}") for block in whole.keys() - some.keys()):
            assert same({name: after[name]}, {name: state[name]}), (
                f"state {name!r} of a block that was not sent has changed"
            )


def _check_sums(codec: Codec, tree: Tree) -> None:
    """Check that the sum of messages decodes to the sum of trees, if the codec has `adds`."""
    if not codec.summable:
        return
    spec, other = Spec.of(tree), random_tree({name: tuple(b.shape) for name, b in tree.items()}, KEY.fold("other"))
    peers = [Peer(KEY.fold("client", i), KEY.fold("everyone")) for i in range(2)]
    data = [codec.encode(t, codec.init(spec), peer)[0] for t, peer in zip((tree, other), peers, strict=True)]
    total = sum(np.frombuffer(one, "<f4").astype(np.float64) for one in data)
    back = codec.decode(np.asarray(total, "<f4").tobytes(), spec, peers[0])
    decoded_sum = add(*(codec.decode(one, spec, peer) for one, peer in zip(data, peers, strict=True)))
    for name, block in back.items():
        assert torch.allclose(block, decoded_sum[name], rtol=1e-5, atol=1e-6), (
            f"adds is true, but the sum of two messages does not decode to the sum of their trees in {name!r}"
        )


def _check_magnitudes(codec: Codec, tree: Tree) -> None:
    """Check that magnitudes alone decode to the same magnitudes, if `codes_signs`."""
    if not codec.codes_signs:
        return
    spec, peer = Spec.of(tree), Peer(KEY.fold("signs"))
    sizes = {name: block.abs() for name, block in tree.items()}
    signed, alone = (codec.decode(codec.encode(t, codec.init(spec), peer)[0], spec, peer) for t in (tree, sizes))
    for name, block in signed.items():
        assert torch.equal(block.abs(), alone[name]), (
            f"codes_signs is true, but magnitudes of {name!r} decode to others without their signs"
        )


def _check_mutations(codec: Codec, tree: Tree) -> None:
    """Check damaged bytes: WireError, or a tree of the right shape."""
    spec, peer = Spec.of(tree), Peer(KEY.fold("peer"))
    data = bytes(codec.encode(tree, codec.init(spec), peer)[0])
    damaged = [data[:n] for n in range(len(data))] + [data + b"\0", data + data, b"\xff" * len(data), b""]
    draw = random.Random(0)
    for i in range(400 if data else 0):
        broken = bytearray(data)
        for _ in range(1 + i % 4):
            broken[draw.randrange(len(data))] = draw.randrange(256)
        damaged.append(bytes(broken))
    for bad in damaged:
        try:
            back = codec.decode(bad, spec, peer)
        except WireError:
            continue
        except Exception as error:
            raise AssertionError(
                f"decode must raise WireError for damaged bytes, not {type(error).__name__}: {error} "
                f"(bytes {bad[:40].hex()})"
            ) from error
        check_spec(f"decode of damaged bytes {bad[:40].hex()}", back, spec)
