"""Aggregation of decoded uploads: the mean update, and the means of what clients report besides it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from thinwire.core.key import Key
from thinwire.core.tree import Tree, add, restrict, scale, sub, to_device
from thinwire.protocol.contract import Contract
from thinwire.protocol.state import PublicState
from thinwire.protocol.upload import Upload
from thinwire.schedules.base import Plan
from thinwire.spaces.base import Stack
from thinwire.wire.bits import Bytes


class Aggregate(NamedTuple):
    """The aggregated uploads of a round, on the CPU."""

    update: Tree  # of the coordinates, or its sketch
    report: Tree  # of the correction
    schedule_report: Tree
    buffers: Tree
    stack: Stack | None = None  # what is added to the base


class Terms(NamedTuple):
    """What a round is closed with besides its uploads.

    Args:
        registered: number of clients in all.
        noise: the source of noise for differential privacy; by default the seed, which clients know.
        recent: the medians of the latest rounds (`Recent.sizes`); None to compare uploads only with each other.
        sum_masked: the sum of masked uploads (`thinwire.secure.masks`); needed for secure aggregation.
    """

    registered: int
    noise: Key | None = None
    recent: Mapping[str, float] | None = None
    sum_masked: Callable[[Contract, Plan, int, Sequence[Bytes], Key, tuple[int, int]], Tree] | None = None


def aggregate(
    contract: Contract, public: PublicState, plan: Plan, uploads: Sequence[Upload], terms: Terms
) -> Aggregate:
    """Aggregate uploads with the aggregator and the privacy mechanism of the method.

    Args:
        contract: the contract at this version.
        public: the public state that clients trained from; in asynchronous rounds the current one.
        plan: the plan of the round.
        uploads: the uploads that count.
        terms: the source of noise, and how masked uploads are summed.
    """
    method, noise = contract.method, terms.noise or contract.key.fold("release", public.version)
    if method.secure_aggregation:
        assert terms.sum_masked is not None, "secure_aggregation = true needs `sum_masked` of thinwire.secure.masks"
        payloads, began = [one.masked for one in uploads], uploads[0].began
        update = terms.sum_masked(contract, plan, public.version, payloads, noise, began)
        return Aggregate(_as_delta(contract, public, plan, update), {}, {}, {})
    codes, weights = [one.code for one in uploads], [one.weight for one in uploads]
    if method.correction.active:
        factors = [method.correction.factor(one.report) for one in uploads]
        codes = [code if f == 1.0 else scale(code, f) for code, f in zip(codes, factors, strict=True)]
    if method.asynchronous.active:
        factors = [method.asynchronous.factor(one.staleness) for one in uploads]
        codes = [code if f == 1.0 else scale(code, f) for code, f in zip(codes, factors, strict=True)]
    if method.aggregator.of_values and method.upload == "delta":
        codes = [add(_start(public, plan), code) for code in codes]
    if not method.aggregator.is_weighted_mean:
        codes, weights = method.aggregator.admit(codes, weights)
    mean = partial(method.aggregator.of, weights=weights)
    update = method.privacy.aggregate(codes, mean, len(uploads), noise) if method.privacy.active else mean(codes)
    stack = None
    if (stacking := method.space.stacking) is not None:
        values = codes if method.upload == "weights" else [add(_start(public, plan), code) for code in codes]
        total = math.fsum(weights)
        stack = stacking.stack(values, [weight / total for weight in weights])
        update = restrict(update, contract.step_of(contract.coords.restrict(plan.names)).named)
    others = (
        [one.report for one in uploads],
        [one.schedule_report for one in uploads],
        [one.buffers for one in uploads],
    )
    update = _as_delta(contract, public, plan, update)
    report, schedule_report, buffers = (mean(trees) if trees[0] else {} for trees in others)
    return Aggregate(update, report, schedule_report, buffers, stack)


def _as_delta(contract: Contract, public: PublicState, plan: Plan, update: Tree) -> Tree:
    """The change of the coordinates, where the coordinates themselves were aggregated."""
    if contract.method.upload == "delta" and not contract.method.aggregator.of_values:
        return update
    return sub(update, restrict(_start(public, plan), update))


def _start(public: PublicState, plan: Plan) -> Tree:
    """The coordinates that clients started from."""
    return to_device(restrict(public.coords, plan.names), "cpu")
