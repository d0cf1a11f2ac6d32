"""Conformance checks of optimizers, learning-rate schedules and corrections."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace

import torch
from torch.func import vmap

from thinwire.core.spec import Spec
from thinwire.core.state import ALL_BLOCKS, State, restrict_state, same_state
from thinwire.core.tree import Tree, add, flatten, repeat, restrict, same, scale, stack, unstack, zeros_like
from thinwire.optimizers.base import Correction, Optimizer, clip_by_global_norm
from thinwire.optimizers.lr_schedules import LRSchedule
from thinwire.testing.common import (
    COORDS,
    KEY,
    check_close,
    check_part,
    check_spec,
    check_tree,
    nudge,
    pure,
    random_tree,
)

SOME = ("fc.weight/b", "scale")  # the blocks of a round that synchronizes only some


def check_optimizer(opt: Optimizer) -> None:
    """Check that an optimizer is a pure function, for one client, for many under vmap, and for some of the blocks.

    Its state is nested: slot -> block -> tensor (`state["momentum"]["fc.weight"]`). A value that belongs to no single
    block has the key `ALL_BLOCKS`. With a setting `clip_norm`, a step is the one of the clipped gradient.

    >>> from thinwire.optimizers import SGD
    >>> check_optimizer(SGD(0.1, momentum=0.9, nesterov=True))
    """
    check_part(opt)
    assert opt.lr > 0, f"lr must be above 0, not {opt.lr}"
    assert opt.clip_norm > 0, f"clip_norm must be above 0, not {opt.clip_norm}"
    coords = [random_tree(COORDS, KEY.fold("coords", i)) for i in range(3)]
    grads = [[random_tree(COORDS, KEY.fold("grads", step, i)) for i in range(3)] for step in range(3)]
    state = pure("init", opt.init, coords[0])
    _check_state(state)
    states, stacked = [state] * 3, stack(coords)
    stacked_states = {slot: repeat(tree, 3) for slot, tree in state.items()}
    for step in grads:
        for i in range(3):
            change, states[i] = _check_update(opt, step[i], states[i], coords[i])
            coords[i] = add(coords[i], change)
        change, stacked_states = vmap(opt.update)(stack(step), stacked_states, stacked)
        stacked = add(stacked, change)
        for i in range(3):
            check_close("update under vmap", unstack(stacked, i), coords[i])
            for slot, tree in states[i].items():
                check_close(f"state[{slot!r}] after update under vmap", unstack(stacked_states[slot], i), tree)

    _check_update(opt, restrict(grads[0][0], SOME), restrict_state(states[0], SOME), restrict(coords[0], SOME))
    if is_dataclass(opt) and any(f.name == "clip_norm" for f in fields(opt)):
        _check_clipping(opt, grads[0][0], coords[0])


def _check_clipping(opt: Optimizer, grads: Tree, coords: Tree) -> None:
    """Check that the gradient is clipped before all else, that 0 stays finite, and that NaN is not hidden."""
    norm = float(flatten(grads).norm())
    free, clipped = (replace(opt, clip_norm=limit) for limit in (math.inf, norm / 4))  # type: ignore[type-var]
    state = opt.init(coords)
    for factor in (1.0, 0.125):  # longer, and not longer
        given = scale(grads, factor)
        found, after = clipped.update(given, state, coords)
        expected, expected_after = free.update(clip_by_global_norm(given, norm / 4), state, coords)
        assert same(found, expected), f"with clip_norm = {norm / 4:.3g} update is not that of the clipped gradient"
        assert same_state(after, expected_after), "with a clip_norm the state is not that of the clipped gradient"
    still, _ = clipped.update(zeros_like(grads), state, coords)
    assert bool(flatten(still).isfinite().all()), "with a clip_norm the step of a zero gradient is not finite"
    first = next(iter(grads))
    for bad in (math.nan, math.inf):
        broken, _ = clipped.update({**grads, first: torch.full_like(grads[first], bad)}, state, coords)
        assert not bool(flatten(broken).isfinite().all()), f"with a clip_norm a gradient of {bad} becomes a finite step"


def _check_update(opt: Optimizer, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
    """Check one step: pure, with a change for every gradient and a state of the same blocks as before."""
    change, after = pure("update", opt.update, grads, state, coords)
    check_spec("the change", change, Spec.of(grads))
    assert list(after) == list(state), f"update must return the slots {list(state)}, in this order, not {list(after)}"
    for slot, tree in state.items():
        check_spec(f"state[{slot!r}] after update", after[slot], Spec.of(tree))
    return change, after


def _check_state(state: State) -> None:
    assert isinstance(state, dict), f"init must return a dictionary from slots to trees, not {type(state).__name__}"
    for slot, tree in state.items():
        check_tree(f"state[{slot!r}]", tree)
        for name in tree:
            assert name in COORDS or name == ALL_BLOCKS, (
                f"state[{slot!r}][{name!r}]: the key must be the name of a block, or ALL_BLOCKS ({ALL_BLOCKS!r})"
            )


def check_lr_schedule(schedule: LRSchedule) -> None:
    """Check that a learning-rate schedule over 1000 rounds is a pure function of the version, finite and above 0.

    >>> from thinwire.optimizers import CosineLR
    >>> check_lr_schedule(CosineLR(rounds=5))
    """
    check_part(schedule)
    over = pure("over", schedule.over, 1000)
    assert over == over.over(1000), "over must return the same schedule every time"
    for version in (0, 1, 2, 10, 99, 100, 10**6):
        once = pure("factor", over.factor, version)
        assert 0 < once < math.inf, f"the factor of version {version} is {once}; expected a finite value above 0"


def check_correction(correction: Correction) -> None:
    """Check that a correction is pure, keeps the shapes of its states, and works for one client and under vmap.

    The spec of a client's report must depend on shapes alone, because the server computes the size of that field by
    calling `finish` on meta tensors. `server` must also work for a round that synchronizes only some blocks.

    >>> from thinwire.optimizers import NoCorrection
    >>> check_correction(NoCorrection())
    """
    check_part(correction)
    coords = [random_tree(COORDS, KEY.fold("coords", i)) for i in range(3)]
    mine = pure("init_client", correction.init_client, coords[0])
    shared = pure("init_shared", correction.init_shared, coords[0])
    server = pure("init_server", correction.init_server, coords[0])
    client_states, shared_states = (
        [nudge(tree, KEY.fold("state", i), 0.5) for i in range(3)] for tree in (mine, shared)
    )
    _check_corrected_gradient(correction, coords, client_states, shared_states[0])
    report = _check_finish(correction, coords[0], client_states[0], shared_states[0])
    _check_server(correction, coords[0], report, Spec.of(shared), server)


def _check_corrected_gradient(correction: Correction, coords: list[Tree], mine: list[Tree], shared: Tree) -> None:
    start, grads = ([random_tree(COORDS, KEY.fold(what, i)) for i in range(3)] for what in ("start", "grads"))
    corrected = []
    for i in range(3):
        corrected.append(pure("gradient", correction.gradient, grads[i], coords[i], start[i], mine[i], shared))
        check_spec("gradient", corrected[i], Spec.of(coords[i]))
    stacked = vmap(correction.gradient, in_dims=(0, 0, 0, 0 if mine[0] else None, None))(
        stack(grads), stack(coords), stack(start), stack(mine), shared
    )
    for i in range(3):
        check_close("gradient under vmap", unstack(stacked, i), corrected[i])


def _check_finish(correction: Correction, moved: Tree, mine: Tree, shared: Tree) -> Tree:
    """Check the end of local training, and return the report of the client."""
    after, report = pure("finish", correction.finish, moved, 5, 0.1, mine, shared)
    check_spec("the client state after finish", after, Spec.of(mine))
    shapes = Spec.of(moved).shapes()
    _, expected = correction.finish(shapes, 1, 0.1, correction.init_client(shapes), Spec.of(shared).shapes())
    check_spec("the report", report, Spec.of(expected))
    assert 0 < correction.factor(report) < math.inf, "factor must return a finite value above 0 for a correct report"
    return report


def _check_server(correction: Correction, coords: Tree, report: Tree, shared: Spec, server: Tree) -> None:
    for names in (tuple(coords), SOME):
        absent = coords.keys() - set(names)
        delta = restrict(coords, names)
        state = {name: block for name, block in server.items() if name not in absent}
        corrected, of_shared, after = pure("server", correction.server, delta, report, 0.5, state)
        check_spec("the corrected update", corrected, Spec.of(delta))
        check_spec("the update of the shared state", of_shared, shared)
        check_spec("the server state", after, Spec.of(state))
