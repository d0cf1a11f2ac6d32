"""Tests of the signs of narrow matrices, guessed from the rows before."""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests import wire_reader as reader
from thinwire.codecs import Peer, Quantize, Raw, Threshold, TopK, sparse
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import WireError
from thinwire.wire import row_signs
from thinwire.wire.bits import pack, read_varint, varint
from thinwire.wire.entropy import squeeze

PEER = Peer(Key(0))


def drawn(shapes, noise=0.5, seed=0):
    """Signs of products of two vectors with noise."""
    rng = np.random.default_rng(seed)
    parts = [np.outer(rng.normal(size=r), rng.normal(size=c)) + noise * rng.normal(size=(r, c)) for r, c in shapes]
    return np.concatenate([part.reshape(-1) for part in parts]) < 0


def chosen(shapes, density, seed=0):
    return np.random.default_rng([seed, 1]).random(sum(r * c for r, c in shapes)) < density


def check_round_trip(negative, sent, shapes):
    data = row_signs.encode(negative, sent, shapes)
    assert np.array_equal(row_signs.decode(data, sent, shapes), negative & sent)
    return data


# -- round trips -------------------------------------------------------------------------------------------------------


sides = st.one_of(
    st.tuples(st.integers(2, 20), st.integers(32, 160)),
    st.tuples(st.integers(32, 160), st.integers(2, 20)),
    st.tuples(st.integers(0, 70), st.integers(1, 70)),
)


@given(
    st.lists(sides, max_size=5), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([0.0, 1.0, 9.0]), st.booleans()
)
def test_signs_of_all_shapes_round_trip(shapes, density, noise, twice):
    shapes = shapes * 2 if twice else shapes
    if shapes:
        negative, sent = drawn(shapes, noise), chosen(shapes, density)
        before = negative.copy(), sent.copy()
        check_round_trip(negative, sent, shapes)
        assert np.array_equal(before, (negative, sent))


@pytest.mark.parametrize("sign", [False, True])
def test_one_sign_alone_takes_few_bytes(sign):
    shapes = [(16, 576)] * 4
    sent = chosen(shapes, 0.5)
    data = check_round_trip(np.full(len(sent), sign), sent, shapes)
    assert len(data) < 0.25 * np.count_nonzero(sent) / 8  # those before the first guesses are wrong if all are negative


def test_correlated_rows_take_fewer_bytes_and_independent_signs_hardly_more_than_a_bit():
    shapes = [(16, 576)] * 10
    sent = chosen(shapes, 0.25)
    bits = np.count_nonzero(sent) / 8
    assert len(row_signs.encode(drawn(shapes, 0.3), sent, shapes)) < 0.93 * bits
    assert len(row_signs.encode(drawn(shapes, 1e9), sent, shapes)) < 1.001 * bits + 12 * 5


def test_only_matrices_that_are_mostly_narrow_pay():
    assert row_signs.pays([(16, 576), (1, 100)])
    assert row_signs.pays([(576, 16), (96, 96)])
    assert not row_signs.pays([(16, 576), (97, 96)])
    assert not row_signs.pays([(16, 31), (65, 65), (1, 5000), (2, (1 << 20) + 1)])
    assert not row_signs.pays([])


# -- the format --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "density", "noise"),
    [
        ([(18, 140), (1, 9), (140, 18), (3, 5), (0, 3), (2, 33)], 0.5, 0.5),
        ([(40, 32), (70, 70), (32, 40)], 1.0, 0.0),
        ([(3, 700), (700, 3), (3, 700)], 0.3, 2.0),
        ([(4, 2100)], 1.0, 0.0),
        ([(64, 64)], 0.8, 1.0),
    ],
)
def test_the_independent_reader_reads_the_same_signs(shapes, density, noise):
    negative, sent = drawn(shapes, noise), chosen(shapes, density)
    at = np.flatnonzero(sent)
    data = row_signs.encode(negative, sent, shapes)
    assert reader.read_signs(data, at.tolist(), shapes) == negative[at].tolist()


# -- damaged bytes -----------------------------------------------------------------------------------------------------


def parts_of(data):
    """Numbers of signs, and codes, of all groups."""
    at, heads, codes = 0, [], []
    for _ in range(12):
        n, at = read_varint(data, at)
        length, at = read_varint(data, at)
        heads.append((n, length))
    for _, length in heads:
        codes.append(data[at : at + length])
        at += length
    return [n for n, _ in heads], codes


def joined(counts, codes):
    return b"".join([varint(n) + varint(len(code)) for n, code in zip(counts, codes, strict=True)] + codes)


SHAPES = [(16, 300), (300, 16), (1, 40)]


@pytest.fixture(scope="module")
def signs():
    sent = chosen(SHAPES, 0.4)
    data = row_signs.encode(drawn(SHAPES, 0.3), sent, SHAPES)
    assert joined(*parts_of(data)) == data
    return data, sent


def test_numbers_of_signs_that_do_not_add_up_are_refused(signs):
    data, sent = signs
    counts, codes = parts_of(data)
    for change in (1, -1, 1 << 30):
        other = [counts[0] + change if counts[0] + change >= 0 else 0, *counts[1:]]
        with pytest.raises(WireError, match="not those of"):
            row_signs.decode(joined(other, codes), sent, SHAPES)
    with pytest.raises(WireError, match="not those of"):
        row_signs.decode(data + b"\0", sent, SHAPES)
    with pytest.raises(WireError, match="not those of"):
        row_signs.decode(data[:-1], sent, SHAPES)


def test_a_group_with_more_signs_than_announced_is_refused(signs):
    data, sent = signs
    counts, _ = parts_of(data)
    largest = int(np.argmax(counts))
    moved = counts.copy()
    moved[largest] -= 9
    moved[(largest + 1) % 12] += 9
    codes = [squeeze(pack(np.zeros(n, np.uint8), 1)) for n in moved]
    with pytest.raises(WireError, match="more than the announced"):
        row_signs.decode(joined(moved, codes), sent, SHAPES)


def test_damaged_signs_are_refused_or_read_within_their_size(signs):
    data, sent = signs
    rng, refused = np.random.default_rng(2), 0
    wrong = [data[:i] for i in range(0, len(data), 40)] + [b"", b"\xff" * 200, b"\0" * 24, data * 2]
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            bad[rng.integers(0, min(len(bad), rng.choice([24, 60, 2000])))] = rng.integers(256)
        wrong.append(bytes(bad))
    for bad in wrong:
        try:
            found = row_signs.decode(bad, sent, SHAPES)
        except WireError:
            refused += 1
            continue
        assert found.dtype == bool
        assert found.shape == sent.shape
        assert not (found & ~sent).any()
    assert refused > 300


def test_announced_numbers_take_no_memory_and_no_time(signs):
    _, sent = signs
    bomb = squeeze(bytes(50_000_000))
    heads = [varint((1 << 35) - 1) + varint(len(bomb))] + [varint(0) + varint(0)] * 11
    true = [varint(int(sent.sum())) + varint(len(bomb))] + [varint(0) + varint(0)] * 11
    for data in (b"".join([*heads, bomb]), b"".join([*true, bomb])):
        tracemalloc.start()
        start = time.process_time()
        with pytest.raises(WireError):
            row_signs.decode(data, sent, SHAPES)
        assert time.process_time() - start < 0.5
        assert tracemalloc.get_traced_memory()[1] < 300_000
        tracemalloc.stop()


# -- codecs ------------------------------------------------------------------------------------------------------------


def adapters(dtype=torch.float32, rank=16):
    """Updates of low-rank factors, each nearly one product of two vectors, and a bias."""
    key, tree = Key(5), {}
    for i, (r, c) in enumerate([(rank, 300), (300, rank), (rank, 300), (120, rank)]):
        row, column = key.fold("row", i).normal(r, 1), key.fold("column", i).normal(1, c)
        tree[f"b{i}"] = (row * column + key.fold("noise", i).normal(r, c) / 4).to(dtype)
    return tree | {"bias": key.normal(30).to(dtype)}


def positions_of(data, start=0):
    """The bytes of the positions."""
    length, start = read_varint(data, start)
    return data[start : start + length]


def both(monkeypatch, codec, tree):
    """Messages without and with guessed signs."""
    spec = Spec.of(tree)
    with monkeypatch.context() as patch:
        patch.setattr(sparse, "_MANY", 1 << 40)
        plain = bytes(codec.encode(tree, {}, PEER)[0])
        decoded = codec.decode(plain, spec, PEER)
    return plain, decoded, bytes(codec.encode(tree, {}, PEER)[0])


def bits_of(tree):
    return {name: block.contiguous().view(torch.uint8).tolist() for name, block in tree.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "codec",
    [
        TopK(0.35, inner=Quantize(4)),
        TopK(0.35, inner=Quantize(4, block=65_536)),
        TopK(0.7, inner=Quantize(8)),
        TopK(0.5, "block", inner=Quantize(3)),
        TopK(0.5, "chunk", inner=Quantize(12, per="tree")),
    ],
    ids=str,
)
def test_guessed_signs_decode_to_the_same_bits_with_fewer_bytes(monkeypatch, codec, dtype):
    tree = adapters(dtype)
    plain, decoded, short = both(monkeypatch, codec, tree)
    assert positions_of(plain)[0] != 4
    assert positions_of(short)[0] == 4
    assert len(short) < 0.97 * len(plain)
    again = codec.decode(short, Spec.of(tree), PEER)
    assert bits_of(again) == bits_of(decoded)
    # messages of the earlier format are still read
    assert bits_of(codec.decode(plain, Spec.of(tree), PEER)) == bits_of(decoded)


def test_threshold_guesses_signs_too(monkeypatch):
    tree, codec = adapters(), Threshold(1.0, Quantize(4))
    plain, decoded, short = both(monkeypatch, codec, tree)
    assert len(short) < len(plain)
    assert bits_of(codec.decode(short, Spec.of(tree), PEER)) == bits_of(decoded)


@pytest.mark.parametrize(
    ("codec", "tree"),
    [
        (TopK(0.2, inner=Quantize(4)), adapters()),  # fewer than 4096 values
        (TopK(1.0, inner=Quantize(4)), adapters()),  # no positions
        (TopK(0.5), adapters()),
        (TopK(0.5, inner=Quantize(4, stochastic=True)), adapters()),
        (TopK(0.5, inner=Quantize(4, "qsgd")), adapters()),
        (TopK(0.5, inner=Quantize(8, "uniform")), adapters()),
        (TopK(0.5, inner=Quantize(scheme="sign")), adapters()),
        (TopK(0.5, inner=Quantize(4)), {"w": Key(1).normal(16, 900)}),  # independent signs
        (TopK(0.5, inner=Quantize(4)), {"w": Key(1).normal(120, 1) * Key(2).normal(1, 120)}),  # not narrow
    ],
    ids=str,
)
def test_other_messages_are_as_before(monkeypatch, codec, tree):
    plain, _, now = both(monkeypatch, codec, tree)
    assert now == plain


@pytest.mark.parametrize("codec", [TopK(0.5, inner=Quantize(4, per="tree")), TopK(0.9, inner=Quantize(2))], ids=str)
def test_signs_are_not_guessed_where_most_levels_are_zero(monkeypatch, codec):
    tree = adapters()
    tree["b0"][3, 7] = 1000.0  # a scale at which nearly all levels are 0, and have no sign
    plain, _, now = both(monkeypatch, codec, tree)
    assert now == plain


def test_the_independent_reader_reads_guessed_signs():
    tree, codec = adapters(), TopK(0.4, inner=Quantize(4))
    data = bytes(codec.encode(tree, {}, PEER)[0])
    assert positions_of(data)[0] == 4
    blocks = [(name, tuple(block.shape), "f4") for name, block in tree.items()]
    settings = {"kind": "topk", "density": 0.4, "inner": {"kind": "quantize", "bits": 4}}
    found = reader.read_codec(settings, data, blocks, (0, 0))
    decoded = codec.decode(data, Spec.of(tree), PEER)
    assert found == {name: block.reshape(-1).tolist() for name, block in decoded.items()}


def test_signs_of_few_values_are_refused():
    tree, codec = {"w": adapters()["b0"]}, TopK(0.5, inner=Quantize(4))  # 2,400 values
    data = bytes(codec.encode(tree, {}, PEER)[0])
    where = positions_of(data)
    forged = b"\4" + varint(24) + bytes(24) + where
    with pytest.raises(WireError, match="of 2400 values"):
        codec.decode(varint(len(forged)) + forged + data[len(varint(len(where))) + len(where) :], Spec.of(tree), PEER)


def changed(data, make):
    """A message with other positions."""
    where = positions_of(data)
    rest, other = data[len(varint(len(where))) + len(where) :], make(where)
    return varint(len(other)) + other + rest


def test_damaged_signs_of_a_message_are_refused():
    tree, codec = adapters(), TopK(0.5, inner=Quantize(4))
    data, spec = bytes(codec.encode(tree, {}, PEER)[0]), Spec.of(tree)
    assert changed(data, bytes) == data
    length, start = read_varint(positions_of(data), 1)
    for make in (
        lambda where: where[:1],  # no length
        lambda where: b"\4" + varint(len(where)) + where[start:],  # longer than what is left
        lambda where: b"\4" + varint(length - 1) + where[start:],
        lambda where: b"\4" + varint(0) + where[start + length :],
        lambda where: where[: start + length],  # no positions
        lambda where: where[: start + length] + where,  # signs twice
        lambda where: where[: start + length] + b"\5" + where[start + length + 1 :],
    ):
        with pytest.raises(WireError):
            codec.decode(changed(data, make), spec, PEER)


def test_signs_are_refused_where_the_inner_codec_has_them():
    tree, spec = adapters(), Spec.of(adapters())
    signs = positions_of(bytes(TopK(0.5, inner=Quantize(4)).encode(tree, {}, PEER)[0]))
    for inner in (Raw(), Quantize(4, stochastic=True)):
        codec = TopK(0.5, inner=inner)
        data = changed(bytes(codec.encode(tree, {}, PEER)[0]), lambda _: signs)
        with pytest.raises(WireError, match="never sent apart"):
            codec.decode(data, spec, PEER)
