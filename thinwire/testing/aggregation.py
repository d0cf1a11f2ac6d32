"""Conformance checks of sketches, schedules, privacy mechanisms and aggregators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thinwire.aggregators.base import Aggregator
from thinwire.core.tree import Spec, Tree, all_finite, restrict, weighted_mean, zeros_like
from thinwire.privacy.base import Privacy
from thinwire.schedules.base import Plan, Schedule
from thinwire.sketches.base import Sketch
from thinwire.testing.common import COORDS, KEY, SHAPES, Calls, check_tree, close, random_tree


def check_sketch(sketch: Sketch) -> None:
    """Check that the codes of a sketch can be averaged.

    The code must have the blocks of `spec`, for all blocks, some and none. Averaging must commute with `encode` or with
    `decode`: mean of codes = code of the mean, or decoded mean = mean of the decoded codes.

    >>> from thinwire.sketches import Identity
    >>> check_sketch(Identity())
    """
    call = Calls(sketch)
    for names in (tuple(COORDS), tuple(COORDS)[1:3], ()):
        deltas = [restrict(random_tree(COORDS, "delta", i), names) for i in range(3)]
        coords, key = Spec.of(deltas[0]), KEY.fold("sketch", len(names))
        codes = [call("encode", delta, key, like=sketch.spec(coords).shapes()) for delta in deltas]
        mean = _mean(codes)
        decoded = call("decode", mean, coords, key, like=deltas[0])
        assert close(mean, sketch.encode(_mean(deltas), key)) or close(
            decoded, _mean([sketch.decode(code, coords, key) for code in codes])
        ), "the mean of codes is not a code of the mean: neither encode nor decode is linear"


def _mean(trees: Sequence[Tree]) -> Tree:
    return weighted_mean(trees, [1.0 + i for i in range(len(trees))])


def check_schedule(schedule: Schedule) -> None:
    """Check that a schedule plans existing blocks, deterministically, and never a private one.

    Runs twenty rounds with random updates.

    >>> from thinwire.schedules import AllBlocks
    >>> check_schedule(AllBlocks(private=("head.*",)))
    """
    call = Calls(schedule)
    spec = Spec.of(SHAPES)
    never = schedule.never(spec)
    assert isinstance(never, frozenset), f"never must return a frozenset, not {type(never).__name__}"
    assert never <= spec.named, f"never names blocks that do not exist: {sorted(never - spec.named)}"
    state = call("init", spec)
    for version in range(20):
        plan = call("plan", state, spec, version)
        assert isinstance(plan, Plan), f"plan must return a Plan, not {type(plan).__name__}"
        assert isinstance(plan.names, frozenset), f"the names of a plan are a frozenset, not {plan.names!r}"
        assert plan.names <= spec.named, f"planned blocks do not exist: {sorted(plan.names - spec.named)}"
        assert not plan.names & never, f"private blocks are planned: {sorted(plan.names & never)}"
        assert plan.resample == schedule.resamples(version), (
            f"the plan of version {version} and resamples({version}) do not agree"
        )
        planned = spec.restrict(plan.names)
        deltas = [random_tree(planned.shapes(), version, i) for i in range(2)]
        like = schedule.report(planned.shapes(), plan)
        reports = [call("report", delta, plan, like=like) for delta in deltas]
        state = call("observe", state, plan, _mean(deltas), _mean(reports))
        check_tree("observe", state)


def check_privacy(privacy: Privacy) -> None:
    """Check that a privacy mechanism keeps shapes, changes nothing in place and draws only from its key.

    The check does not measure privacy; an accountant does.

    >>> from thinwire.privacy import NoPrivacy
    >>> check_privacy(NoPrivacy())
    """
    call = Calls(privacy)
    for code in (random_tree(COORDS), COORDS, {}):
        bound = call("bound", code, KEY.fold("bound"), like=code)
        released = call("aggregate", [code, code], _mean, 2, KEY.fold("release"), like=code)
        for what, tree in (("bound", bound), ("aggregate", released)):
            assert all_finite(tree), f"{what} returned a value that is not finite"


def check_aggregator(aggregator: Aggregator) -> None:
    """Check that an aggregator combines any trees into one, independent of the order of clients.

    Equal trees must give that tree. Trees without blocks, and blocks without values, must work. Weights from `admit`
    must be finite, not negative and not all 0.

    >>> from thinwire.aggregators import Median
    >>> check_aggregator(Median())
    """
    call = Calls(aggregator)
    for clients in (1, 2, 3, 5, 8):
        random = [random_tree({**COORDS, "none": torch.zeros(0, 3)}, "client", i) for i in range(clients)]
        equal = [random[0]] * clients
        cases: list[list[Tree]] = [random, equal, [zeros_like(tree) for tree in random], [{}] * clients]
        for trees in cases:
            given = [float(1 + i % 3) for i in range(clients)]
            codes, weights = call("admit", trees, given)
            assert len(codes) == len(weights) == clients, "admit must return a tree and a weight for each client"
            assert all(0 <= weight < math.inf for weight in weights), f"admit returned the weights {weights}"
            assert any(weights), "admit must return at least one weight above 0"
            out = call("of", codes, weights, like=trees[0])
            if trees is equal and not aggregator.clips:
                assert close(out, random[0]), "the aggregate of equal trees must be that tree"
            reverse = aggregator.of(*aggregator.admit(trees[::-1], given[::-1]))
            assert close(reverse, out), "the order of the clients must not matter"
