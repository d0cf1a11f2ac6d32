"""Conformance check of spaces."""

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
    nudge,
    pure,
    random_tree,
)


def check_space(space: Space, weights: Tree | None = None, *, starts_at_base: bool = True) -> None:
    """Check that a space maps coordinates to weights as its contract demands.

    The basis and the initial coordinates are functions of the key. `expand` is pure, returns every weight with its
    name, shape and type, has the gradient that finite differences show, and gives the same result under vmap.

    Args:
        space: the part.
        weights: the weights of a model; by default of a small one with a convolution, a norm, two matrices and a
            scalar.
        starts_at_base: whether the initial coordinates make the base; required of a space that redraws its basis.

    >>> from thinwire.spaces import Full
    >>> check_space(Full())
    """
    check_part(space)
    base = weights if weights is not None else random_tree(SHAPES, KEY.fold("weights"))
    spec = Spec.of(base)
    every = space.redraw_every
    assert type(every) is int, f"redraw_every must be a number of rounds, not {every!r}"
    assert every >= 0, f"redraw_every must be 0 (never) or a number of rounds, not {every!r}"
    space.check(spec)
    basis = pure("basis", space.basis_from, base, KEY.fold("basis"), "cpu")
    coords = pure("init", space.init, base, basis, KEY.fold("init"))
    for name, block in coords.items():
        owner = name.split("/", 1)[0]
        assert name in base or owner in base or owner == "model", (
            f"coordinates {name!r} must be named after a weight ('weight/part') or after the model ('model/part')"
        )
        assert block.is_floating_point(), (
            f"coordinates {name!r} are of type {block.dtype}; only floating-point coordinates can be trained"
        )
    if space.redraw_every:
        assert starts_at_base, (
            "the initial coordinates of a space that redraws its basis must make the base, because it merges"
        )
        other = space.basis_from(base, KEY.fold("other basis"), "cpu")
        again = space.init(base, other, KEY.fold("init"))
        assert same(coords, again), "init of a space that redraws its basis must not depend on the values in it"

    made = pure("expand", space.expand, base, basis, coords)
    used = pure("evaluation_weights", space.evaluation_weights, base, basis, coords)
    check_spec("expand", made, spec)
    check_spec("evaluation_weights", used, spec)
    if starts_at_base:
        for name in base:
            assert torch.equal(made[name], base[name]), (
                f"expand(base, basis, init(...)) differs from the base in {name!r}"
            )
    if coords:
        _check_gradient(space, base, basis, coords)
    if space.additive:
        one, two = (nudge(coords, KEY.fold("move", i), 0.1) for i in range(2))
        apart = space.expand(space.expand(base, basis, one), basis, two)
        check_close("expand of one move after the other", apart, space.expand(base, basis, add(one, two)))


def _check_gradient(space: Space, base: Tree, basis: Tree, coords: Tree) -> None:
    """Compare the gradient with finite differences, and vmap with single calls."""
    directions = random_tree({name: tuple(block.shape) for name, block in base.items()}, KEY.fold("look"))

    def value(point: Tree) -> Tensor:
        made = space.expand(base, basis, point)
        return torch.stack([(made[name].double() * directions[name].double()).sum() for name in base]).sum()

    points = [nudge(coords, KEY.fold("point", i), 0.1) for i in range(3)]
    slopes = [grad(value)(point) for point in points]
    check_spec("the gradient of expand", slopes[0], Spec.of(coords))
    step = 1e-2
    for i, (point, slope) in enumerate(zip(points, slopes, strict=True)):
        direction = nudge(scale(coords, 0.0), KEY.fold("way", i), 1.0)
        way = scale(direction, step)
        difference = float(value(add(point, way)) - value(sub(point, way))) / (2 * step)
        parts = [(slope[name].double() * direction[name].double()).flatten() for name in coords]
        size = math.sqrt(sum(float(part.square().sum()) for part in parts))
        slope_along = float(torch.cat(parts).sum())
        assert abs(difference - slope_along) <= 1e-2 * (size + abs(slope_along)) + 1e-3, (
            f"the gradient of expand gives a slope of {slope_along:.5g} where finite differences give {difference:.5g}"
        )
    stacked: Tree = vmap(grad(value))(stack(points))
    weights: Tree = vmap(partial(space.expand, base, basis))(stack(points))
    for i, point in enumerate(points):
        check_close("the gradient of expand under vmap", unstack(stacked, i), slopes[i])
        check_close("expand under vmap", unstack(weights, i), space.expand(base, basis, point))
