"""Conformance check of codecs, including damaged bytes."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from thinwire.codecs.base import Codec, Peer
from thinwire.core.tree import DTYPES, Spec, Tree, add, restrict, same, tmap, zeros_like
from thinwire.errors import ConfigError, WireError
from thinwire.testing.common import COORDS, KEY, SOME, Calls, check_like, close, random_tree

PEER = Peer(KEY.fold("peer"))


def check_codec(codec: Codec, *, lossless: bool = False) -> None:
    """Check that a codec decodes to a tree of the right shape, for any tree and for damaged bytes.

    Finite values must stay finite. Trees: all types that it accepts (ConfigError for others; float32 is required),
    scalars, empty blocks, no blocks, and some of the blocks while its state is of all. Every truncation and some
    hundred mutations of its bytes must decode to a tree of the right shape or raise WireError.

    Args:
        codec: the part.
        lossless: whether values must be restored bit for bit.

    >>> from thinwire.codecs import Raw
    >>> check_codec(Raw(), lossless=True)
    """
    call = Calls(codec)
    assert codec.exact or not codec.encodes_sums, "a codec of sums must be exact"
    tree = random_tree(COORDS)
    accepted = []
    for dtype in DTYPES:
        try:
            _check_round_trip(call, {name: _typed(block, dtype) for name, block in tree.items()}, lossless)
            accepted.append(dtype)
        except ConfigError:
            assert dtype is not torch.float32, "a codec must accept float32"
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3e38]
    for case in (
        {},
        {"w": torch.tensor(1.5)},
        {"w": torch.zeros(0, 3), "v": torch.ones(2)},
        zeros_like(tree),
        tmap(lambda block: torch.full_like(block, -2.5), tree),
        {name: _typed(block, dtype) for (name, block), dtype in zip(tree.items(), accepted, strict=False)},
        *([{"w": torch.tensor(special)}] if lossless else []),
    ):
        _check_round_trip(call, case, lossless)
    transposed = {**tree, "fc.weight/a": tree["fc.weight/a"].t().contiguous().t()}
    assert _message(codec, tree) == _message(codec, transposed), (
        "the bytes depend on the memory layout of a block; make it contiguous first"
    )
    _check_some_blocks(call, tree)
    _check_properties(codec, tree)
    _check_damaged(codec, tree)


def _typed(block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the block in another type, scaled so that integers are not all zero."""
    block = block * 10
    return (block.clamp(min=0) if dtype in (torch.bool, torch.uint8) else block).to(dtype)


def _message(codec: Codec, tree: Tree, peer: Peer = PEER) -> bytes:
    """Return the first message of a client."""
    return bytes(codec.encode(tree, codec.init(Spec.of(tree)), peer)[0])


def _check_round_trip(call: Calls, tree: Tree, lossless: bool) -> None:
    try:
        _round_trip(call, tree, lossless)
    except ConfigError:  # a type that it does not accept
        raise
    except Exception as error:
        blocks = ", ".join(f"{name} {block.dtype} {[*block.shape]}" for name, block in tree.items())
        what = f"{type(error).__name__}: " * (not isinstance(error, AssertionError))
        raise AssertionError(f"{call.part!r} on the tree {{{blocks}}}: {what}{error}") from error


def _round_trip(call: Calls, tree: Tree, lossless: bool) -> None:
    codec, spec = call.part, Spec.of(tree)
    state = call("init", spec)
    for _ in range(3):  # the state of a codec is trivial before the first messages
        data, after = call("encode", tree, state, PEER)
        assert isinstance(data, (bytes, memoryview)), f"encode must return bytes, not {type(data).__name__}"
        check_like("the state after encode", after, state)
        size = codec.size(spec)
        assert size is None or size == len(data), f"size returns {size} bytes, encode {len(data)}"
        back = call("decode", data, spec, PEER, like=tree)
        view = codec.decode(memoryview(b"ab" + data + b"c")[2:-1], spec, PEER)
        assert same(view, back), "decode must accept a memoryview, with the same result as for bytes"
        assert all(block.device.type == "cpu" for block in back.values()), "decode must return blocks on the CPU"
        assert not lossless or same(back, tree), "the values are not restored bit for bit"
        lost = [name for name in back if tree[name].isfinite().all() and not back[name].isfinite().all()]
        assert not lost, f"decode returns values of {lost[0]} that are not finite, where the input is finite"
        state = after


def _check_some_blocks(call: Calls, tree: Tree) -> None:
    """Check a round that synchronizes only some blocks: the state of the others must not change."""
    codec, some = call.part, restrict(tree, SOME)
    _, state = codec.encode(tree, codec.init(Spec.of(tree)), PEER)
    data, after = call("encode", some, state, PEER)
    call("decode", data, Spec.of(some), PEER, like=some)
    check_like("the state after a message of some blocks", after, state)
    others = tuple(f"/{block}" for block in tree if block not in some)
    kept = [name for name in state if f"/{name}".endswith(others)]
    assert same(restrict(after, kept), restrict(state, kept)), "the state of a block that was not sent has changed"


def _check_properties(codec: Codec, tree: Tree) -> None:
    """Check that messages add up, if `summable`, and that signs change no magnitude, if `codes_signs`."""
    spec = Spec.of(tree)
    if codec.summable:
        peers = [Peer(KEY.fold("client", i), KEY.fold("everyone")) for i in range(2)]
        trees = (tree, random_tree(COORDS, "other"))
        data = [_message(codec, one, peer) for one, peer in zip(trees, peers, strict=True)]
        total = sum(np.frombuffer(one, "<f4").astype(np.float64) for one in data)
        back = codec.decode(np.asarray(total, "<f4").tobytes(), spec, peers[0])
        apart = add(*(codec.decode(one, spec, peer) for one, peer in zip(data, peers, strict=True)))
        assert close(back, apart), (
            "summable is true, but the sum of two messages does not decode to the sum of their trees"
        )
    if codec.codes_signs:
        signed, alone = (codec.decode(_message(codec, one), spec, PEER) for one in (tree, tmap(torch.abs, tree)))
        assert same(tmap(torch.abs, signed), alone), (
            "codes_signs is true, but magnitudes decode to others without their signs"
        )


def _check_damaged(codec: Codec, tree: Tree) -> None:
    """Check damaged bytes: WireError, or a tree of the right shape."""
    data = _message(codec, tree)
    damaged = [data[:n] for n in range(len(data))] + [data + b"\0", data + data, b"\xff" * len(data), b""]
    draw = random.Random(0)
    for i in range(400 if data else 0):
        broken = bytearray(data)
        for _ in range(1 + i % 4):
            broken[draw.randrange(len(data))] = draw.randrange(256)
        damaged.append(bytes(broken))
    for bad in damaged:
        try:
            back = codec.decode(bad, Spec.of(tree), PEER)
        except WireError:
            continue
        except Exception as error:
            raise AssertionError(
                f"decode must raise WireError for damaged bytes, not {type(error).__name__}: {error} "
                f"(bytes {bad[:40].hex()})"
            ) from error
        check_like(f"decode of damaged bytes {bad[:40].hex()}", back, tree)
