import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.key import Key
from thinwire.core.registry import entries
from thinwire.data.partitions.base import Assignment, near_equal
from thinwire.data.partitions.dirichlet import Dirichlet, DirichletFlasc, log_gamma_draws
from thinwire.data.partitions.iid import IID, Natural
from thinwire.data.partitions.shards import Classes, ClassShards, Shards, swap_until
from thinwire.errors import ConfigError

KEYS = st.integers(0, 2**64 - 1).map(Key)
SOME = settings(max_examples=40, deadline=None)
KINDS = ["iid", "natural", "shards", "class-shards", "classes", "dirichlet", "dirichlet-flasc"]


@st.composite
def data_sets(draw) -> np.ndarray:
    """Labels of some classes of different sizes, in any order."""
    counts = draw(st.lists(st.integers(12, 40), min_size=2, max_size=6))
    labels = np.repeat(np.arange(len(counts)) * 3, counts)  # numbers with gaps
    return labels[draw(KEYS).permutation(len(labels)).numpy()]


def users_of(labels: np.ndarray) -> np.ndarray:
    return (np.arange(len(labels)) * 7) % 11


def classes_of(labels: np.ndarray) -> int:
    return len(np.unique(labels))


def class_count(labels: np.ndarray, a: Assignment, i: int) -> int:
    return classes_of(labels[a.client(i)])


@st.composite
def cases(draw, kind: str):
    """A split with options that can be met, labels, and a number of clients."""
    labels = draw(data_sets())
    classes = classes_of(labels)
    per = draw(st.integers(1, classes))
    clients = draw(st.integers(-(-classes // per), 11))
    split = {
        "iid": lambda: IID(),
        "natural": lambda: Natural(),
        "shards": lambda: Shards(min(per, 2), strict=False),
        "class-shards": lambda: ClassShards(per, min_classes=draw(st.integers(1, per))),
        "classes": lambda: Classes(per),
        "dirichlet": lambda: Dirichlet(draw(st.sampled_from([0.5, 1.0, 100.0])), min_size=1),
        "dirichlet-flasc": lambda: DirichletFlasc(draw(st.sampled_from([1e-4, 0.1, 1.0, 100.0]))),
    }[kind]()
    return split, labels, clients


# -- what all splits promise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@SOME
@given(st.data(), KEYS)
def test_every_example_has_one_owner_at_most_and_every_client_an_example(kind, data, key) -> None:
    split, labels, clients = data.draw(cases(kind))
    a = split.assign(labels, clients, key, users_of(labels))
    assert a.order.dtype == a.offsets.dtype == np.int64
    assert a.offsets[0] == 0
    assert a.offsets[-1] == len(a.order)
    assert (a.sizes() >= 1).all()
    assert len(np.unique(a.order)) == len(a.order)
    assert a.order.min() >= 0
    assert a.order.max() < len(labels)
    if kind == "dirichlet-flasc":  # drops those whose share rounds to nothing
        assert 1 <= len(a) <= clients
    else:
        assert len(a) == clients


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("natural", "dirichlet-flasc")])
@SOME
@given(st.data(), KEYS)
def test_all_data_is_used_where_that_is_promised(kind, data, key) -> None:
    split, labels, clients = data.draw(cases(kind))
    a = split.assign(labels, clients, key, users_of(labels))
    np.testing.assert_array_equal(np.sort(a.order), np.arange(len(labels)))


@pytest.mark.parametrize("kind", KINDS)
@SOME
@given(st.data(), KEYS)
def test_the_same_key_gives_the_same_split(kind, data, key) -> None:
    split, labels, clients = data.draw(cases(kind))
    a, b = (split.assign(labels, clients, key, users_of(labels)) for _ in range(2))
    np.testing.assert_array_equal(a.order, b.order)
    np.testing.assert_array_equal(a.offsets, b.offsets)


@SOME
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(-1, 30), KEYS, st.integers(1, 6), st.integers(1, 9))
def test_any_input_is_split_or_refused_in_one_line(numbers, clients, key, per, least) -> None:
    labels = np.array(numbers, np.int64)
    options = [IID(), Natural(), Shards(per), Shards(per, strict=True), ClassShards(per, min_classes=1 + least % per)]
    options += [Classes(per), Dirichlet(0.01, least), DirichletFlasc(0.01)]
    for split in options:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                a = split.assign(labels, clients, key, users_of(labels))
        except ConfigError as refused:
            line = str(refused)
        else:
            line = ""
            assert len(np.unique(a.order)) == len(a.order) > 0
        assert "\n" not in line


@pytest.mark.parametrize("split", [IID(), Shards(), ClassShards(), Classes(), Dirichlet(), DirichletFlasc()])
def test_another_key_gives_another_split(split) -> None:
    labels = np.arange(3000) % 10
    a, b = (split.assign(labels, 20, Key(seed)) for seed in (1, 2))
    assert a.order.tolist() != b.order.tolist() or a.offsets.tolist() != b.offsets.tolist()


def test_every_registered_split_has_a_line_about_it_and_defaults_for_all_options() -> None:
    table = entries("partition")
    assert set(table) >= {"iid", "shards", "class-shards", "classes", "dirichlet", "dirichlet-flasc", "natural"}
    for entry in table.values():
        assert entry.doc
        assert entry.make() == entry.make()


# -- each its own ----------------------------------------------------------------------------------------------------


@SOME
@given(cases("iid"), KEYS)
def test_iid_parts_differ_by_one_example_at_most(case, key) -> None:
    split, labels, clients = case
    sizes = split.assign(labels, clients, key).sizes()
    assert sizes.tolist() == [len(part) for part in np.array_split(labels, clients)]


@SOME
@given(data_sets(), KEYS, st.integers(1, 4), st.integers(6, 11))
def test_strict_shards_give_no_client_more_classes_than_shards(labels, key, per, clients) -> None:
    a = Shards(per, strict=True).assign(labels, clients, key)
    assert max(class_count(labels, a, i) for i in range(clients)) <= per
    assert len(a.order) == len(labels)


def test_shards_of_mnist_size_are_two_blocks_of_three_hundred_each() -> None:
    labels = np.repeat(np.arange(10), 6000)
    a = Shards().assign(labels, 100, Key(3))
    assert set(a.sizes().tolist()) == {600}
    assert max(class_count(labels, a, i) for i in range(100)) == 2
    blocks = np.sort(a.order.reshape(200, 300)[:, 0])
    np.testing.assert_array_equal(blocks, np.arange(200) * 300)


@SOME
@given(cases("classes"), KEYS)
def test_classes_gives_every_client_exactly_so_many_classes(case, key) -> None:
    split, labels, clients = case
    a = split.assign(labels, clients, key)
    assert {class_count(labels, a, i) for i in range(clients)} == {split.per_client}


@pytest.mark.parametrize(("n", "classes", "per"), [(60_000, 10, 2), (50_000, 100, 10), (50_000, 10, 3)])
def test_classes_gives_equal_sizes_where_classes_are_equal(n, classes, per) -> None:
    labels = np.arange(n) % classes
    a = Classes(per).assign(labels, 100, Key(5))
    assert len(a.order) == n
    assert set(a.sizes().tolist()) <= {n // 100} if per != 3 else abs(a.sizes() - n // 100).max() <= 3


@SOME
@given(cases("class-shards"), KEYS)
def test_class_shards_keep_to_the_fewest_and_the_most_classes(case, key) -> None:
    split, labels, clients = case
    a = split.assign(labels, clients, key)
    counts = [class_count(labels, a, i) for i in range(clients)]
    assert split.min_classes <= min(counts) <= max(counts) <= split.per_client


def test_class_shards_are_fifty_a_class_for_a_hundred_clients_of_five() -> None:
    labels = np.repeat(np.arange(10), 6000)
    a = ClassShards().assign(labels, 100, Key(0))
    explicit = ClassShards(shards_per_class=50).assign(labels, 100, Key(0))
    np.testing.assert_array_equal(a.order, explicit.order)
    assert set(a.sizes().tolist()) == {600}
    counts = [class_count(labels, a, i) for i in range(100)]
    assert min(counts) >= 2
    assert max(counts) <= 5


def test_class_shards_of_a_hundred_classes_leave_nobody_with_fewer_than_twenty() -> None:
    labels = np.arange(50_000) % 100
    a = ClassShards(per_client=50, min_classes=20).assign(labels, 100, Key(0))
    assert min(class_count(labels, a, i) for i in range(100)) >= 20


@SOME
@given(st.integers(1, 25), st.integers(1, 7), st.integers(1, 7), KEYS, st.data())
def test_swapping_always_succeeds_on_an_even_deck(clients, per, cards, key, data) -> None:
    deck = np.repeat(np.arange(cards), near_equal(clients * per, cards))
    different = np.count_nonzero(near_equal(clients * per, cards))
    hands = deck[key.permutation(len(deck)).numpy()].reshape(clients, per)
    least = data.draw(st.integers(1, min(per, different)))
    if sum(min(clients, int(n)) for n in np.bincount(deck)) < clients * least:
        return  # fewer cards than that cannot go round
    before = np.sort(hands.reshape(-1))
    swap_until(hands, least)
    assert min(len(set(hand)) for hand in hands.tolist()) >= least
    np.testing.assert_array_equal(np.sort(hands.reshape(-1)), before)


@SOME
@given(data_sets(), KEYS, st.sampled_from([0.5, 1.0, 10.0]), st.integers(1, 4), st.integers(1, 5))
def test_dirichlet_leaves_nobody_below_the_smallest_size(labels, key, alpha, least, clients) -> None:
    assert Dirichlet(alpha, least).assign(labels, clients, key).sizes().min() >= least


def test_dirichlet_gives_nothing_more_to_clients_that_have_their_fair_share() -> None:
    counts = np.array([300, 200, 500, 100])
    sizes = Dirichlet(alpha=0.3)._draw(counts, 20, 50, Key(2))  # (tries, classes, clients)
    held = np.cumsum(sizes, axis=1) - sizes
    full = held >= counts.sum() / 20
    assert full.any()
    assert not sizes[full].any()
    np.testing.assert_array_equal(sizes.sum(axis=2), np.tile(counts, (50, 1)))


def test_dirichlet_warns_and_goes_down_to_one_example_when_draws_are_fruitless(monkeypatch) -> None:
    monkeypatch.setattr("thinwire.data.partitions.dirichlet._TRIES", 50)
    labels = np.arange(400) % 10
    with pytest.warns(UserWarning, match="none of 50 draws"):
        a = Dirichlet(alpha=0.3, min_size=20).assign(labels, 20, Key(0))
    assert 1 <= a.sizes().min() < 20
    assert len(a.order) == 400


def test_dirichlet_says_so_when_every_draw_leaves_somebody_empty(monkeypatch) -> None:
    monkeypatch.setattr("thinwire.data.partitions.dirichlet._TRIES", 50)
    with pytest.raises(ConfigError, match="larger alpha or fewer clients"):
        Dirichlet(alpha=1e-3, min_size=1).assign(np.zeros(1000, int), 100, Key(0))


def test_a_small_alpha_is_more_uneven_than_a_large_one() -> None:
    labels = np.arange(20_000) % 10

    def unevenness(split) -> float:
        a = split.assign(labels, 50, Key(9))
        share = np.stack([np.bincount(labels[a.client(i)], minlength=10) / a.sizes()[i] for i in range(len(a))])
        return float(np.square(share).sum(axis=1).mean())  # 0.1 for the same mixture, 1 for one class

    for kind in (Dirichlet, DirichletFlasc):
        few, some, many = (unevenness(kind(alpha)) for alpha in (0.05, 1.0, 1000.0))
        assert few > 2 * some > 2 * many
        assert many == pytest.approx(0.1, abs=0.01)


def test_flasc_hands_out_each_class_in_file_order() -> None:
    labels = np.arange(2000) % 4
    a = DirichletFlasc(alpha=0.5).assign(labels, 30, Key(4))
    for k in range(4):
        taken = a.order[labels[a.order] == k]
        np.testing.assert_array_equal(taken, np.flatnonzero(labels == k)[: len(taken)])


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 7.0])
def test_gamma_numbers_have_the_mean_and_variance_of_the_distribution(alpha) -> None:
    draws = np.exp(log_gamma_draws(Key(11), alpha, (200_000,)))
    error = np.sqrt(alpha / 200_000)
    assert draws.mean() == pytest.approx(alpha, abs=5 * error)
    # the variance of a sample variance: (fourth moment - variance**2) / n
    assert draws.var() == pytest.approx(alpha, abs=5 * np.sqrt((2 * alpha**2 + 6 * alpha) / 200_000))


def test_gamma_numbers_pass_a_kolmogorov_smirnov_test() -> None:
    from scipy import stats

    for alpha in (0.3, 2.5):
        draws = np.exp(log_gamma_draws(Key(12), alpha, (20_000,)))
        assert stats.kstest(draws, stats.gamma(alpha).cdf).pvalue > 1e-3


def test_natural_takes_the_busiest_users_and_keeps_their_order() -> None:
    users = np.array([3, 1, 1, 0, 3, 3, 7, 7, 7])
    a = Natural().assign(np.zeros(9, int), 3, Key(0), users)
    assert [a.client(i).tolist() for i in range(3)] == [[0, 4, 5], [6, 7, 8], [1, 2]]


# -- refusals --------------------------------------------------------------------------------------------------------

TEN = np.arange(100) % 10


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (lambda: IID().assign(TEN, 0, Key(0)), "clients=0"),
        (lambda: IID().assign(TEN, 101, Key(0)), "clients=100 or fewer"),
        (lambda: Shards().assign(TEN, 60, Key(0)), "clients=50 or fewer"),
        (lambda: Shards(per_client=0), "per_client=0"),
        (lambda: Shards(1, strict=True).assign(TEN, 9, Key(0)), "cannot cover 10 classes"),
        (lambda: ClassShards(shards_per_class=20).assign(TEN, 100, Key(0)), "shards_per_class=0 to derive"),
        (lambda: ClassShards(shards_per_class=-1), "shards_per_class=-1"),
        (lambda: ClassShards(per_client=2, min_classes=3), "min_classes=3"),
        (lambda: ClassShards(per_client=20, min_classes=11).assign(TEN, 5, Key(0)), "min_classes=11"),
        (lambda: ClassShards(per_client=5).assign(TEN, 100, Key(0)), "cut a class of 10 examples into 50"),
        (lambda: Classes(11).assign(TEN, 5, Key(0)), "per_client=11"),
        (lambda: Classes(2).assign(TEN, 4, Key(0)), "write clients=5 or more"),
        (lambda: Dirichlet(alpha=0), "alpha=0"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha=nan"),
        (lambda: Dirichlet(min_size=0), "min_size=0"),
        (lambda: Dirichlet().assign(TEN, 11, Key(0)), "10 examples each; write clients=10 or fewer"),
        (lambda: DirichletFlasc(alpha=-1), "alpha=-1"),
        (lambda: Natural().assign(TEN, 3, Key(0)), "does not say who wrote what"),
        (lambda: Natural().assign(TEN, 3, Key(0), TEN % 2), "has 2 users"),
        (lambda: Shards().assign(TEN / 2, 3, Key(0)), "class number"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_says_what_to_write(attempt, says) -> None:
    with pytest.raises(ConfigError) as refused:
        attempt()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


# -- scale -----------------------------------------------------------------------------------------------------------


def python_calls(work) -> int:
    """How many Python functions a piece of work calls: vectorised work calls as many for any size, or nearly."""
    calls = 0

    def count(basis, event, arg) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    "split", [IID(), Shards(), Shards(strict=True), Classes(), Natural()], ids=lambda split: repr(split)
)
def test_a_million_clients_take_no_python_loop_over_clients(split) -> None:
    def calls(clients: int) -> int:
        labels, users = np.arange(2 * clients) % 10, np.arange(2 * clients) // 2
        return python_calls(lambda: split.assign(labels, clients, Key(0), users))

    assert calls(1_000_000) < calls(1_000) + 2_000


def test_a_million_clients_have_a_million_parts() -> None:
    a = IID().assign(np.zeros(1_000_003, np.int64), 1_000_000, Key(0))
    assert len(a) == 1_000_000
    assert a.sizes().max() - a.sizes().min() == 1
    assert (np.sort(a.order) == np.arange(1_000_003)).all()
