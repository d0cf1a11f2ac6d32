"""Conformance checks of sketches, schedules, privacy mechanisms and aggregators."""

from __future__ import annotations

import math
from functools import partial

import torch

from thinwire.aggregators.base import Aggregator
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, restrict, tmap, weighted_mean
from thinwire.privacy.base import Privacy
from thinwire.schedules.base import Plan, Schedule
from thinwire.sketches.base import Sketch
from thinwire.testing.common import (
    COORDS,
    KEY,
    SHAPES,
    check_part,
    check_spec,
    check_tree,
    close,
    pure,
    random_tree,
)


def check_sketch(sketch: Sketch) -> None:
    """Check that the codes of a sketch can be averaged.

    The code must have the blocks of `spec`, for all blocks, some and none. Averaging must commute with `encode` or with
    `decode`: mean of codes = code of the mean, or decoded mean = mean of the decoded codes.

    >>> from thinwire.sketches import Identity
    >>> check_sketch(Identity())
    """
    check_part(sketch)
    deltas = [random_tree(COORDS, KEY.fold("delta", i)) for i in range(3)]
    for names in (tuple(COORDS), tuple(COORDS)[1:3], ()):
        some = [restrict(delta, names) for delta in deltas]
        coords, key = Spec.of(some[0]), KEY.fold("sketch", len(names))
        codes = [pure("encode", sketch.encode, delta, key) for delta in some]
        check_spec("encode", codes[0], sketch.spec(coords))
        mean = weighted_mean(codes, [1.0, 2.0, 3.0])
        decoded = pure("decode", sketch.decode, mean, coords, key)
        check_spec("decode", decoded, coords)
        direct = sketch.encode(weighted_mean(some, [1.0, 2.0, 3.0]), key)
        decoded_each = weighted_mean([sketch.decode(code, coords, key) for code in codes], [1.0, 2.0, 3.0])
        assert close(mean, direct) or close(decoded, decoded_each), (
            "the mean of codes is not a code of the mean: neither encode nor decode is linear"
        )


def check_schedule(schedule: Schedule, coords: Spec | None = None) -> None:
    """Check that a schedule plans existing blocks, deterministically, and never a private one.

    Runs twenty rounds with random updates.

    Args:
        schedule: the part.
        coords: the blocks; by default those of a small model. Give your own if selectors of the part name blocks.

    >>> from thinwire.schedules import AllBlocks
    >>> check_schedule(AllBlocks(private=("head.*",)))
    """
    check_part(schedule)
    spec = coords if coords is not None else Spec.of(random_tree(SHAPES, KEY))
    never = schedule.never(spec)
    assert isinstance(never, frozenset), f"never must return a frozenset, not {type(never).__name__}"
    assert never <= set(spec.names), f"never names blocks that do not exist: {sorted(never - set(spec.names))}"
    state = pure("init", schedule.init, spec)
    for version in range(20):
        plan = pure("plan", schedule.plan, state, spec, version)
        assert isinstance(plan, Plan), f"plan must return a Plan, not {type(plan).__name__}"
        assert isinstance(plan.names, frozenset), (
            f"the names of a plan are a frozenset, not {type(plan.names).__name__}"
        )
        assert plan.names <= set(spec.names), f"planned blocks do not exist: {sorted(plan.names - set(spec.names))}"
        assert not plan.names & never, f"private blocks are planned: {sorted(plan.names & never)}"
        resamples = schedule.resamples(version)
        assert plan.resample == resamples, f"the plan of version {version} and resamples({version}) do not agree"
        planned = spec.restrict(plan.names)
        shapes = {block.name: block.shape for block in planned}
        deltas = [random_tree(shapes, KEY.fold("delta", version, i)) for i in range(2)]
        reports = [pure("report", schedule.report, delta, plan) for delta in deltas]
        check_spec("report", reports[0], Spec.of(schedule.report(planned.shapes(), plan)))
        mean, mean_report = weighted_mean(deltas, [1.0, 1.0]), weighted_mean(reports, [1.0, 1.0])
        state = pure("observe", schedule.observe, state, plan, mean, mean_report)
        check_tree("observe", state)


def check_privacy(privacy: Privacy) -> None:
    """Check that a privacy mechanism keeps shapes, changes nothing in place and draws only from its key.

    The check does not measure privacy; an accountant does.

    >>> from thinwire.privacy import NoPrivacy
    >>> check_privacy(NoPrivacy())
    """
    check_part(privacy)

    def aggregate(codes: list[Tree], key: Key) -> Tree:
        return privacy.aggregate(codes, partial(weighted_mean, weights=[1.0, 1.0]), 2, key)

    for code in (random_tree(COORDS, KEY.fold("code")), tmap(torch.zeros_like, random_tree(COORDS, KEY)), {}):
        for what, out in (
            ("bound", pure("bound", privacy.bound, code, KEY.fold("bound"))),
            ("aggregate", pure("aggregate", aggregate, [code, code], KEY.fold("release"))),
        ):
            check_spec(what, out, Spec.of(code))
            for name, block in out.items():
                assert bool(torch.isfinite(block).all()), f"{what} returned a value in {name!r} that is not finite"


def check_aggregator(aggregator: Aggregator) -> None:
    """Check that an aggregator combines any trees into one, independent of the order of clients.

    Equal trees must give that tree, or with `of_values` the same products of its factors. Trees without blocks, and
    blocks without values, must work. Weights from `admit` must be finite, not negative and not all 0.

    >>> from thinwire.aggregators import Median
    >>> check_aggregator(Median())
    """
    check_part(aggregator)
    shapes = {**COORDS, "none": (0, 3)}
    for clients in (1, 2, 3, 5, 8):
        random = [random_tree(shapes, KEY.fold("client", i)) for i in range(clients)]
        equal = [random[0]] * clients
        cases: list[list[Tree]] = [random, equal, [tmap(torch.zeros_like, tree) for tree in random], [{}] * clients]
        for trees in cases:
            given = [float(1 + i % 3) for i in range(clients)]
            codes, weights = pure("admit", aggregator.admit, trees, given)
            assert len(codes) == len(weights) == clients, "admit must return a tree and a weight for each client"
            assert all(0 <= weight < math.inf for weight in weights), f"admit returned the weights {weights}"
            assert any(weights), "admit must return at least one weight above 0"
            out = pure("of", aggregator.of, codes, weights)
            check_spec("of", out, Spec.of(trees[0]))
            seen = _with_products if aggregator.of_values else dict  # one adapter is many pairs of factors
            if trees is equal and not aggregator.clips:
                assert close(seen(out), seen(random[0])), "the aggregate of equal trees must be that tree"
            reverse = aggregator.of(*aggregator.admit(trees[::-1], given[::-1]))
            assert close(seen(reverse), seen(out)), "the order of the clients must not matter"


def _with_products(tree: Tree) -> Tree:
    """The tree with the product B A in place of each pair of factors."""
    made = {name: tree[name] @ tree[f"{name[:-1]}a"] for name in tree if name.endswith("/b")}
    return {name: made.get(name, block) for name, block in tree.items() if f"{name[:-1]}b" not in made or name in made}
