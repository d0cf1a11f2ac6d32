"""Shared by all checks: a part is a configuration, changes no argument in place, and is deterministic."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, same

T = TypeVar("T")

KEY = Key(2026)
SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 2, 3, 3),
    "norm.weight": (4,),
    "norm.bias": (4,),
    "fc.weight": (6, 4),
    "fc.bias": (6,),
    "head.weight": (3, 6),
    "scale": (),
}
COORDS: dict[str, tuple[int, ...]] = {"fc.weight/a": (2, 3), "fc.weight/b": (3, 2), "head.bias": (4,), "scale": ()}


def check_part(part: Any) -> None:
    """Check that a part is a frozen dataclass, equal by value, whose repr evaluates to an equal part."""
    kind = type(part)
    assert dataclasses.is_dataclass(kind), f"{kind.__name__} must be a dataclass"
    assert kind.__dataclass_params__.frozen, f"{kind.__name__} must be frozen: @dataclass(frozen=True)"  # type: ignore[attr-defined]
    twin = dataclasses.replace(part)
    assert twin == part, f"{kind.__name__} must be equal by value: two with the same settings differ"
    names: dict[str, Any] = {"__builtins__": {}, "inf": math.inf, "nan": math.nan}
    _collect_classes(part, names)
    try:
        again = eval(repr(part), names)
    except Exception as error:
        raise AssertionError(
            f"the repr of a part is its configuration, but {part!r} does not evaluate ({error}); "
            "define the class at the top of a module and do not hide fields from repr"
        ) from error
    assert again == part, f"the repr of a part is its configuration, but {part!r} evaluates to {again!r}"


def _collect_classes(value: Any, names: dict[str, Any]) -> None:
    """Collect the classes of a part and of all parts inside it, by name."""
    if dataclasses.is_dataclass(type(value)):
        names[type(value).__name__] = type(value)
        for field in dataclasses.fields(value):
            _collect_classes(getattr(value, field.name), names)
    elif isinstance(value, Mapping | tuple | list | frozenset):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _collect_classes(inner, names)


def pure(what: str, call: Callable[..., T], *args: Any) -> T:
    """Call a function twice and return its result.

    Check that the results are equal, that no argument has changed, and that nothing is drawn from torch's generator.
    """
    before, generator = copy.deepcopy(args), torch.get_rng_state()
    first, second = call(*args), call(*args)
    assert _equal(args, before), f"{what} must not change its arguments in place"
    assert torch.equal(torch.get_rng_state(), generator), (
        f"{what} must draw from the key, not from torch's global generator"
    )
    assert _equal(first, second), f"{what} returns another result the second time"
    return first


def _equal(a: Any, b: Any) -> bool:
    """Return whether values are equal; tensors in them, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same({"": a}, {"": b})
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def check_tree(what: str, tree: Any) -> None:
    """Check that a tree is a dictionary from names to tensors."""
    good = isinstance(tree, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tree.items())
    assert good, f"{what} must return a dictionary from names to tensors"


def check_spec(what: str, tree: Tree, expected: Spec) -> None:
    """Check that a tree has exactly these blocks, in this order."""
    check_tree(what, tree)
    got = [(block.name, block.shape, block.dtype) for block in Spec.of(tree)]
    wanted = [(block.name, block.shape, block.dtype) for block in expected]
    assert got == wanted, f"{what}: expected the blocks {wanted}, in this order, got {got}"


def check_close(what: str, got: Tree, wanted: Tree) -> None:
    """Check that the result under vmap is that of one client."""
    assert close(got, wanted), f"{what} differs from the result for one client"


def close(a: Tree, b: Tree) -> bool:
    """Return whether trees are equal up to rounding, relative to the largest value of a block."""
    return list(a) == list(b) and all(
        torch.allclose(a[name], block, rtol=1e-4, atol=1e-5 * max([1e-3, *block.abs().flatten().tolist()]))
        for name, block in b.items()
    )


def random_tree(shapes: Mapping[str, tuple[int, ...]], key: Key) -> Tree:
    """Return a tree of normal values."""
    return {name: key.fold(name).normal(*shape) for name, shape in shapes.items()}


def nudge(tree: Tree, key: Key, size: float) -> Tree:
    """Return the tree plus small random values."""
    return {name: block + size * key.fold(name).normal(*block.shape).to(block.dtype) for name, block in tree.items()}


def typed(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the block in another type, scaled so that integers are not all zero."""
    if dtype is torch.bool:
        return block > 0
    return (block * 10).abs().to(dtype) if dtype is torch.uint8 else (block * 10).to(dtype)
