"""Arithmetic on trees."""

import pytest
import torch

from thinwire.core import tree as t

A = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0, 6.0]), "s": torch.tensor(7.0)}
B = {"s": torch.tensor(1.0), "b": torch.tensor([1.0, 1.0]), "w": torch.eye(2)}


def test_the_first_tree_says_which_blocks_and_in_which_order():
    out = t.add(A, B)
    assert list(out) == ["w", "b", "s"]
    assert out["w"].tolist() == [[2.0, 2.0], [3.0, 5.0]]
    assert t.same(t.sub(out, B), A)
    assert list(t.add(t.restrict(A, ["b"]), B)) == ["b"]


def test_scale_and_zeros_keep_shapes_and_types():
    half = {"w": torch.ones(2, dtype=torch.float16)}
    assert t.scale(half, 0.5)["w"].dtype == torch.float16
    assert t.same(t.zeros_like(A), t.scale(A, 0.0))


def test_restrict_keeps_the_order_of_the_tree():
    assert list(t.restrict(A, ["s", "w", "missing"])) == ["w", "s"]
    assert t.restrict(A, []) == {}


def test_unstack_undoes_stack():
    trees = [A, t.scale(A, 2.0), t.scale(A, -1.0)]
    stacked = t.stack(trees)
    assert stacked["s"].shape == (3,)
    assert all(t.same(t.unstack(stacked, i), tree) for i, tree in enumerate(trees))


def test_repeat_makes_views():
    many = t.repeat(A, 1000)
    assert many["w"].shape == (1000, 2, 2)
    assert many["w"].data_ptr() == A["w"].data_ptr()


def test_unflatten_undoes_flatten():
    vector = t.flatten(A)
    assert vector.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert t.same(t.unflatten(vector, A), A)
    both = t.unflatten(torch.stack([vector, 2 * vector]), A)
    assert t.same(t.unstack(both, 1), t.scale(A, 2.0))
    assert t.flatten({}).shape == (0,)


def test_weighted_mean_normalises_the_weights():
    out = t.weighted_mean([A, B], [3.0, 1.0])
    assert out["s"].item() == pytest.approx((3 * 7 + 1) / 4)
    assert t.same(t.weighted_mean([A], [17.0]), A)
    assert t.weighted_mean([{}, {}], [1.0, 1.0]) == {}


def test_weighted_mean_is_the_same_bits_every_time():
    trees = [{"w": torch.randn(100, generator=torch.Generator().manual_seed(i))} for i in range(7)]
    weights = [float(i + 1) for i in range(7)]
    assert t.same(t.weighted_mean(trees, weights), t.weighted_mean(trees, weights))


def test_finiteness_looks_at_every_block():
    assert t.all_finite({**A, "n": torch.tensor([1, 2])})
    assert t.all_finite({})
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not t.all_finite({**A, "z": torch.tensor([0.0, bad])})


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([-0.0, float("nan")])},
        {"w": torch.tensor([0.0, 1.0])},
        {"w": torch.tensor([0.0, float("nan")], dtype=torch.float64)},
        {"w": torch.tensor([[0.0, float("nan")]])},
        {"v": torch.tensor([0.0, float("nan")])},
        {},
    ],
)
def test_same_means_every_bit(other):
    tree = {"w": torch.tensor([0.0, float("nan")])}
    assert t.same(tree, {"w": tree["w"].clone()})
    assert not t.same(tree, other)


def test_same_minds_the_order_of_blocks():
    assert not t.same(A, dict(reversed(A.items())))


def test_to_device_leaves_tensors_that_are_there():
    assert t.to_device(A, "cpu")["w"] is A["w"]
