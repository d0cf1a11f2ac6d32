"""Tests of stochastic rounding to two levels."""

import math

import pytest
import torch

from thinwire.codecs import Binary, ErrorFeedback, Peer
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import ConfigError, WireError

BITS = Binary((0.0, 1.0))


def sent(codec, tree, key=1):
    data, _ = codec.encode(tree, {}, Peer(Key(key)))
    return data, codec.decode(data, Spec.of(tree), Peer(Key(key)))


def test_values_are_one_of_two_levels_and_their_expectation():
    x, codec, low, high = Key(3).normal(400), Binary((-4.0, 5.0)), -4.0, 5.0
    made = torch.stack([sent(codec, {"x": x}, key)[1]["x"] for key in range(300)])
    assert set(made.unique().tolist()) == {low, high}
    deviation = ((x - low) * (high - x) / 300).sqrt()
    assert ((made.mean(0) - x).abs() <= 5 * deviation + 1e-5).all()


def test_values_beyond_the_levels_are_sent_as_the_nearer_one():
    _, back = sent(BITS, {"x": torch.tensor([-3.0, 0.0, 1.0, 1.5])})
    assert back["x"].tolist() == [0, 0, 1, 1]


def test_each_block_takes_the_entropy_of_its_own_share():
    tree = {"a": torch.full((20_000,), 0.02), "b": torch.full((20_000,), 0.3)}
    data, back = sent(BITS, tree)
    shares = [float(block.mean()) for block in back.values()]
    entropy = sum(-20_000 * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8 for p in shares)
    assert len(data) <= 1.003 * entropy + 32


def test_bits_that_known_values_predict_take_their_conditional_entropy():
    known = {"a": Key(1).uniform(100, 100), "b": Key(2).uniform(4000)}
    tree = {name: (x - 0.5).sign() * 0.4 + 0.5 for name, x in known.items()}  # 0.1 or 0.9
    peer = Peer(Key(1), known=known)
    data, _ = BITS.encode(tree, {}, peer)
    back = BITS.decode(data, Spec.of(tree), peer)
    assert len(data) < 0.5 * 14_000 / 8 < len(sent(BITS, tree)[0])  # 0.47 bits each, and one where nothing is known
    assert all(torch.equal(back[name], block) for name, block in sent(BITS, tree)[1].items())
    other = Peer(Key(1), known={"a": known["a"]})  # not of all blocks: not used
    assert BITS.encode(tree, {}, other)[0] == sent(BITS, tree)[0]


def test_blocks_have_draws_of_their_own():
    half = torch.full((64,), 0.5)
    _, back = sent(BITS, {"a": half, "b": half})
    assert not torch.equal(back["a"], back["b"])


@pytest.mark.parametrize("levels", [(), (1.0,), (1.0, 0.0), (0.0, math.inf), (0.0, 0.5, 1.0), (2.0, 2.0)])
def test_levels_that_are_no_pair_are_refused(levels):
    with pytest.raises(ConfigError, match=r"write \(0.0, 1.0\)"):
        Binary(levels)


def test_error_feedback_is_refused():
    with pytest.raises(ConfigError):
        ErrorFeedback(BITS).init(Spec.of({"x": torch.zeros(2)}))


def test_announced_counts_and_lengths_are_bounded():
    spec, peer = Spec.of({"x": torch.zeros(16)}), Peer(Key(0))
    for data in (b"\x11", b"\2\0", b"\2\3\0\0", b"\0\0", b""):
        with pytest.raises(WireError):
            BITS.decode(data, spec, peer)
