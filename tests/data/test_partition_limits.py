"""Partitions: invalid options, and a million clients."""

import sys

import numpy as np
import pytest

from thinwire.core.key import Key
from thinwire.data.partition import (
    IID,
    Classes,
    ClassShards,
    Dirichlet,
    DirichletFlasc,
    Feature,
    Natural,
    Quantity,
    Shards,
)
from thinwire.errors import ConfigError

TEN = np.arange(100) % 10


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: IID().assign(TEN, 0, Key(0)), "clients=0"),
        (lambda: IID().assign(TEN, 101, Key(0)), "are for 1 to 100 clients"),
        (lambda: Shards().assign(TEN, 60, Key(0)), "are for 1 to 50 clients"),
        (lambda: Shards(per_client=0), "per_client must be 1 or more, not 0"),
        (lambda: ClassShards(shards_per_class=20).assign(TEN, 100, Key(0)), "shards_per_class=0 to derive"),
        (lambda: ClassShards(shards_per_class=-1), "shards_per_class must be 0 or more"),
        (lambda: ClassShards(per_client=2, min_classes=3).assign(TEN, 5, Key(0)), "a client can have 2; write 2"),
        (lambda: ClassShards(per_client=20, min_classes=11).assign(TEN, 5, Key(0)), "min_classes=11"),
        (lambda: ClassShards(per_client=5).assign(TEN, 100, Key(0)), "divide a class of 10 examples into 50"),
        (lambda: Classes(11).assign(TEN, 5, Key(0)), "per_client=11"),
        (lambda: Classes(2).assign(TEN, 4, Key(0)), "write clients=5 or more"),
        (lambda: Dirichlet(alpha=0), "alpha must be above 0"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha must be above 0"),
        (lambda: Dirichlet(min_size=0), "min_size must be 1 or more"),
        (lambda: Dirichlet().assign(TEN, 11, Key(0)), "10 or more each, are for 1 to 10 clients"),
        (
            lambda: Quantity(0.01).assign(TEN, 50, Key(0)),
            "quantity with alpha=0.01 and clients=50: none of 10000 draws",
        ),
        (lambda: Quantity(alpha=0), "alpha must be above 0"),
        (lambda: Feature(noise=-1), "noise must be 0 or more"),
        (lambda: Feature().assign(TEN, 101, Key(0)), "are for 1 to 100 clients"),
        (lambda: DirichletFlasc(alpha=-1), "alpha must be above 0"),
        (lambda: Natural().assign(TEN, 3, Key(0)), "this dataset has no users"),
        (lambda: Natural().assign(TEN, 3, Key(0), TEN % 2), "has 2 users"),
        (lambda: Shards().assign(TEN / 2, 3, Key(0)), "one class label per example"),
    ],
)
def test_invalid_options_are_an_error_of_one_line(attempt, message) -> None:
    with pytest.raises(ConfigError) as caught:
        attempt()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def python_calls(work) -> int:
    """The number of Python functions that a call makes: nearly constant in the size for vectorized code."""
    calls = 0

    def count(frame, event, arg) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("partition", [IID(), Shards(), Classes(), Natural()], ids=lambda partition: repr(partition))
def test_many_clients_need_no_python_loop_over_clients(partition) -> None:
    def calls(clients: int) -> int:
        labels, users = np.arange(2 * clients) % 10, np.arange(2 * clients) // 2
        return python_calls(lambda: partition.assign(labels, clients, Key(0), users))

    assert calls(100_000) < calls(1_000) + 2_000


def test_a_million_clients_have_a_million_parts() -> None:
    a = IID().assign(np.zeros(1_000_003, np.int64), 1_000_000, Key(0))
    assert len(a) == 1_000_000
    assert a.sizes().max() - a.sizes().min() == 1
    assert (np.sort(a.order) == np.arange(1_000_003)).all()
