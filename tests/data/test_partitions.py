"""Partitions: properties of all, and of each."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from thinwire.core.key import Key
from thinwire.core.registry import entries
from thinwire.data.partition import (
    IID,
    Assignment,
    Classes,
    ClassShards,
    Dirichlet,
    DirichletFlasc,
    Feature,
    Natural,
    Quantity,
    Shards,
    log_gamma_draws,
    near_equal,
    swap_until,
)
from thinwire.errors import ConfigError

KEYS = st.integers(0, 2**64 - 1).map(Key)
SOME = settings(max_examples=40, deadline=None)
KINDS = ["iid", "natural", "shards", "class-shards", "classes", "dirichlet", "dirichlet-flasc", "quantity", "feature"]


@st.composite
def datasets(draw) -> np.ndarray:
    """Labels of some classes of different sizes, in any order."""
    counts = draw(st.lists(st.integers(12, 40), min_size=2, max_size=6))
    labels = np.repeat(np.arange(len(counts)) * 3, counts)  # labels with gaps
    return labels[draw(KEYS).permutation(len(labels)).numpy()]


def users_of(labels: np.ndarray) -> np.ndarray:
    return (np.arange(len(labels)) * 7) % 11


def classes_of(labels: np.ndarray) -> int:
    return len(np.unique(labels))


def class_count(labels: np.ndarray, a: Assignment, i: int) -> int:
    return classes_of(labels[a.client(i)])


class ByPosition(Feature):
    """Feature skew of inputs that are functions of the index."""

    def assign(self, labels, clients, key, users=None):
        return super().assign(labels, clients, key, inputs=lambda at: np.sin(np.outer(at, [1.0, 2.3, 5.1])))


@st.composite
def cases(draw, kind: str):
    """A partition with valid options, labels, and a number of clients."""
    labels = draw(datasets())
    classes = classes_of(labels)
    per = draw(st.integers(1, classes))
    clients = draw(st.integers(-(-classes // per), 11))
    partition = {
        "iid": lambda: IID(),
        "natural": lambda: Natural(),
        "shards": lambda: Shards(min(per, 2)),
        "class-shards": lambda: ClassShards(per, min_classes=draw(st.integers(1, per))),
        "classes": lambda: Classes(per),
        "dirichlet": lambda: Dirichlet(draw(st.sampled_from([0.5, 1.0, 100.0])), min_size=1),
        "dirichlet-flasc": lambda: DirichletFlasc(draw(st.sampled_from([1e-4, 0.1, 1.0, 100.0]))),
        "quantity": lambda: Quantity(draw(st.sampled_from([0.5, 1.0, 100.0]))),
        "feature": lambda: ByPosition(draw(st.sampled_from([0.0, 0.5, 100.0]))),
    }[kind]()
    return partition, labels, clients


# -- all partitions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@SOME
@given(st.data(), KEYS)
def test_every_example_has_at_most_one_client_and_every_client_an_example(kind, data, key) -> None:
    """The same key gives the same partition; all but two kinds use all examples."""
    partition, labels, clients = data.draw(cases(kind))
    a, b = (partition.assign(labels, clients, key, users_of(labels)) for _ in range(2))
    np.testing.assert_array_equal(a.order, b.order)
    np.testing.assert_array_equal(a.offsets, b.offsets)
    assert len(a.order) == len(labels) or kind in ("natural", "dirichlet-flasc")
    assert a.order.dtype == a.offsets.dtype == np.int64
    assert a.offsets[0] == 0
    assert a.offsets[-1] == len(a.order)
    assert (a.sizes() >= 1).all()
    assert len(np.unique(a.order)) == len(a.order)
    assert a.order.min() >= 0
    assert a.order.max() < len(labels)
    if kind == "dirichlet-flasc":  # drops clients whose share rounds to 0
        assert 1 <= len(a) <= clients
    else:
        assert len(a) == clients


@SOME
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(-1, 30), KEYS, st.integers(1, 6), st.integers(1, 9))
def test_any_input_gives_a_partition_or_an_error_of_one_line(numbers, clients, key, per, least) -> None:
    labels = np.array(numbers, np.int64)
    options = [IID(), Natural(), Shards(per), ClassShards(per, min_classes=1 + least % per)]
    options += [Classes(per), Dirichlet(0.01, least), DirichletFlasc(0.01), Quantity(0.1, least), ByPosition()]
    for partition in options:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                a = partition.assign(labels, clients, key, users_of(labels))
        except ConfigError as caught:
            line = str(caught)
        else:
            line = ""
            assert len(np.unique(a.order)) == len(a.order) > 0
        assert "\n" not in line


@pytest.mark.parametrize(
    "partition", [IID(), Shards(), ClassShards(), Classes(), Dirichlet(), DirichletFlasc(), Quantity(), ByPosition()]
)
def test_another_key_gives_another_partition(partition) -> None:
    labels = np.arange(3000) % 10
    a, b = (partition.assign(labels, 20, Key(seed)) for seed in (1, 2))
    assert a.order.tolist() != b.order.tolist() or a.offsets.tolist() != b.offsets.tolist()


def test_every_registered_partition_has_a_description_and_defaults() -> None:
    table = entries("partition")
    assert set(table) >= {"iid", "shards", "class-shards", "classes", "dirichlet", "dirichlet-flasc", "natural"}
    for entry in table.values():
        assert entry.doc
        assert entry.make() == entry.make()


# -- each partition --------------------------------------------------------------------------------------------------


@SOME
@given(cases("iid"), KEYS)
def test_iid_parts_differ_by_at_most_one_example(case, key) -> None:
    partition, labels, clients = case
    sizes = partition.assign(labels, clients, key).sizes()
    assert sizes.tolist() == [len(part) for part in np.array_split(labels, clients)]


def test_shards_of_mnist_size_are_two_blocks_of_three_hundred_each() -> None:
    labels = np.repeat(np.arange(10), 6000)
    a = Shards().assign(labels, 100, Key(3))
    assert set(a.sizes().tolist()) == {600}
    assert max(class_count(labels, a, i) for i in range(100)) == 2
    blocks = np.sort(a.order.reshape(200, 300)[:, 0])
    np.testing.assert_array_equal(blocks, np.arange(200) * 300)


@SOME
@given(cases("classes"), KEYS)
def test_classes_gives_every_client_exactly_per_client_classes(case, key) -> None:
    partition, labels, clients = case
    a = partition.assign(labels, clients, key)
    assert {class_count(labels, a, i) for i in range(clients)} == {partition.per_client}


@pytest.mark.parametrize(("n", "classes", "per"), [(60_000, 10, 2), (50_000, 100, 10), (50_000, 10, 3)])
def test_classes_gives_equal_sizes_where_classes_are_equal(n, classes, per) -> None:
    labels = np.arange(n) % classes
    a = Classes(per).assign(labels, 100, Key(5))
    assert len(a.order) == n
    assert set(a.sizes().tolist()) <= {n // 100} if per != 3 else abs(a.sizes() - n // 100).max() <= 3


@SOME
@given(cases("class-shards"), KEYS)
def test_class_shards_respect_the_minimum_and_maximum_of_classes(case, key) -> None:
    partition, labels, clients = case
    a = partition.assign(labels, clients, key)
    counts = [class_count(labels, a, i) for i in range(clients)]
    assert partition.min_classes <= min(counts) <= max(counts) <= partition.per_client


def test_class_shards_are_fifty_a_class_for_a_hundred_clients_of_five() -> None:
    labels = np.repeat(np.arange(10), 6000)
    a = ClassShards().assign(labels, 100, Key(0))
    explicit = ClassShards(shards_per_class=50).assign(labels, 100, Key(0))
    np.testing.assert_array_equal(a.order, explicit.order)
    assert set(a.sizes().tolist()) == {600}
    counts = [class_count(labels, a, i) for i in range(100)]
    assert min(counts) >= 2
    assert max(counts) <= 5


def test_class_shards_of_a_hundred_classes_give_every_client_twenty() -> None:
    labels = np.arange(50_000) % 100
    a = ClassShards(per_client=50, min_classes=20).assign(labels, 100, Key(0))
    assert min(class_count(labels, a, i) for i in range(100)) >= 20


@SOME
@given(st.integers(1, 25), st.integers(1, 7), st.integers(1, 7), KEYS, st.data())
def test_swapping_always_succeeds_if_classes_are_dealt_equally_often(clients, per, classes, key, data) -> None:
    deck = np.repeat(np.arange(classes), near_equal(clients * per, classes))
    different = np.count_nonzero(near_equal(clients * per, classes))
    hands = deck[key.permutation(len(deck)).numpy()].reshape(clients, per)
    least = data.draw(st.integers(1, min(per, different)))
    if sum(min(clients, int(n)) for n in np.bincount(deck)) < clients * least:
        return  # not enough different classes for all clients
    before = np.sort(hands.reshape(-1))
    swap_until(hands, least)
    assert min(len(set(hand)) for hand in hands.tolist()) >= least
    np.testing.assert_array_equal(np.sort(hands.reshape(-1)), before)


@SOME
@given(datasets(), KEYS, st.sampled_from([0.5, 1.0, 10.0]), st.integers(1, 4), st.integers(1, 5))
def test_dirichlet_gives_every_client_the_minimum_size(labels, key, alpha, least, clients) -> None:
    assert Dirichlet(alpha, least).assign(labels, clients, key).sizes().min() >= least


def test_dirichlet_gives_no_more_to_clients_that_have_the_mean_size() -> None:
    counts = np.array([300, 200, 500, 100])
    sizes = Dirichlet(alpha=0.3)._draw(counts, 20, 50, Key(2))  # (tries, classes, clients)
    held = np.cumsum(sizes, axis=1) - sizes
    full = held >= counts.sum() / 20
    assert full.any()
    assert not sizes[full].any()
    np.testing.assert_array_equal(sizes.sum(axis=2), np.tile(counts, (50, 1)))


def test_dirichlet_names_the_minimum_that_works_if_all_draws_fail(monkeypatch) -> None:
    monkeypatch.setattr("thinwire.data.partition._MAX_DRAWS", 50)
    labels = np.arange(400) % 10
    with pytest.raises(ConfigError, match=r"none of 50 draws .* write min_size=\d+$") as caught:
        Dirichlet(alpha=0.3, min_size=20).assign(labels, 20, Key(0))
    least = int(str(caught.value).rpartition("=")[2])
    assert Dirichlet(alpha=0.3, min_size=least).assign(labels, 20, Key(0)).sizes().min() == least < 20


def test_dirichlet_is_an_error_if_every_draw_leaves_a_client_empty(monkeypatch) -> None:
    monkeypatch.setattr("thinwire.data.partition._MAX_DRAWS", 50)
    with pytest.raises(ConfigError, match="larger alpha or fewer clients"):
        Dirichlet(alpha=1e-3, min_size=1).assign(np.zeros(1000, int), 100, Key(0))


def test_a_small_alpha_is_more_skewed_than_a_large_one() -> None:
    labels = np.arange(20_000) % 10

    def skew(partition) -> float:
        a = partition.assign(labels, 50, Key(9))
        share = np.stack([np.bincount(labels[a.client(i)], minlength=10) / a.sizes()[i] for i in range(len(a))])
        return float(np.square(share).sum(axis=1).mean())  # 0.1 for equal distributions, 1 for one class

    for kind in (Dirichlet, DirichletFlasc):
        few, some, many = (skew(kind(alpha)) for alpha in (0.05, 1.0, 1000.0))
        assert few > 2 * some > 2 * many
        assert many == pytest.approx(0.1, abs=0.01)


def test_flasc_assigns_each_class_in_file_order() -> None:
    labels = np.arange(2000) % 4
    a = DirichletFlasc(alpha=0.5).assign(labels, 30, Key(4))
    for k in range(4):
        taken = a.order[labels[a.order] == k]
        np.testing.assert_array_equal(taken, np.flatnonzero(labels == k)[: len(taken)])


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 7.0])
def test_gamma_samples_have_the_mean_and_variance_of_the_distribution(alpha) -> None:
    draws = np.exp(log_gamma_draws(Key(11), alpha, (200_000,)))
    error = np.sqrt(alpha / 200_000)
    assert draws.mean() == pytest.approx(alpha, abs=5 * error)
    # the variance of a sample variance: (fourth moment - variance**2) / n
    assert draws.var() == pytest.approx(alpha, abs=5 * np.sqrt((2 * alpha**2 + 6 * alpha) / 200_000))


def test_gamma_samples_pass_a_kolmogorov_smirnov_test() -> None:
    from scipy import stats

    for alpha in (0.3, 2.5):
        draws = np.exp(log_gamma_draws(Key(12), alpha, (20_000,)))
        assert stats.kstest(draws, stats.gamma(alpha).cdf).pvalue > 1e-3


def test_natural_takes_the_users_with_most_examples_in_descending_order() -> None:
    users = np.array([3, 1, 1, 0, 3, 3, 7, 7, 7])
    a = Natural().assign(np.zeros(9, int), 3, Key(0), users)
    assert [a.client(i).tolist() for i in range(3)] == [[0, 4, 5], [6, 7, 8], [1, 2]]


def test_quantity_skew_is_one_of_sizes_and_not_of_classes() -> None:
    labels = np.arange(40_000) % 4
    sizes = {}
    for alpha in (0.1, 1.0, 1000.0):
        a = Quantity(alpha).assign(labels, 10, Key(5))
        sizes[alpha] = np.sort(a.sizes())
        large = [i for i in range(10) if a.sizes()[i] > 400]
        counts = np.stack([np.bincount(labels[a.client(i)], minlength=4) / a.sizes()[i] for i in large])
        assert abs(counts - 0.25).max() < 0.1  # five standard deviations
    assert sizes[0.1][-1] > 2 * sizes[1.0][-1] > 2 * sizes[1000.0][-1]
    assert sizes[1000.0][0] > 3500
    shares = np.stack([Quantity(2.0).assign(labels, 5, Key(i)).sizes() for i in range(400)]) / 40_000
    variance = 0.2 * 0.8 / (5 * 2.0 + 1)  # of a share of Dir(2, 2, 2, 2, 2)
    assert shares.var() == pytest.approx(variance, rel=0.15)


@SOME
@given(datasets(), KEYS, st.integers(1, 9))
def test_feature_skew_gives_equal_sizes_and_each_client_its_part_of_every_class(labels, key, clients) -> None:
    x = np.random.default_rng(0).normal(size=(len(labels), 1))
    a = Feature().assign(labels, clients, key, inputs=lambda at: x[at])
    assert a.sizes().max() - a.sizes().min() <= 1
    fraction = np.stack([[(labels[a.client(i)] == k).sum() for k in np.unique(labels)] for i in range(clients)])
    expected = np.unique(labels, return_counts=True)[1] / clients
    assert abs(fraction - expected).max() <= 2  # no label skew
    code = np.rint(x[:, 0] * 1024)
    for k in np.unique(labels):  # along the only direction, parts of a class do not overlap
        of = [code[a.client(i)][labels[a.client(i)] == k] for i in range(clients)]
        ranges = [(one.min(), one.max()) for one in of if len(one)]
        above, below = (all(p[1] <= q[0] for p, q in pairwise(one)) for one in (ranges, ranges[::-1]))
        assert above or below


def test_features_of_a_dataset_decide_and_noise_blurs_them() -> None:
    from thinwire.data.named_images import digits
    from thinwire.data.task import describe_partition, make_task

    source, spread = digits(), []
    for noise in (0.0, 1.0, 100.0):
        task = make_task(source, "mlp", partition=Feature(noise), clients=5)
        assert describe_partition(task).label_skew < (0.02 if not noise else 0.2)
        means = [task.train.gather(task.clients.client(i))[0].mean(0).flatten() for i in range(5)]
        spread.append(float(np.var(np.stack(means), axis=0).sum()))
    assert spread[0] > 2 * spread[1] > 4 * spread[2]
    table = make_task(source, "mlp", partition="feature", clients=5)
    np.testing.assert_array_equal(
        table.clients.order, make_task(source, "mlp", partition="feature", clients=5).clients.order
    )


def test_scores_of_features_are_equal_in_any_order_of_summation() -> None:
    x = np.random.default_rng(1).normal(size=(500, 3000)).astype(np.float32)
    turned = np.random.default_rng(2).permutation(3000)
    first, second = (
        Feature().assign(np.arange(500) % 3, 7, Key(4), inputs=lambda at, rows=rows: rows[at].astype(np.float64))
        for rows in (x, x[:, turned])
    )
    np.testing.assert_array_equal(first.order, second.order)


def test_a_regression_has_feature_skew_by_inputs_alone() -> None:
    x = np.arange(40.0)[:, None]
    a = Feature().assign(np.linspace(0, 1, 40), 4, Key(0), inputs=lambda at: x[at])
    assert sorted(sorted(a.client(i).tolist()) for i in range(4)) == np.arange(40).reshape(4, 10).tolist()
