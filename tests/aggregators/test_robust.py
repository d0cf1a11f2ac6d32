"""Robust aggregators by distance: against their definitions, and with Byzantine clients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task, same_public
from thinwire.aggregators.robust import inner_products, squares_between, squares_from
from thinwire.core.tree import Spec, Vector, weighted_mean
from thinwire.errors import ConfigError
from thinwire.federation.job import Job
from thinwire.protocol.round import Round
from thinwire.wire import message as wire
from thinwire.wire.message import pack_weight, unpack_weight

LARGEST = torch.finfo(torch.float32).max
ROBUST = [
    tw.aggregators.GeometricMedian(),
    tw.aggregators.CenteredClipping(),
    tw.aggregators.MultiKrum(2),
    tw.aggregators.NearestMixing(2),
]


def trees_of(*points) -> list[dict[str, torch.Tensor]]:
    """One tree of two blocks for each client."""
    return [{"a": torch.tensor(p[:1], dtype=torch.float32), "b": torch.tensor(p[1:])} for p in points]


def points_of(trees) -> np.ndarray:
    return np.stack([torch.cat([block.reshape(-1) for block in tree.values()]).double().numpy() for tree in trees])


def random_trees(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(7, generator=generator) for name in ("a", "b")} for _ in range(count)]


# -- distances ---------------------------------------------------------------------------------------------------------


def test_distances_from_inner_products_equal_distances_of_points():
    trees = random_trees(6)
    points, shares = points_of(trees), torch.linspace(0.1, 0.3, 6, dtype=torch.float64)
    products = inner_products(trees)
    between = ((points[:, None] - points[None]) ** 2).sum(-1)
    np.testing.assert_allclose(squares_between(products), between, atol=1e-12)
    from_mean = ((points - shares.numpy() @ points) ** 2).sum(-1)
    np.testing.assert_allclose(squares_from(products, shares), from_mean, atol=1e-12)


def test_long_blocks_and_flat_trees_are_processed_in_slices():
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(70_001, generator=generator) for _ in range(5)]
    like = [torch.zeros(3, 20_000), torch.zeros(10_001)]
    cuts = [Vector(vector, Spec.of(dict(zip(["w", "v"], like, strict=True)))) for vector in vectors]
    plain = [dict(tree.items()) for tree in cuts]
    expected = torch.stack(vectors).double()
    torch.testing.assert_close(inner_products(cuts), expected @ expected.T)
    torch.testing.assert_close(inner_products(plain), expected @ expected.T)
    for aggregator, reference in (
        (tw.aggregators.Median(), torch.stack(vectors).median(0).values),
        (tw.aggregators.TrimmedMean(0.2), torch.stack(vectors).sort(0).values[1:-1].mean(0)),
    ):
        got = aggregator.of(cuts, [1.0] * 5)
        assert Spec.of(got) == Spec.of(plain[0])
        torch.testing.assert_close(torch.cat([block.reshape(-1) for block in got.values()]), reference)


@pytest.mark.parametrize("aggregator", [tw.aggregators.Median(), tw.aggregators.TrimmedMean(0.3), *ROBUST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_of_blocks_do_not_change(aggregator, dtype):
    trees = [{name: block.to(dtype) for name, block in tree.items()} for tree in random_trees(7)]
    codes, weights = aggregator.admit(trees, [1.0] * 7)
    assert Spec.of(aggregator.of(codes, weights)) == Spec.of(trees[0])


# -- the definitions ---------------------------------------------------------------------------------------------------


def summed_distances(point: np.ndarray, points: np.ndarray, weights) -> float:
    return float((np.sqrt(((points - point) ** 2).sum(-1)) * weights).sum())


def test_the_geometric_median_minimizes_the_sum_of_distances():
    trees, weights = random_trees(9), [1.0, 2.0, 3.0, 1.0, 1.0, 5.0, 1.0, 2.0, 1.0]
    points, rng = points_of(trees), np.random.default_rng(0)
    found = points_of([tw.aggregators.GeometricMedian(iterations=200).of(trees, weights)])[0]
    least = summed_distances(found, points, weights)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            moved = found + size * rng.standard_normal(found.shape) / math.sqrt(found.size)
            assert summed_distances(moved, points, weights) > least
    default = points_of([tw.aggregators.GeometricMedian().of(trees, weights)])[0]
    assert summed_distances(default, points, weights) < least * (1 + 1e-4)


def test_the_geometric_median_of_a_triangle():
    corner = math.sqrt(3) / 2
    triangle = trees_of((1.0, 0.0), (-0.5, corner), (-0.5, -corner))
    np.testing.assert_allclose(
        points_of([tw.aggregators.GeometricMedian().of(triangle, [1.0] * 3)]), [[0, 0]], atol=1e-6
    )
    heavy = tw.aggregators.GeometricMedian().of(
        triangle, [5.0, 1.0, 1.0]
    )  # a point with more than half of the weight is the median
    np.testing.assert_allclose(points_of([heavy]), [[1, 0]], atol=1e-3)


def test_a_weight_of_three_equals_three_clients():
    trees = random_trees(5)
    once = tw.aggregators.GeometricMedian(iterations=200).of(trees, [3.0, 1.0, 1.0, 1.0, 1.0])
    repeated = tw.aggregators.GeometricMedian(iterations=200).of([*trees[:1] * 3, *trees[1:]], [1.0] * 7)
    for name in once:
        torch.testing.assert_close(once[name], repeated[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("tau", "relative"), [(1.0, True), (0.5, True), (2.0, False), (1e9, False)])
def test_centered_clipping_equals_its_formula(tau, relative):
    trees = random_trees(8)
    points = points_of(trees)
    v = np.median(points, 0)
    for _ in range(5):
        distance = np.sqrt(((points - v) ** 2).sum(-1))
        radius = tau * np.median(distance) if relative else tau
        v = v + ((points - v) * np.minimum(1, radius / distance)[:, None]).mean(0)
    got = tw.aggregators.CenteredClipping(tau, relative, iterations=5).of(trees, [float(i) for i in range(1, 9)])
    np.testing.assert_allclose(points_of([got])[0], v, atol=1e-5)
    if tau == 1e9:  # nothing is clipped: the mean
        np.testing.assert_allclose(points_of([got])[0], points.mean(0), atol=1e-5)


@pytest.mark.parametrize(("clients", "faulty", "keep"), [(7, 2, 0), (9, 3, 0), (9, 3, 1), (10, 0.3, 0), (10, 0.1, 4)])
def test_multi_krum_equals_its_definition(clients, faulty, keep):
    trees = random_trees(clients, seed=clients)
    points = points_of(trees)
    f = faulty if faulty >= 1 else int(faulty * clients)
    scores = []
    for i in range(clients):
        others = sorted(((points[i] - points[j]) ** 2).sum() for j in range(clients) if j != i)
        scores.append(sum(others[: clients - f - 2]))
    best = sorted(range(clients), key=scores.__getitem__)[: keep or clients - f]
    _, weights = tw.aggregators.MultiKrum(faulty, keep).admit(trees, [float(i) for i in range(1, clients + 1)])
    assert weights == [float(i in best) for i in range(clients)]


def test_multi_krum_excludes_a_client_for_what_is_far_off_beside_its_update():
    trees, krum = trees_of(*((1.0 + i / 100, 0.0) for i in range(7))), tw.aggregators.MultiKrum(1)
    buffers = trees_of(*((5.0 + i / 100, 5.0) for i in range(6)), (-1.0, 5.0))
    assert krum.admit(trees, [1.0] * 7, [trees_of(*[(1.0, 1.0)] * 7), buffers])[1] == [1.0] * 6 + [0.0]
    assert krum.admit(trees, [1.0] * 7)[1] == krum.admit(trees, [1.0] * 7, [trees_of(*[(1.0, 1.0)] * 7)])[1]


def test_multi_krum_assumes_fewer_faulty_clients_if_few_respond():
    byzantine = trees_of((1e9, 1e9))
    for honest, left_out in ((3, False), (4, True), (6, True)):
        trees = trees_of(*((1.0 + i / 10, 0.0) for i in range(honest))) + byzantine
        _, weights = tw.aggregators.MultiKrum(3).admit(trees, [1.0] * (honest + 1))
        assert weights == [1.0] * honest + [0.0 if left_out else 1.0] if honest < 6 else weights[-1] == 0.0
    with pytest.raises(ConfigError, match="multi-krum with 3 faulty clients needs 9 clients in a round"):
        tw.aggregators.MultiKrum(3).check(8)
    with pytest.raises(ConfigError, match="needs 9 clients"):
        Job(
            digits_task(),
            tw.Method(aggregator=tw.aggregators.Bounded(1.0, inner=tw.aggregators.MultiKrum(3))),
            cohort=6,
        )
    for clients in (1, 2, 3, 8, 9):
        tw.aggregators.MultiKrum(0.3).check(clients)  # a share of few clients rounds to 0


# -- Byzantine clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", ROBUST)
@pytest.mark.parametrize("value", [-10.0, 1e6, 1e30, LARGEST])
def test_byzantine_clients_do_not_move_the_result_beyond_honest_ones(aggregator, value):
    honest = random_trees(6)
    byzantine = [{name: torch.full((7,), value) for name in honest[0]} for _ in range(2)]
    center = points_of([weighted_mean(honest, [1.0] * 6)])[0]
    width = max(np.sqrt(((points_of(honest) - center) ** 2).sum(-1)))
    for order in itertools.islice(itertools.permutations(range(8)), 0, 40_000, 8_000):
        trees = [[*honest, *byzantine][i] for i in order]
        got = points_of([aggregator.of(*aggregator.admit(trees, [1.0] * 8))])[0]
        assert np.sqrt(((got - center) ** 2).sum()) < width


@pytest.mark.parametrize("aggregator", ROBUST)
def test_the_result_of_an_equal_majority_is_that_of_the_majority(aggregator):
    trees = trees_of(*[(1.0, 2.0)] * 5, (3.0, 4.0), (-1e9, 1e9))
    got = points_of([aggregator.of(*aggregator.admit(trees, [1.0] * 7))])[0]
    np.testing.assert_allclose(got, [1.0, 2.0], atol=1e-4)
    zeros = [{"w": torch.zeros(3)}] * 5 + [{"w": torch.ones(3)}] * 2
    assert aggregator.of(*aggregator.admit(zeros, [1.0] * 7))["w"].abs().max() < 1e-6


def uploads_of(federation: Federation) -> dict[int, bytes]:
    for client in range(6):
        federation.download(client)
    return {client: federation.upload(client) for client in range(6)}


def corrupt(federation: Federation, data: bytes, factors: dict[int, float]) -> bytes:
    """The message of client 0 with the values of some fields multiplied by factors."""
    schema = federation.contract.schema.sent_by(0)
    message = wire.unpack(data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    fields = dict(body.fields)
    for field, factor in factors.items():
        if field == wire.WEIGHT:
            fields[field] = pack_weight(unpack_weight(fields[field]) * factor)
            continue
        fields[field] = (torch.frombuffer(bytearray(fields[field]), dtype=torch.float32) * factor).numpy().tobytes()
    return wire.pack(wire.UP, message.version, [wire.pack_body(wire.Body(body.plan, fields), schema)], schema)


def test_a_client_that_multi_krum_excludes_for_its_report_has_no_effect():
    states = []
    for factors in ({wire.SHARED: -5.0}, {wire.COORDS: -9.0, wire.SHARED: -50.0, wire.WEIGHT: 7.0}):
        federation = Federation(tw.Method(correction=tw.optimizers.Scaffold(), aggregator=tw.aggregators.MultiKrum(1)))
        plan, up = Round.open(federation.contract, federation.server).plan, uploads_of(federation)
        up[0] = corrupt(federation, up[0], factors)
        federation.close(plan, up)
        states.append(federation.server.public)
    assert same_public(*states)


@pytest.mark.parametrize(
    ("aggregator", "learns"),
    [
        (tw.aggregators.WeightedMean(), False),
        (tw.aggregators.GeometricMedian(), True),
        (tw.aggregators.CenteredClipping(), True),
        (tw.aggregators.MultiKrum(1), True),
    ],
)
def test_robust_aggregators_learn_with_a_client_that_flips_signs(aggregator, learns):
    federation = Federation(
        tw.Method(aggregator=aggregator, client_opt=tw.optimizers.SGD(0.3), client_weight=tw.aggregators.Uniform())
    )
    for _ in range(6):
        plan, up = Round.open(federation.contract, federation.server).plan, uploads_of(federation)
        up[0] = corrupt(federation, up[0], {wire.COORDS: -10.0})
        federation.close(plan, up)
    assert (sum(federation.losses[-6:]) < sum(federation.losses[:6])) is learns


def test_invalid_settings_are_refused():
    for make in (
        lambda: tw.aggregators.GeometricMedian(iterations=0),
        lambda: tw.aggregators.GeometricMedian(smooth=0.0),
        lambda: tw.aggregators.CenteredClipping(tau=0.0),
        lambda: tw.aggregators.CenteredClipping(tau=math.inf),
        lambda: tw.aggregators.MultiKrum(0.5),
        lambda: tw.aggregators.MultiKrum(2.5),
        lambda: tw.aggregators.MultiKrum(-1),
        lambda: tw.aggregators.MultiKrum(1, keep=-1),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()
