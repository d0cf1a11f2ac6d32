"""Shared by all checks: the trees they use, calls that are checked, and comparisons of results.

A part is called through `Calls`, which reports a method that is not pure or returns other blocks than expected, and
`check_vmap`, which compares many clients at once with each alone.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from thinwire.core.key import Key
from thinwire.core.tree import Tree, add, same, scale

KEY = Key(2026)
SHAPES = {  # of the weights of a small model
    "conv.weight": torch.zeros(4, 2, 3, 3),
    "norm.weight": torch.zeros(4),
    "norm.bias": torch.zeros(4),
    "fc.weight": torch.zeros(6, 4),
    "fc.bias": torch.zeros(6),
    "head.weight": torch.zeros(3, 6),
    "scale": torch.zeros(()),
}
COORDS = {  # of coordinates
    "fc.weight/a": torch.zeros(2, 3),
    "fc.weight/b": torch.zeros(3, 2),
    "head.bias": torch.zeros(4),
    "scale": torch.zeros(()),
}
SOME = ("fc.weight/b", "scale")  # the blocks of a round that synchronizes only some


def random_tree(like: Tree, *names: str | int) -> Tree:
    """Return a tree of normal values, other ones for other names."""
    key = KEY.fold("tree", *names)
    return {name: key.fold(name).normal(*block.shape).to(block.dtype) for name, block in like.items()}


def nudge(tree: Tree, *names: str | int) -> Tree:
    """Return the tree plus small random values."""
    return add(tree, scale(random_tree(tree, *names), 0.1))


class Calls:
    """A part whose methods are called twice.

    Creating it checks that the part is a frozen dataclass, equal by value, whose repr evaluates to an equal part.
    """

    def __init__(self, part: Any) -> None:
        kind = type(part)
        assert dataclasses.is_dataclass(kind), f"{kind.__name__} must be a dataclass"
        assert kind.__dataclass_params__.frozen, f"{kind.__name__} must be frozen: @dataclass(frozen=True)"  # type: ignore[attr-defined]
        twin = dataclasses.replace(part)
        assert twin == part, f"{kind.__name__} must be equal by value: two with the same settings differ"
        try:
            again = eval(repr(part), {"__builtins__": {}, "inf": math.inf, "nan": math.nan, **_classes(part)})
        except Exception as error:
            raise AssertionError(
                f"the repr of a part is its configuration, but {part!r} does not evaluate ({error}); "
                "define the class at the top of a module and do not hide fields from repr"
            ) from error
        assert again == part, f"the repr of a part is its configuration, but {part!r} evaluates to {again!r}"
        self.part = part

    def __call__(self, method: str, *args: Any, like: Any = None) -> Any:
        """Call a method twice and return its result.

        Check that the results are equal, that no argument has changed, that nothing is drawn from torch's generator,
        and that the result has the blocks of `like`, if given.
        """
        before, generator = copy.deepcopy(args), torch.get_rng_state()
        first, second = (getattr(self.part, method)(*args) for _ in range(2))
        assert equal(args, before), f"{method} must not change its arguments in place"
        assert torch.equal(torch.get_rng_state(), generator), (
            f"{method} must draw from the key, not from torch's global generator"
        )
        assert equal(first, second), f"{method} returns another result the second time"
        if like is not None:
            check_like(method, first, like)
        return first


def _classes(value: Any) -> dict[str, Any]:
    """The classes of a part and of all parts inside it, by name."""
    inside: Iterable[Any] = ()
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(type(value)):
        found[type(value).__name__] = type(value)
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping | tuple | list | frozenset):
        inside = value.values() if isinstance(value, Mapping) else value
    for one in inside:
        found |= _classes(one)
    return found


def check_tree(what: str, tree: Any) -> None:
    """Check that a value is a dictionary from names to tensors."""
    good = isinstance(tree, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tree.items())
    assert good, f"{what} must return a dictionary from names to tensors"


def check_like(what: str, got: Any, wanted: Any) -> None:
    """Check that a tree, or several, have exactly the blocks of others: names in order, shapes and types."""
    found, expected = (
        [f"{path} {getattr(leaf, 'dtype', type(leaf))} {[*getattr(leaf, 'shape', ())]}" for path, leaf in _leaves(one)]
        for one in (got, wanted)
    )
    assert found == expected, f"{what}: expected the blocks {expected}, in this order, got {found}"


def check_vmap(what: str, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> None:
    """Check that a function gives under vmap, for the arguments of several clients, what it gives for each alone."""
    together = _leaves(vmap(function)(*map(_stacked, zip(*cases, strict=True))))
    for i, case in enumerate(cases):
        alone = [leaf for _, leaf in _leaves(function(*case))]
        assert close([leaf[i] for _, leaf in together], alone), (
            f"{what} under vmap differs from the result for one client"
        )


def _stacked(values: Sequence[Any]) -> Any:
    """Stack the tensors of trees, or of trees of trees."""
    if isinstance(values[0], dict):
        return {name: _stacked([value[name] for value in values]) for name in values[0]}
    return torch.stack(list(values))


def _same_bits(a: Any, b: Any) -> bool:
    return same({"": a}, {"": b}) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _nearly(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * max([1e-3, *b.abs().flatten().tolist()]))


def equal(a: Any, b: Any, leaves: Callable[[Any, Any], bool] = _same_bits) -> bool:
    """Return whether values are equal; tensors in them, bit for bit."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    return list(left) == list(right) and all(leaves(leaf, right[path]) for path, leaf in left.items())


def close(a: Any, b: Any) -> bool:
    """Return whether trees are equal up to rounding, relative to the largest value of a block."""
    return equal(a, b, _nearly)


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The values in nested dictionaries, lists and tuples, each with the keys that lead to it."""
    if not isinstance(value, dict | list | tuple):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, inner in items for leaf in _leaves(inner, f"{path}[{key!r}]")]
