"""The search for rank and density."""

import pytest

from thinwire.errors import ConfigError
from thinwire.run.config import resolve
from thinwire.run.tune import search, tune


def counted(accuracy):
    calls = []

    def measure(rank, density):
        calls.append((rank, density))
        return accuracy(rank, density), int(1000 * rank * density)

    return measure, calls


def test_stops_at_the_first_density_at_which_the_larger_rank_wins():
    # below a density of 1/4 a larger rank is worse
    measure, calls = counted(lambda r, d: r if d >= 0.25 or r == 1 else 0)
    found = search(measure, (1, 4, 16), (0.0625, 0.25, 1.0))
    assert calls == [(1, 0.25), (4, 0.0625), (1, 1.0), (4, 0.25), (16, 0.25)]
    assert (found.rank, found.density) == (16, 0.25)
    assert found.bytes == sum(int(1000 * r * d) for r, d in calls)
    assert not any(one.clipped for one in found.tried)


def test_if_the_larger_rank_never_wins_nothing_is_masked():
    measure, calls = counted(lambda r, d: -r)
    found = search(measure, (1, 4, 16), (0.25, 0.5))
    assert found.density == 1.0
    assert found.rank == 4
    assert len(set(calls)) == len(calls)  # rank 1 without a mask is measured once
    assert search(measure, (1, 4), (0.5,)).tried[0].clipped  # 0.5 * 4 / 1 is above 1
    assert found.tried[0] == (1, 1.0, -1, 1000, True)  # of equal cost at density 0.25, not any more at 0.5


def test_real_runs():
    experiment = resolve("flasc", "digits", {"rounds": 2, "cohort.size": 2, "local.epochs": 1})
    found = tune(experiment, (1, 2, 4), (0.5,))
    assert {one.rank for one in found.tried} == {1, 2, 4}
    assert found.rank in (2, 4)
    assert found.bytes > 0


def test_what_makes_no_sense_is_refused():
    for ranks, densities in (((4,), (1.0,)), ((4, 1), (1.0,)), ((1, 4), ()), ((1, 4), (0.5, 0.25)), ((1, 4), (2.0,))):
        with pytest.raises(ConfigError, match="ascend"):
            search(lambda r, d: (0.0, 0), ranks, densities)
    with pytest.raises(ConfigError, match="start from flasc"):
        tune(resolve("lora", "digits"), (1, 4), (1.0,))
