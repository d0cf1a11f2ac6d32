"""Does a space keep its contract?"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vmap

from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, add, same, scale, stack, sub, unstack
from thinwire.spaces.base import Space
from thinwire.testing.common import (
    KEY,
    SHAPES,
    check_close,
    check_part,
    check_spec,
    check_tree,
    nudge,
    random_tree,
    repeatable,
    unchanged,
)


def check_space(space: Space, weights: Tree | None = None, *, starts_at_base: bool = True) -> None:
    """Check that a space turns coordinates into weights as the rounds expect.

    The basis and the first coordinates are functions of the key; `expand` is pure, gives every weight its name, shape
    and type, has the gradient that finite differences show, and under vmap does what it does alone.

    Args:
        space: the part.
        weights: the weights of a model; by default a small one with a convolution, a norm, two matrices and a scalar.
        starts_at_base: whether the first coordinates make the base itself; a space that redraws its basis must.

    >>> from thinwire.spaces import Full
    >>> check_space(Full())
    """
    check_part(space)
    base = weights if weights is not None else random_tree(SHAPES, KEY.fold("weights"))
    spec = Spec.of(base)
    every = space.redraw_every
    assert type(every) is int, f"redraw_every must be a number of rounds, not {every!r}"
    assert every >= 0, f"redraw_every must be 0 (never) or a number of rounds, not {every!r}"
    with unchanged("check, basis and init", base):
        space.check(spec)
        basis = repeatable("basis", lambda: space.basis(spec, KEY.fold("frame"), "cpu"))
        coords = repeatable("init", lambda: space.init(base, basis, KEY.fold("init")))
    check_tree("init", coords)
    for name, block in coords.items():
        owner = name.split("/", 1)[0]
        assert name in base or owner in base or owner == "model", (
            f"coordinates {name!r} must be named after a weight, as 'weight/part', or after all, as 'model/part'"
        )
        assert block.is_floating_point(), (
            f"coordinates {name!r} are of type {block.dtype}; only real numbers are trained"
        )
    if space.redraw_every:
        assert starts_at_base, "a space that redraws its basis must start at the base: it merges and starts anew"
        other = space.basis(spec, KEY.fold("other basis"), "cpu")
        again = space.init(base, other, KEY.fold("init"))
        assert same(coords, again), "init of a space that redraws its basis must not depend on the numbers in it"

    with unchanged("expand", base, basis, coords):
        made = repeatable("expand", lambda: space.expand(base, basis, coords))
        used = space.evaluation_weights(base, basis, coords)
    check_spec("expand", made, spec)
    check_spec("evaluation_weights", used, spec)
    if starts_at_base:
        for name in base:
            assert torch.equal(made[name], base[name]), (
                f"expand(base, basis, init(...)) differs from the base in {name!r}"
            )
    if coords:
        _check_gradient(space, base, basis, coords)


def _check_gradient(space: Space, base: Tree, basis: Tree, coords: Tree) -> None:
    """Gradient against finite differences, and vmap against a loop."""
    look = random_tree({name: tuple(block.shape) for name, block in base.items()}, KEY.fold("look"))

    def value(point: Tree) -> Tensor:
        made = space.expand(base, basis, point)
        return torch.stack([(made[name].double() * look[name].double()).sum() for name in base]).sum()

    points = [nudge(coords, KEY.fold("point", i), 0.1) for i in range(3)]
    slopes = [grad(value)(point) for point in points]
    check_spec("the gradient of expand", slopes[0], Spec.of(coords))
    reach = 1e-2
    for i, (point, slope) in enumerate(zip(points, slopes, strict=True)):
        way = nudge(scale(coords, 0.0), KEY.fold("way", i), 1.0)
        rise = float(value(add(point, scale(way, reach))) - value(sub(point, scale(way, reach)))) / (2 * reach)
        parts = [(slope[name].double() * way[name].double()).flatten() for name in coords]
        size = math.sqrt(sum(float(part.square().sum()) for part in parts))
        said = float(torch.cat(parts).sum())
        assert abs(rise - said) <= 1e-2 * (size + abs(said)) + 1e-3, (
            f"the gradient of expand gives a slope of {said:.5g} where finite differences give {rise:.5g}"
        )
    together: Tree = vmap(grad(value))(stack(points))
    weights: Tree = vmap(partial(space.expand, base, basis))(stack(points))
    for i, point in enumerate(points):
        check_close("the gradient of expand under vmap", unstack(together, i), slopes[i])
        check_close("expand under vmap", unstack(weights, i), space.expand(base, basis, point))
