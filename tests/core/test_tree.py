"""Tests of arithmetic on trees."""

import copy
import pickle

import pytest
import torch

from thinwire.core import parallel, tree as t
from thinwire.core.tree import Block, Spec, Vector, all_finite, same, stack, unstack, weighted_mean

A = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0, 6.0]), "s": torch.tensor(7.0)}
B = {"s": torch.tensor(1.0), "b": torch.tensor([1.0, 1.0]), "w": torch.eye(2)}


def spec(**shapes: tuple[int, ...]) -> Spec:
    return Spec(tuple(Block(name, shape) for name, shape in shapes.items()))


def test_the_first_tree_defines_blocks_and_order():
    out = t.add(A, B)
    assert list(out) == ["w", "b", "s"]
    assert out["w"].tolist() == [[2.0, 2.0], [3.0, 5.0]]
    assert t.same(t.sub(out, B), A)
    assert list(t.add(t.restrict(A, ["b"]), B)) == ["b"]


def test_scale_and_zeros_keep_shapes_and_dtypes():
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


def test_weighted_mean_normalizes_the_weights():
    out = t.weighted_mean([A, B], [3.0, 1.0])
    assert out["s"].item() == pytest.approx((3 * 7 + 1) / 4)
    assert t.same(t.weighted_mean([A], [17.0]), A)
    assert t.weighted_mean([{}, {}], [1.0, 1.0]) == {}


def test_weighted_mean_is_reproducible_bit_for_bit():
    trees = [{"w": torch.randn(100, generator=torch.Generator().manual_seed(i))} for i in range(7)]
    weights = [float(i + 1) for i in range(7)]
    assert t.same(t.weighted_mean(trees, weights), t.weighted_mean(trees, weights))


def test_all_finite_checks_all_blocks():
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
def test_same_compares_all_bits(other):
    tree = {"w": torch.tensor([0.0, float("nan")])}
    assert t.same(tree, {"w": tree["w"].clone()})
    assert not t.same(tree, other)


def test_same_compares_the_order_of_blocks():
    assert not t.same(A, dict(reversed(A.items())))


def test_to_device_returns_tensors_on_the_device_unchanged():
    assert t.to_device(A, "cpu")["w"] is A["w"]


def test_a_flat_tree_is_a_view_of_its_vector_and_immutable():
    whole = torch.arange(8.0)
    tree = Vector(whole, spec(a=(2,), b=(2, 3)))
    assert same(tree, {"a": whole[:2], "b": whole[2:].view(2, 3)})
    assert tree["a"].data_ptr() == whole.data_ptr()
    for change in (
        lambda: tree.update(a=whole),
        lambda: tree.pop("a"),
        lambda: tree.__setitem__("c", whole),
        lambda: tree.__delitem__("a"),
        lambda: tree.setdefault("c", whole),
        tree.clear,
    ):
        with pytest.raises(TypeError):
            change()
    assert type({**tree}) is type(t.add(tree, {**tree})) is type(copy.deepcopy(tree)) is dict
    assert same(copy.deepcopy(tree), tree)


def test_arithmetic_on_flat_trees_equals_arithmetic_on_blocks():
    torch.manual_seed(0)
    a, b = (Vector(torch.randn(8), spec(a=(2,), b=(2, 3))) for _ in range(2))
    for result, blocks in ((t.add(a, b), t.add({**a}, {**b})), (t.sub(a, b), t.sub({**a}, {**b}))):
        assert isinstance(result, Vector)
        assert same(result, blocks)
    assert same(t.scale(a, -0.3), t.scale({**a}, -0.3))
    assert t.flatten(a) is a.data
    other = Vector(torch.randn(8), spec(b=(2, 3), a=(2,)))
    assert same(t.add(a, other), t.add({**a}, {**other}))  # by name, not by position


def test_rows_split_into_the_trees_of_clients():
    torch.manual_seed(0)
    tree = {"a": torch.randn(3, 2), "b": torch.randn(3, 2, 2), "c": torch.randn(3), "none": torch.randn(3, 0)}
    rows = Vector.rows(tree, Spec.of(unstack(tree, 0)))
    for i in range(3):
        row = unstack(rows, i)
        assert same(row, unstack(tree, i))
        assert torch.equal(row.data, rows.data[i])
    other = {"a": torch.randn(3, 2), "n": torch.zeros(3, dtype=torch.int64)}
    assert Vector.rows(other, Spec.of(unstack(other, 0))) is other
    assert Vector.rows({}, Spec(())) == {}


def test_the_mean_of_flat_trees_has_the_same_bits():
    torch.manual_seed(0)
    plain = [{"a": torch.randn(5), "b": torch.randn(2, 3)} for _ in range(4)]
    rows = Vector.rows(stack(plain), Spec.of(plain[0]))
    flat = [unstack(rows, i) for i in range(4)]
    assert same(weighted_mean(flat, [1.0, 2.0, 3.0, 0.5]), weighted_mean(plain, [1.0, 2.0, 3.0, 0.5]))


def test_a_non_finite_value_is_found_in_a_flat_tree():
    whole = torch.zeros(6)
    tree = Vector(whole, spec(a=(2,), b=(4,)))
    assert all_finite(tree)
    whole[4] = torch.inf
    assert not all_finite(tree)
    whole[4] = 3e38
    whole[5] = 3e38
    assert all_finite(tree)  # although the sum overflows


def test_long_vectors_are_averaged_by_slices_to_the_same_bits(monkeypatch):
    vectors = [torch.randn(1000) for _ in range(5)]
    trees = [Vector(vector, spec(a=(990,), b=(10,))) for vector in vectors]
    whole = weighted_mean(trees, [1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(parallel, "SLICE", 64)
    assert same(weighted_mean(trees, [1.0, 2.0, 3.0, 4.0, 5.0]), whole)


def test_the_grand_total_is_finite_only_if_all_values_are():
    counts = {"n": torch.tensor([2, 3])}  # integers are always finite
    assert t.grand_total(A, counts).item() == 28.0
    assert t.grand_total(counts).item() == 0.0
    assert t.grand_total(A, {"x": torch.tensor([1.0, float("nan")])}).isnan()
    assert t.grand_total(A, {"x": torch.tensor([float("inf")])}).isinf()


def test_a_flat_tree_behaves_like_a_dictionary():
    def fresh():
        return Vector(torch.arange(6.0), spec(a=(2, 2), b=(2,)))

    tree = fresh()
    assert list(tree) == ["a", "b"]
    assert len(tree) == 2
    assert tree
    assert "a" in tree
    assert "c" not in tree
    assert all_finite(tree)
    assert weighted_mean([tree, fresh()], [1.0, 1.0]).data.tolist() == tree.data.tolist()
    assert "blocks" not in vars(tree), "no view was made"
    plain = {"a": torch.arange(4.0).reshape(2, 2), "b": torch.tensor([4.0, 5.0])}
    ways = {
        "dict": dict,
        "stars": lambda x: {**x},
        "items": lambda x: dict(x.items()),
        "zip": lambda x: dict(zip(x.keys(), x.values(), strict=True)),
        "getitem": lambda x: {name: x[name] for name in x},
        "get": lambda x: {name: x.get(name) for name in ("a", "b")},
        "copy": lambda x: x.copy(),
        "or": lambda x: x | {},
        "ror": lambda x: {} | x,
        "update": lambda x: [out := {}, out.update(x)][0],
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "restrict": lambda x: t.restrict(x, ["a", "b"]),
        "map": lambda x: t.tmap(torch.clone, x),
    }
    for name, way in ways.items():
        assert same(way(fresh()), plain), name
    assert fresh().get("c") is None
    assert repr(fresh()) == repr(plain)
    with pytest.raises(KeyError):
        fresh()["c"]
    with pytest.raises(TypeError, match="hash"):
        hash(fresh())
    one = Vector(torch.zeros(1), spec(a=(1,)))
    assert one == dict(one)
    assert one != {}
