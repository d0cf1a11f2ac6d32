"""Weighted mean, trimmed mean, median and bounds, with and without a Byzantine client."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, same_public
from thinwire.core.tree import weighted_mean
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.protocol.compatibility import check_method
from thinwire.protocol.round import Round
from thinwire.protocol.setup import make_contract
from thinwire.wire import message as wire

ROBUST = [tw.aggregators.TrimmedMean(0.34), tw.aggregators.Median()]
ALL_CLIENTS = range(6)


def random_trees(count: int):
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randn(5, generator=generator) for name in ("a", "b")} for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 6])
@pytest.mark.parametrize(
    "aggregator", [tw.aggregators.WeightedMean(), *ROBUST, tw.aggregators.Bounded(norm=100.0, weight=10.0)]
)
def test_equal_trees_give_that_tree_and_the_order_does_not_matter(aggregator, count):
    trees = random_trees(count)
    same = aggregator.of([trees[0]] * count, [1.0] * count)
    for name in same:
        torch.testing.assert_close(same[name], trees[0][name])
    forward, backward = aggregator.of(trees, [1.0] * count), aggregator.of(trees[::-1], [1.0] * count)
    for name in forward:
        torch.testing.assert_close(forward[name], backward[name])
    assert aggregator.of([{}] * count, [1.0] * count) == {}


def test_a_share_of_zero_is_the_mean_and_a_large_share_the_median():
    trees = random_trees(7)
    for name, block in weighted_mean(trees, [1.0] * 7).items():
        torch.testing.assert_close(tw.aggregators.TrimmedMean(0.0).of(trees, [1.0] * 7)[name], block)
        middle = torch.stack([tree[name] for tree in trees]).median(0).values
        torch.testing.assert_close(tw.aggregators.TrimmedMean(0.49).of(trees, [1.0] * 7)[name], middle)
        torch.testing.assert_close(tw.aggregators.Median().of(trees, [1.0] * 7)[name], middle)


@pytest.mark.parametrize("aggregator", ROBUST)
def test_the_result_is_within_the_range_of_honest_clients(aggregator):
    honest = random_trees(4)
    byzantine = [{name: torch.full((5,), x) for name in honest[0]} for x in (1e30, -1e30)]
    got = aggregator.of([*honest, *byzantine], [1.0] * 6)
    for name, block in got.items():
        values = torch.stack([tree[name] for tree in honest])
        assert (values.min(0).values <= block).all()
        assert (block <= values.max(0).values).all()


def corrupt(federation: Federation, data: bytes, field: int, factor: float, client: int = 3) -> bytes:
    """A client's message with the values of one field multiplied by a factor."""
    schema = federation.contract.schema.sent_by(client)
    message = wire.unpack(data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    values = torch.frombuffer(bytearray(body.fields[field]), dtype=torch.float32) * factor
    body = wire.Body(body.plan, {**body.fields, field: values.numpy().tobytes()})
    return wire.pack(wire.UP, message.version, [wire.pack_body(body, schema)], schema)


def moved_by_a_round(method: tw.Method, field: int, factor: float) -> tuple[float, float]:
    """How far the weights move in a round, with honest clients, and with one Byzantine client."""
    moved = []
    for byzantine in (False, True):
        federation = Federation(method)
        plan = Round.open(federation.contract, federation.server).plan
        before = federation.weights()
        for client in ALL_CLIENTS:
            federation.download(client)
        up = {client: federation.upload(client) for client in ALL_CLIENTS}
        if byzantine:
            up[3] = corrupt(federation, up[3], field, factor)
        federation.close(plan, up)
        after = federation.weights()
        moved.append(sum(float((after[name] - before[name]).square().sum()) for name in after) ** 0.5)
    return moved[0], moved[1]


def test_one_byzantine_client_moves_the_weighted_mean_but_not_robust_aggregators():
    honest, attacked = moved_by_a_round(tw.Method(norm_bound=0), wire.COORDS, 1e6)
    assert attacked > 1000 * honest
    for aggregator in (*ROBUST, tw.aggregators.Bounded(norm=1.0)):
        honest, attacked = moved_by_a_round(tw.Method(aggregator=aggregator, norm_bound=0), wire.COORDS, 1e6)
        assert attacked < 2 * honest + 1.0


@pytest.mark.parametrize("factor", [1e6, 1e20, 1e30, -1e37])
def test_by_default_an_update_is_limited_to_ten_times_the_median_norm(factor):
    honest, attacked = moved_by_a_round(tw.Method(), wire.COORDS, factor)
    assert attacked < 10 * honest


def test_a_reported_number_of_examples_is_bounded():
    federation = Federation(tw.Method())
    weights = [float(size) for size in federation.task.clients.sizes()]
    _, clamped = tw.aggregators.Bounded(weight=40.0).admit([{}] * 6, [*weights[:3], 1e12, *weights[4:]])
    assert max(clamped) == 40.0
    assert clamped[:3] == weights[:3]


def test_bounds_above_all_updates_change_nothing():
    plain, bounded = (
        Federation(tw.Method()),
        Federation(tw.Method(aggregator=tw.aggregators.Bounded(norm=1e6, weight=1e6))),
    )
    for federation in (plain, bounded):
        for _ in range(3):
            federation.round((0, 2, 5))
    assert same_public(plain.server.public, bounded.server.public)


def test_the_aggregator_is_not_part_of_the_schema():
    federation = Federation(tw.Method())
    other = make_contract(
        tw.Method(aggregator=tw.aggregators.Median()),
        federation.model.weights(),
        federation.model.buffers(),
        federation.key,
    )[0]
    assert other.schema == federation.contract.schema


def test_invalid_settings_are_refused():
    federation = Federation(tw.Method())
    weights = federation.contract.weights
    with pytest.raises(IncompatibleParts, match="clips updates"):
        check_method(tw.Method(aggregator=tw.aggregators.Bounded(norm=1.0), upload="weights"), weights)
    for make in (
        lambda: tw.aggregators.TrimmedMean(0.5),
        lambda: tw.aggregators.Bounded(norm=-1.0),
        lambda: tw.aggregators.Bounded(weight=float("nan")),
    ):
        with pytest.raises(ConfigError):
            make()
