"""Tests of shared randomness: published vectors, random access, distributions, fixed values."""

import hashlib
import math

import numpy as np
import pytest
import torch
from scipy import stats

from thinwire.core.key import Key, SecretKey, _argsort, permutations, philox_numpy, philox_torch, signs_of_each

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ONES = 0xFFFFFFFF
# counter, key, output: the known-answer vectors that Random123 publishes for philox4x32-10
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_numpy_gives_the_published_vectors(counter, key, expected):
    assert tuple(philox_numpy(np.array([counter], np.uint64), *key)[0].tolist()) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_torch_gives_the_published_vectors(counter, key, expected, device):
    words = philox_torch(torch.tensor([counter], device=device), key)
    assert tuple(words[0].tolist()) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 1, 5, 4 * (1 << 32) - 6, (1 << 36) + 3])
def test_numpy_and_torch_give_the_same_words(start, device):
    key = Key(123).fold("words")
    expected = key.words_numpy(23, start).tolist()
    assert key.words(23, start, device).tolist() == expected
    assert key.words_torch(23, start, device).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("far", [0, 4 * (1 << 32) - 40, 1 << 37])
@pytest.mark.parametrize("draw", ["words", "uniform", "signs", "normal"])
def test_a_draw_with_start_is_a_slice_of_the_stream(draw, far, device):
    fn = getattr(Key(9).fold(draw), draw)
    whole = fn(200, start=far, device=device)
    for lo, hi in ((0, 7), (3, 40), (31, 33), (64, 200), (199, 200), (50, 50)):
        assert torch.equal(fn(hi - lo, start=far + lo, device=device), whole[lo:hi])


def test_streams_are_continuous_across_chunks():
    key, seam = Key(5), 4 * (1 << 15)
    whole = key.words_numpy(seam + 50)
    assert np.array_equal(whole[seam - 10 :], key.words_numpy(60, seam - 10))


def test_the_upper_half_of_the_counter_is_used():
    key = Key(1)
    assert key.words(4).tolist() != key.words(4, start=4 << 32).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_first_draws_of_a_key_are_fixed(device):
    key = Key(7).fold("golden", 3)
    assert key.value == 0x5E3F987445034896
    assert key.words(6, device=device).tolist() == [
        0x5E2A47F2, 0xF2708138, 0xA7EEF78A, 0x202467B9, 0x387F5539, 0x1F53F248,
    ]  # fmt: skip
    assert key.uniform(2, device=device).tolist() == [0.36783260107040405, 0.947029173374176]
    assert key.normal(3, device=device).tolist() == [0.19516807794570923, 1.84748113155365, 0.9882119297981262]
    assert key.signs(8, device=device).tolist() == [-1, 1, -1, -1, 1, 1, 1, 1]
    assert key.permutation(8).tolist() == [3, 2, 0, 7, 1, 5, 6, 4]
    assert key.choice(1000, 5) == [367, 947, 655, 125, 220]
    assert key.integers(6, 100, device=device).tolist() == [36, 94, 65, 12, 22, 12]


def test_normals_have_the_moments_of_a_gaussian():
    x = Key(11).normal(200_000).double().numpy()
    assert abs(x.mean()) < 4 / math.sqrt(len(x))
    assert abs(x.var() - 1) < 0.02
    assert abs(stats.skew(x)) < 0.03
    assert abs(stats.kurtosis(x) + 0.06) < 0.05
    assert np.abs(x).max() < 6
    assert stats.kstest(x[:100_000], "norm").pvalue > 1e-3


def test_uniforms_are_uniform_on_the_unit_interval():
    x = Key(12).uniform(100_000)
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    assert stats.kstest(x.double().numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(x * 2**24, (x * 2**24).round())


def test_signs_are_fair_and_uncorrelated():
    x = Key(13).signs(320_000)
    assert set(x.tolist()) == {-1.0, 1.0}
    assert abs(float(x.mean())) < 4 / math.sqrt(len(x))
    by_bit = x.view(-1, 32).mean(0)
    assert float(by_bit.abs().max()) < 5 / math.sqrt(10_000)
    assert abs(float((x[1:] * x[:-1]).mean())) < 4 / math.sqrt(len(x))


def test_draws_have_the_requested_shape():
    key = Key(0)
    assert key.normal(2, 3).shape == (2, 3)
    assert key.uniform().shape == ()
    assert key.signs(0, 4).shape == (0, 4)
    assert key.normal(0).dtype == torch.float32
    assert key.permutation(0).tolist() == []


def test_a_permutation_contains_each_index_once():
    for n in (1, 2, 17, 1000):
        assert sorted(Key(n).permutation(n).tolist()) == list(range(n))


def test_permutations_are_uniform():
    counts = np.zeros((5, 5))
    for i in range(3000):
        counts[np.arange(5), Key(3).fold(i).permutation(5).numpy()] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-4


@pytest.mark.parametrize(("n", "k"), [(10, 10), (10, 3), (10, 0), (0, 0), (10**9, 20), (300, 100), (7, 1)])
def test_chosen_indices_are_distinct_and_in_range(n, k):
    for i in range(20):
        chosen = Key(i).choice(n, k)
        assert len(chosen) == len(set(chosen)) == k
        assert all(0 <= c < n for c in chosen)


@pytest.mark.parametrize(("n", "k"), [(12, 3), (12, 8)])  # by rejection, by permutation
def test_choice_is_uniform(n, k):
    counts = np.zeros(n)
    for i in range(3000):
        counts[Key(4).fold(i).choice(n, k)] += 1
    assert stats.chisquare(counts).pvalue > 1e-4


def test_integers_are_uniform_and_below_their_bound():
    x = Key(5).integers(60_000, 6)
    assert stats.chisquare(np.bincount(x.numpy(), minlength=6)).pvalue > 1e-4
    assert int(Key(5).integers(1000, 1).max()) == 0
    assert 0 <= int(Key(5).integers(1000, 1 << 31).max()) < 1 << 31


def test_folds_depend_on_types_order_and_grouping_of_labels():
    key = Key(1)
    folds = [
        key,
        key.fold(),
        key.fold("a", "b"),
        key.fold("ab"),
        key.fold("b", "a"),
        key.fold("a").fold("b"),
        key.fold("1"),
        key.fold(1),
        key.fold(-1),
        key.fold(11),
        key.fold(1, 1),
        key.fold(1 << 70),
        Key(2).fold(1),
    ]
    assert len({k.value for k in folds}) == len(folds)


def test_streams_of_different_keys_are_uncorrelated():
    x, y = (Key(1).fold("client", i).normal(20_000) for i in (0, 1))
    assert abs(float((x * y).mean())) < 5 / math.sqrt(20_000)


def test_draws_do_not_change_the_generator_of_torch():
    before = torch.get_rng_state()
    Key(0).normal(10)
    Key(0).permutation(10)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_key_out_of_range_is_refused(value):
    with pytest.raises(OverflowError):
        Key(value).fold("x")


def test_invalid_draws_are_refused():
    with pytest.raises(ValueError, match="cannot choose 4 of 3"):
        Key(0).choice(3, 4)
    with pytest.raises(ValueError, match="below"):
        Key(0).integers(3, 0)
    with pytest.raises(ValueError, match="below"):
        Key(0).integers(3, (1 << 31) + 1)


@pytest.mark.parametrize("sizes", [[], [0], [1, 2, 3, 600, 17], [5] * 4, [33_000, 70_000]], ids=str)
def test_permutations_equal_those_of_single_keys(sizes):
    keys = [Key(i).fold("order") for i in range(len(sizes))]
    for key, n, order in zip(keys, sizes, permutations(keys, sizes), strict=True):
        assert order.tolist() == key.permutation(n).tolist()


@pytest.mark.parametrize(("n", "k"), [(10, 10), (10, 3), (10, 0), (0, 0), (10**9, 20), (300, 100), (7, 1)])
def test_a_choice_is_distinct_and_in_range(n, k):
    """Also where the first draws of a key hold too few distinct numbers."""
    for chosen in (Key(i).fold("cohort").choice(n, k) for i in range(200)):
        assert len(set(chosen)) == len(chosen) == k
        assert all(0 <= one < n for one in chosen)


def test_a_choice_of_too_many_is_refused():
    with pytest.raises(ValueError, match="cannot choose 4 of 3"):
        Key(1).choice(3, 4)


@pytest.mark.parametrize("n", [1, 32, 33, 4099])
def test_signs_of_many_keys_equal_those_of_single_keys(n):
    keys = [Key(i).fold("guard", i) for i in range(9)]
    found = signs_of_each(keys, n)
    assert found.dtype == torch.int8
    assert [row.tolist() for row in found] == [key.signs(n).tolist() for key in keys]


def test_argsort_is_stable_for_equal_values():
    words = np.array([[7 << 40, 7 << 40, 3, 1 << 62], [5, 4, 4, 5]])
    assert _argsort(words).tolist() == np.argsort(words, kind="stable").tolist()


def test_a_secret_key_is_a_key_of_256_bits():
    """Its words are those of SHAKE-256; all other draws derive from them."""
    key = SecretKey(1 << 255)
    words = np.frombuffer(hashlib.shake_256(key.value.to_bytes(32, "little")).digest(40), "<u4")
    assert np.array_equal(key.words_numpy(10), words)
    assert np.array_equal(key.words_numpy(4, start=3), words[3:7])
    assert key.words(4).tolist() == key.words_torch(4).tolist() == words[:4].tolist()
    assert key.normal(2).tolist() != key.fold("a").normal(2).tolist()
    folded = [key.fold(*parts).value for parts in (("a",), ("b",), ("a", "b"), ("ab",), (1,), ("1",))]
    assert len(set(folded)) == 6
    assert max(folded) >> 192  # all bits are used
    assert SecretKey.draw() != SecretKey.draw()
    with pytest.raises(OverflowError):
        SecretKey(1 << 256).words_numpy(1)
