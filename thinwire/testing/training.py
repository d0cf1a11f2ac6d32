"""Conformance checks of spaces, optimizers, learning-rate schedules and corrections: what local training calls."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from thinwire.core.tree import ALL_BLOCKS, Spec, Tree, add, flatten, restrict, restrict_state, same, scale, sub
from thinwire.optimizers.base import Correction, Optimizer, clip_by_global_norm
from thinwire.optimizers.lr_schedules import LRSchedule
from thinwire.spaces.base import Space
from thinwire.testing.common import (
    COORDS,
    KEY,
    SHAPES,
    SOME,
    Calls,
    check_like,
    check_tree,
    check_vmap,
    close,
    equal,
    nudge,
    random_tree,
)

CLIENTS = 3


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
    call = Calls(space)
    base = weights if weights is not None else random_tree(SHAPES, "weights")
    every = space.redraw_every
    assert type(every) is int, f"redraw_every must be a number of rounds, not {every!r}"
    assert every >= 0, f"redraw_every must be 0 (never) or a number of rounds, not {every!r}"
    space.check(Spec.of(base))
    basis = call("basis_from", base, KEY.fold("basis"), "cpu")
    coords = call("init", base, basis, KEY.fold("init"))
    for name, block in coords.items():
        assert {name, name.split("/")[0]} & {*base, "model"}, (
            f"coordinates {name!r} must be named after a weight ('weight/part') or after the model ('model/part')"
        )
        assert block.is_floating_point(), (
            f"coordinates {name!r} are of type {block.dtype}; only floating-point coordinates can be trained"
        )
    if every:
        assert starts_at_base, (
            "the initial coordinates of a space that redraws its basis must make the base, because it merges"
        )
        other = space.basis_from(base, KEY.fold("other basis"), "cpu")
        again = space.init(base, other, KEY.fold("init"))
        assert same(coords, again), "init of a space that redraws its basis must not depend on the values in it"

    made = call("expand", base, basis, coords, like=base)
    call("evaluation_weights", base, basis, coords, like=base)
    for name in base:
        assert not starts_at_base or torch.equal(made[name], base[name]), (
            f"expand(base, basis, init(...)) differs from the base in {name!r}"
        )
    if coords:
        _check_gradient(space, base, basis, coords)
    if space.additive:
        one, two = (nudge(coords, "move", i) for i in range(2))
        apart = space.expand(space.expand(base, basis, one), basis, two)
        assert close(apart, space.expand(base, basis, add(one, two))), (
            "additive is true, but expand of one move after the other differs from expand of their sum"
        )


def _check_gradient(space: Space, base: Tree, basis: Tree, coords: Tree) -> None:
    """Compare the gradient with finite differences, and vmap with single calls."""
    expand = partial(space.expand, base, basis)
    look = flatten(random_tree(base, "look"), torch.float64)

    def value(point: Tree) -> Tensor:
        return (flatten(expand(point), torch.float64) * look).sum()

    points = [nudge(coords, "point", i) for i in range(CLIENTS)]
    step = 1e-2
    for i, point in enumerate(points):
        slope = grad(value)(point)
        check_like("the gradient of expand", slope, coords)
        direction = random_tree(coords, "way", i)
        way = scale(direction, step)
        difference = float(value(add(point, way)) - value(sub(point, way))) / (2 * step)
        terms = flatten(slope, torch.float64) * flatten(direction, torch.float64)
        along = float(terms.sum())
        assert abs(difference - along) <= 1e-2 * (float(terms.norm()) + abs(along)) + 1e-3, (
            f"the gradient of expand gives a slope of {along:.5g} where finite differences give {difference:.5g}"
        )
    check_vmap("the gradient of expand", grad(value), [(point,) for point in points])
    check_vmap("expand", expand, [(point,) for point in points])


def _clients(what: str) -> list[Tree]:
    """Return random coordinates of each client."""
    return [random_tree(COORDS, what, i) for i in range(CLIENTS)]


def check_optimizer(opt: Optimizer) -> None:
    """Check that an optimizer is a pure function, for one client, for many under vmap, and for some of the blocks.

    Its state is nested: slot -> block -> tensor (`state["momentum"]["fc.weight"]`). A value that belongs to no single
    block has the key `ALL_BLOCKS`. With a setting `clip_norm`, a step is the one of the clipped gradient.

    >>> from thinwire.optimizers import SGD
    >>> check_optimizer(SGD(0.1, momentum=0.9, nesterov=True))
    """
    call = Calls(opt)
    assert opt.lr > 0, f"lr must be above 0, not {opt.lr}"
    assert opt.clip_norm > 0, f"clip_norm must be above 0, not {opt.clip_norm}"
    coords = _clients("coords")
    state = call("init", coords[0])
    assert isinstance(state, dict), f"init must return a dictionary from slots to trees, not {type(state).__name__}"
    for slot, tree in state.items():
        check_tree(f"state[{slot!r}]", tree)
        assert tree.keys() <= {*COORDS, ALL_BLOCKS}, (
            f"state[{slot!r}] has the keys {list(tree)}: each must be the name of a block, or ALL_BLOCKS "
            f"({ALL_BLOCKS!r})"
        )
    states = [state] * CLIENTS
    for step in range(3):
        cases = list(zip(_clients(f"gradients {step}"), states, coords, strict=True))
        check_vmap("update", opt.update, cases)
        made = [call("update", *case, like=case[:2]) for case in cases]
        coords = [add(before, change) for before, (change, _) in zip(coords, made, strict=True)]
        states = [after for _, after in made]
    grads = cases[0][0]
    some = restrict(grads, SOME), restrict_state(states[0], SOME)
    call("update", *some, restrict(coords[0], SOME), like=some)
    if any(field.name == "clip_norm" for field in fields(opt)):  # type: ignore[arg-type]
        _check_clipping(opt, grads, coords[0])


def _check_clipping(opt: Optimizer, grads: Tree, coords: Tree) -> None:
    """Check that the gradient is clipped before all else, whether long, short, 0 or not a number."""
    limit = float(flatten(grads).norm()) / 4
    free, clipped = (replace(opt, clip_norm=norm) for norm in (math.inf, limit))  # type: ignore[type-var]
    state = opt.init(coords)
    for factor in (1.0, 0.125, 0.0, math.nan, math.inf):
        given = scale(grads, factor)
        wanted = free.update(clip_by_global_norm(given, limit), state, coords)
        assert equal(clipped.update(given, state, coords), wanted), (
            f"with clip_norm = {limit:.3g} the step or the state is not that of the clipped gradient"
        )


def check_lr_schedule(schedule: LRSchedule) -> None:
    """Check that a learning-rate schedule over 1000 rounds is a pure function of the version, finite and above 0.

    >>> from thinwire.optimizers import CosineLR
    >>> check_lr_schedule(CosineLR(rounds=5))
    """
    over = Calls(schedule)("over", 1000)
    assert over == over.over(1000), "over must return the same schedule every time"
    for version in (0, 1, 2, 10, 99, 100, 10**6):
        once = Calls(over)("factor", version)
        assert 0 < once < math.inf, f"the factor of version {version} is {once}; expected a finite value above 0"


def check_correction(correction: Correction) -> None:
    """Check that a correction is pure, keeps the shapes of its states, and works for one client and under vmap.

    The spec of a client's report must depend on shapes alone, because the server computes the size of that field by
    calling `finish` on meta tensors. `server` must also work for a round that synchronizes only some blocks.

    >>> from thinwire.optimizers import NoCorrection
    >>> check_correction(NoCorrection())
    """
    call = Calls(correction)
    coords = _clients("coords")
    mine, shared, server = (call(f"init_{state}", coords[0]) for state in ("client", "shared", "server"))
    states = [nudge(mine, "state", i) for i in range(CLIENTS)]
    shared = nudge(shared, "state")
    cases = list(zip(_clients("gradients"), coords, _clients("start"), states, strict=True))
    for case in cases:
        call("gradient", *case, shared, like=coords[0])
    check_vmap(
        "gradient", lambda grads, now, start, state: correction.gradient(grads, now, start, state, shared), cases
    )

    shapes = Spec.of(coords[0]).shapes()
    _, expected = correction.finish(shapes, 1, 0.1, correction.init_client(shapes), Spec.of(shared).shapes())
    _, report = call("finish", coords[0], 5, 0.1, states[0], shared, like=(mine, expected))
    assert 0 < correction.factor(report) < math.inf, "factor must return a finite value above 0 for a correct report"

    for names in (tuple(COORDS), SOME):
        delta = restrict(coords[0], names)
        state = restrict(server, server.keys() - (COORDS.keys() - set(names)))
        call("server", delta, report, 0.5, state, like=(delta, shared, state))
