"""Tests of the sparse codecs and of error feedback."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from thinwire.codecs import Chain, ErrorFeedback, Peer, Quantize, RandomK, Raw, Threshold, TopK
from thinwire.core.key import Key
from thinwire.core.selection import kept
from thinwire.core.tree import Spec, Vector, add, same, sub, zeros_like
from thinwire.errors import ConfigError, WireError

PEER = Peer(Key(1))
TREE = {"a": Key(2).normal(30, 10), "b": Key(3).normal(40) * 0.01, "c": Key(4).normal(3)}


def sent(codec, tree, peer=PEER):
    data, _ = codec.encode(tree, codec.init(Spec.of(tree)), peer)
    return codec.decode(data, Spec.of(tree), peer)


@pytest.mark.parametrize("codec", [TopK(1.0), TopK(1.0, "block"), RandomK(1.0), RandomK(1.0, unbiased=False)])
def test_density_one_equals_raw_bit_for_bit(codec):
    tree = {**TREE, "d": torch.tensor([0.0, -0.0, 1e-45])}
    assert same(sent(codec, tree), sent(Raw(), tree))
    data, _ = codec.encode(tree, {}, PEER)
    assert len(data) <= Spec.of(tree).nbytes + 1


@pytest.mark.parametrize("density", [0.01, 0.5])
def test_top_k_keeps_the_largest_values(density):
    back = torch.cat([b.flatten() for b in sent(TopK(density), TREE).values()])
    x = torch.cat([b.flatten() for b in TREE.values()])
    k = math.floor(density * len(x))
    order = x.abs().argsort(descending=True)
    assert torch.equal(back[order[:k]], x[order[:k]])
    assert not back[order[k:]].any()


def test_bytes_of_a_small_message_are_fixed():
    tree = {"x": torch.tensor([2.0, 0.0, -1.0, -2.0])}
    expected = bytes.fromhex("02 01 09 00000040 000000c0")  # two bytes of positions: a bitmap, 0b1001; two values
    assert TopK(0.5).encode(tree, {}, PEER)[0] == expected
    assert Threshold(1.5).encode(tree, {}, PEER)[0] == b"\2" + expected


def test_top_k_by_block_sends_values_of_each_block():
    back = sent(TopK(0.1, "block"), TREE)
    assert {name: int((block != 0).sum()) for name, block in back.items()} == {"a": 30, "b": 4, "c": 1}
    assert int((sent(TopK(0.1), TREE)["b"] != 0).sum()) == 0


def test_a_message_with_too_many_positions_in_a_block_is_refused():
    pair = {"a": torch.ones(10), "b": torch.zeros(10)}
    data, _ = TopK(0.2).encode(pair, {}, PEER)
    with pytest.raises(WireError, match="expected 2 positions in a block of 10"):
        TopK(0.2, "block").decode(data, Spec.of(pair), PEER)


def test_among_equal_values_the_first_are_sent():
    tree = {"w": torch.tensor([1.0, -2.0, 2.0, 2.0, 0.5, -2.0])}
    assert sent(TopK(0.5), tree)["w"].tolist() == [0.0, -2.0, 2.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("density", "n", "down", "up"),
    [
        (0.1, 10, 1, 1),
        (0.29, 100, 29, 29),
        (0.07, 100, 7, 7),
        (0.1, 19, 1, 2),
        (0.01, 5, 1, 1),
        (1.0, 7, 7, 7),
        (0.5, 0, 0, 0),
    ],
)
def test_rounding_of_k_can_be_chosen(density, n, down, up):
    assert (kept(density, n), kept(density, n, "up")) == (down, up)
    tree = {"x": Key(1).normal(n)}
    assert int(sent(TopK(density), tree)["x"].count_nonzero()) == down
    assert int(sent(TopK(density, rounding="up"), tree)["x"].count_nonzero()) == up


def test_presets_round_k_as_in_their_papers():
    from thinwire.runs.config import resolve

    sparse = resolve("sparse").method
    assert sparse.up.rounding == sparse.down.rounding == "up"  # s = ceil(density d)
    with pytest.raises(ConfigError, match="rounding must be one of down, up"):
        TopK(rounding="nearest")


def test_threshold_sends_values_of_at_least_that_magnitude():
    tree = {"w": torch.tensor([0.5, -0.49, 0.0, -3.0])}
    assert sent(Threshold(0.5), tree)["w"].tolist() == [0.5, 0.0, 0.0, -3.0]
    assert Threshold(10.0).encode(tree, {}, PEER)[0] == b"\0\0"


def test_random_positions_are_not_sent_and_differ_between_peers():
    codec, spec = RandomK(0.1, unbiased=False), Spec.of(TREE)
    data, _ = codec.encode(TREE, {}, PEER)
    assert len(data) == codec.size(spec) == 4 * 34
    one, other = sent(codec, TREE), sent(codec, TREE, Peer(Key(9)))
    assert not same(one, other)
    for name, block in one.items():
        assert torch.equal(block[block != 0], TREE[name][block != 0])


def test_shared_positions_are_the_same_for_all_clients():
    codec, tree = RandomK(0.1, unbiased=False, shared=True), {"x": Key(4).normal(1000)}
    one, two, later = (sent(codec, tree, Peer(Key(i), Key(j))) for i, j in ((1, 9), (2, 9), (1, 8)))
    assert same(one, two)
    assert not same(one, later)


def test_random_k_is_unbiased():
    x = {"w": torch.arange(1.0, 9.0)}
    mean = sum(sent(RandomK(0.25), x, Peer(Key(i)))["w"] for i in range(500)) / 500
    assert torch.allclose(mean, x["w"], rtol=0.2)


def test_top_k_values_can_be_quantized():
    plain, coarse = sent(TopK(0.2), TREE), sent(TopK(0.2, inner=Quantize(8)), TREE)
    for name in TREE:
        assert torch.allclose(plain[name], coarse[name], atol=0.02)
    big = {"w": Key(5).normal(100_000)}
    sizes = [len(TopK(0.1, inner=inner).encode(big, {}, PEER)[0]) for inner in (Raw(), Quantize(8), Quantize(4))]
    assert sizes[0] > 1.8 * sizes[1]
    assert sizes[1] > 1.2 * sizes[2]
    assert sizes[0] < 40_000 + 1.03 * 5870  # log2 C(100000, 10000) = 46,893 bits


@pytest.mark.parametrize(
    "inner",
    [TopK(0.1), TopK(0.1, inner=Quantize(4)), Quantize(scheme="sign"), RandomK(0.2, unbiased=False), Threshold(1.0)],
)
def test_sent_values_plus_error_equal_the_sum_of_updates(inner):
    codec, spec = ErrorFeedback(inner), Spec.of(TREE)
    state = codec.init(spec)
    decoded = true = zeros_like(TREE)
    for i in range(30):
        tree = {b.name: Key(i).fold(b.name).normal(*b.shape) for b in spec}
        peer = Peer(Key(i))
        data, state = codec.encode(tree, state, peer)
        decoded, true = add(decoded, codec.decode(data, spec, peer)), add(true, tree)
    for name in TREE:
        assert torch.allclose(decoded[name] + state[f"rest/{name}"], true[name], atol=2e-4)


@pytest.mark.parametrize(
    "inner", [TopK(0.1), Quantize(scheme="sign"), Quantize(scheme="sign", per="tree"), Quantize(4)], ids=repr
)
def test_error_feedback_state_stays_bounded(inner):
    """|e|^2 <= 4 (1 - q) / q^2 max |x|^2 if a message loses at most a fraction 1 - q (Karimireddy et al., lemma 3)."""
    codec, state, q, most = ErrorFeedback(inner), ErrorFeedback(inner).init(Spec.of(TREE)), 1.0, 0.0
    for i in range(60):
        tree = {name: Key(i).fold(name).normal(*block.shape) * (block.abs() > 0.3) for name, block in TREE.items()}
        wanted = add(tree, {name: state[f"rest/{name}"] for name in tree})
        _, state = codec.encode(tree, state, PEER)
        error = sum(float(block.square().sum()) for block in state.values())
        q = min(q, 1 - error / sum(float(block.square().sum()) for block in wanted.values()))
        most = max(most, sum(float(block.square().sum()) for block in tree.values()))
        assert q > 0  # the error is never larger than the input
        assert error <= 4 * (1 - q) / q**2 * most + 1e-6


def test_blocks_that_are_not_sent_keep_their_error():
    codec = ErrorFeedback(TopK(0.1))
    _, state = codec.encode(TREE, codec.init(Spec.of(TREE)), PEER)
    some = {"b": TREE["b"]}
    data, after = codec.encode(some, state, PEER)
    assert same({k: v for k, v in after.items() if k != "rest/b"}, {k: v for k, v in state.items() if k != "rest/b"})
    wanted = add({"b": state["rest/b"]}, some)
    assert same({"b": after["rest/b"]}, sub(wanted, codec.decode(data, Spec.of(some), PEER)))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([TopK, RandomK]),
    st.floats(0.001, 1.0),
    st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=30), max_size=4),
)
def test_any_tree_decodes_to_k_of_its_values(make, density, blocks):
    tree = {f"b{i}": torch.tensor(values, dtype=torch.float32) for i, values in enumerate(blocks)}
    back = sent(make(density) if make is TopK else make(density, unbiased=False), tree)
    assert Spec.of(back) == Spec.of(tree)
    for name, block in back.items():
        assert torch.equal(block[block != 0], tree[name][block != 0])
    assert sum(int((block != 0).sum()) for block in back.values()) <= kept(density, Spec.of(tree).size)


@pytest.mark.parametrize("codec", [TopK(0.1), TopK(0.1, inner=Quantize(8)), RandomK(0.1), Threshold(1.0)], ids=repr)
@pytest.mark.parametrize("flat", [False, True])
def test_many_long_blocks_give_the_bytes_of_one(codec, flat):
    tree = {str(i): Key(i).normal(40, 1000 + i) for i in range(3)}
    whole = torch.cat([block.reshape(-1) for block in tree.values()])
    given = Vector(whole, Spec.of(tree)) if flat else tree
    data, _ = codec.encode(given, {}, PEER)
    assert data == codec.encode({"w": whole}, {}, PEER)[0]
    assert same(codec.decode(data, Spec.of(tree), PEER), sent(codec, tree))


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, math.nan])
@pytest.mark.parametrize("make", [TopK, RandomK])
def test_an_invalid_density_is_refused(make, density):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        make(density)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_an_invalid_threshold_is_refused(value):
    with pytest.raises(ConfigError, match="0 or more"):
        Threshold(value)


def test_invalid_nesting_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"write it the other way round: ErrorFeedback\(TopK\(\.\.\.\)\)"):
        TopK(0.1, inner=ErrorFeedback())
    with pytest.raises(ConfigError, match="other way round"):
        RandomK(0.1, inner=Chain((ErrorFeedback(), Quantize())))
    with pytest.raises(ConfigError, match="unbiased = False"):
        ErrorFeedback(RandomK(0.1))
    with pytest.raises(ConfigError, match="by must be one of tree, block"):
        TopK(0.1, by="row")
