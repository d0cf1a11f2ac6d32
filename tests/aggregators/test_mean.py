"""Means that a few liars cannot move far, and a plain one that anybody can."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, same_public
from thinwire.core.tree import weighted_mean
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.protocol.setup import make_contract, plan_round
from thinwire.wire import message as wire

ROBUST = [tw.TrimmedMean(0.34), tw.Median()]
EVERYONE = range(6)


def random_trees(count: int):
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randn(5, generator=generator) for name in ("a", "b")} for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 6])
@pytest.mark.parametrize("aggregator", [tw.WeightedMean(), *ROBUST, tw.Bounded(norm=100.0, weight=10.0)])
def test_a_mean_of_equals_is_what_they_say_and_order_does_not_matter(mean, count):
    trees = random_trees(count)
    same = mean.of([trees[0]] * count, [1.0] * count)
    for name in same:
        torch.testing.assert_close(same[name], trees[0][name])
    there, back = mean.of(trees, [1.0] * count), mean.of(trees[::-1], [1.0] * count)
    for name in there:
        torch.testing.assert_close(there[name], back[name])
    assert mean.of([{}] * count, [1.0] * count) == {}


def test_trimming_nothing_is_the_plain_mean_and_trimming_most_the_median():
    trees = random_trees(7)
    for name, block in weighted_mean(trees, [1.0] * 7).items():
        torch.testing.assert_close(tw.TrimmedMean(0.0).of(trees, [1.0] * 7)[name], block)
        middle = torch.stack([tree[name] for tree in trees]).median(0).values
        torch.testing.assert_close(tw.TrimmedMean(0.49).of(trees, [1.0] * 7)[name], middle)
        torch.testing.assert_close(tw.Median().of(trees, [1.0] * 7)[name], middle)


@pytest.mark.parametrize("aggregator", ROBUST)
def test_the_result_lies_between_honest_clients(mean):
    honest = random_trees(4)
    lies = [{name: torch.full((5,), x) for name in honest[0]} for x in (1e30, -1e30)]
    got = mean.of([*honest, *lies], [1.0] * 6)
    for name, block in got.items():
        values = torch.stack([tree[name] for tree in honest])
        assert (values.min(0).values <= block).all()
        assert (block <= values.max(0).values).all()


def lying(federation: Federation, data: bytes, field: int, factor: float, client: int = 3) -> bytes:
    """A client's message with one field of numbers multiplied."""
    schema = federation.contract.schema.sent_by(client)
    message = wire.unpack(data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    numbers = torch.frombuffer(bytearray(body.fields[field]), dtype=torch.float32) * factor
    body = wire.Body(body.plan, {**body.fields, field: numbers.numpy().tobytes()})
    return wire.pack(wire.UP, message.version, [wire.pack_body(body, schema)], schema)


def after_a_lie(method: tw.Method, field: int, factor: float) -> tuple[float, float]:
    """How far the public state moves in a round, with all honest, and with one client lying."""
    moved = []
    for lie in (False, True):
        federation = Federation(method)
        plan = plan_round(federation.contract, federation.server)
        before = federation.weights()
        for client in EVERYONE:
            federation.download(client)
        up = {client: federation.upload(client) for client in EVERYONE}
        if lie:
            up[3] = lying(federation, up[3], field, factor)
        federation.close(plan, up)
        after = federation.weights()
        moved.append(sum(float((after[name] - before[name]).square().sum()) for name in after) ** 0.5)
    return moved[0], moved[1]


def test_one_liar_moves_the_plain_mean_and_not_the_others():
    honest, lied = after_a_lie(tw.Method(norm_bound=0), wire.COORDS, 1e6)
    assert lied > 1000 * honest
    for mean in (*ROBUST, tw.Bounded(norm=1.0)):
        honest, lied = after_a_lie(tw.Method(mean=mean, norm_bound=0), wire.COORDS, 1e6)
        assert lied < 2 * honest + 1.0


@pytest.mark.parametrize("factor", [1e6, 1e20, 1e30, -1e37])
def test_by_default_no_client_counts_more_than_ten_times_the_median(factor):
    honest, lied = after_a_lie(tw.Method(), wire.COORDS, factor)
    assert lied < 10 * honest


def test_a_liar_about_its_examples_counts_no_more_than_is_allowed():
    federation = Federation(tw.Method())
    weights = [float(size) for size in federation.task.clients.sizes()]
    _, clamped = tw.Bounded(weight=40.0).admit([{}] * 6, [*weights[:3], 1e12, *weights[4:]])
    assert max(clamped) == 40.0
    assert clamped[:3] == weights[:3]


def test_bounds_that_nobody_reaches_change_nothing():
    plain, bounded = Federation(tw.Method()), Federation(tw.Method(mean=tw.Bounded(norm=1e6, weight=1e6)))
    for federation in (plain, bounded):
        for _ in range(3):
            federation.round((0, 2, 5))
    assert same_public(plain.server.public, bounded.server.public)


def test_clients_need_not_know_the_mean():
    federation = Federation(tw.Method())
    other = make_contract(
        tw.Method(mean=tw.Median()), federation.model.weights(), federation.model.buffers(), federation.key
    )[0]
    assert other.schema == federation.contract.schema


@pytest.mark.parametrize("aggregator", ROBUST)
def test_learning_goes_on_under_a_robust_mean(mean):
    federation = Federation(tw.Method(mean=mean, client_opt=tw.SGD(0.3)))
    for _ in range(8):
        federation.round(EVERYONE)
    assert sum(federation.losses[-6:]) < sum(federation.losses[:6])


def test_what_cannot_work_is_refused():
    federation = Federation(tw.Method())
    weights = federation.contract.weights
    with pytest.raises(IncompatibleParts, match="shortens changes"):
        tw.Method(mean=tw.Bounded(norm=1.0), upload="weights").check(weights)
    for make in (lambda: tw.TrimmedMean(0.5), lambda: tw.Bounded(norm=-1.0), lambda: tw.Bounded(weight=float("nan"))):
        with pytest.raises(ConfigError):
            make()
