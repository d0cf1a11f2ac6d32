"""Searches over artificial measures: successive halving and FLASC-S."""

import math

import pytest

from thinwire.errors import ConfigError
from thinwire.search.candidates import Knob
from thinwire.search.trials import Trial
from thinwire.search.tune import best_of, flasc_search, halving, ladder, plan

RATES = ladder(1.0, 8)  # 1/8 to 16


def rate_of(point):
    return point[0][1]


def rates_of(rung):
    return tuple(rate_of(trial.point) for trial in rung)


def counted(accuracy, status=lambda rate, rounds: "finished", loss=lambda rate: 0.0):
    calls = []

    def measure(point, rounds):
        rate = rate_of(point)
        calls.append((rate, rounds))
        return Trial(point, accuracy(rate), loss(rate), 10 * rounds, rounds, status(rate, rounds))

    return of_all(measure), calls


def of_all(measure):
    return lambda points, rounds: [measure(point, rounds) for point in points]


def halved(measure, **options):
    return halving(measure, [(("lr", rate),) for rate in RATES], 40, **options)


def best(measure, **options):
    found = best_of(halved(measure, **options))
    return found and rate_of(found.point)


def closeness(best):
    return lambda rate: 1 / (1 + abs(rate - best))


def test_each_rung_keeps_the_better_half_and_doubles_the_rounds():
    measure, calls = counted(closeness(4.0))
    rungs = halved(measure)
    assert [rung[0].rounds for rung in rungs] == [5, 10, 20, 40]
    assert [rates_of(rung) for rung in rungs] == [RATES, (0.5, 1.0, 2.0, 4.0), (2.0, 4.0), (4.0,)]
    assert best_of(rungs) is rungs[-1][0]
    assert sum(rounds for _, rounds in calls) == 4 * 40


def test_the_start_is_in_the_last_rung_and_recommended_if_it_is_better():
    start = (("lr", 0.3),)
    measure, calls = counted(closeness(4.0))
    rungs = halved(measure, start=start)
    assert [len(rung) for rung in rungs] == [8, 4, 2, 2]
    assert rates_of(rungs[-1]) == (4.0, 0.3)
    assert rate_of(best_of(rungs).point) == 4.0
    assert len([one for one in calls if one == (0.3, 40)]) == 1
    assert best(counted(closeness(0.3))[0], start=start) == 0.3
    again = halved(counted(closeness(4.0))[0], start=(("lr", 4.0),))
    assert len(again[-1]) == 1, "the start has won the other rungs"
    late = counted(closeness(4.0), lambda rate, rounds: "collapsed" if rate == 4.0 and rounds == 40 else "finished")
    assert best(late[0], start=start) == 0.3


def test_runs_that_send_too_much_are_no_result():
    rungs = halved(counted(closeness(4.0))[0])
    assert [best_of(rungs, most).rounds for most in (400, 399, 99)] == [40, 20, 5]
    assert best_of(rungs, 9) is None


@pytest.mark.parametrize(("wanted", "expected"), [(64.0, 64.0), (1 / 64, 1 / 64), (1e9, 256.0), (1e-9, 2.0**-7)])
def test_a_best_rate_at_an_end_extends_the_ladder_there_up_to_a_bound(wanted, expected):
    measure, calls = counted(lambda rate: -abs(math.log2(rate / wanted)))
    rungs = halved(measure, extend=4)
    assert rate_of(best_of(rungs).point) == expected
    assert len([rate for rate, rounds in calls if rounds == 5]) <= 12
    assert [len(rung) for rung in rungs[1:]] == [4, 2, 1], "later rungs cost the same"
    assert list(rates_of(rungs[0])) == sorted(rates_of(rungs[0]))
    assert best(measure) == (16.0 if wanted > 1 else 0.125)


def test_rates_that_fail_are_out():
    measure, calls = counted(closeness(1.0), lambda rate, rounds: "diverged")
    rungs = halved(measure, extend=4)
    assert (best_of(rungs), len(rungs), len(calls)) == (None, 1, 12)
    assert rate_of(rungs[0][0].point) == 0.125 / 16, "smaller rates are tried if all fail"
    measure, _ = counted(closeness(1.0), lambda rate, rounds: "finished" if rate < 0.1 else "diverged")
    assert best(measure, extend=4) == 0.0625
    # the larger rates are the best of short runs and collapse in long ones
    measure, _ = counted(closeness(16.0), lambda rate, rounds: "collapsed" if rate * rounds > 100 else "finished")
    rungs = halved(measure)
    assert [rates_of(rung) for rung in rungs[1:]] == [(2.0, 4.0, 8.0, 16.0), (4.0, 8.0), (4.0,)]
    assert rate_of(best_of(rungs).point) == 2.0, "the best that never failed; it is of the second rung"
    for status, count in (("at chance", 8), ("at chance so far", 15)):
        measure, calls = counted(closeness(1.0), lambda rate, rounds, status=status: status)
        assert best(measure) is None
        assert len(calls) == count, "a short run may go on"


def test_ties_are_decided_by_loss_then_by_bytes():
    measure, _ = counted(lambda rate: 0.9, loss=lambda rate: abs(rate - 0.5))
    assert best(measure) == 0.5
    measure, _ = counted(lambda rate: 0.9, loss=lambda rate: 3.0 if rate == 2.0 else math.nan)
    assert best(measure) == 2.0
    assert best(of_all(lambda one, rounds: Trial(one, 0.9, 1.0, int(abs(rate_of(one) - 8) * 9), rounds))) == 8.0
    measure, _ = counted(  # accuracies at chance are noise
        lambda rate: 0.11 if rate == 1.0 else 0.1,
        lambda rate, rounds: "at chance so far" if rounds < 40 else "finished",
        lambda rate: abs(rate - 4),
    )
    assert best(measure) == 4.0
    assert best(of_all(lambda one, rounds: Trial(one, None, abs(rate_of(one) - 4), 1, rounds))) == 4.0


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ConfigError, match="the last needs 8 rounds or more, not 7"):
        plan(8, 7)
    for count in (1, 65):
        with pytest.raises(ConfigError, match="from 2 to 64 rates"):
            ladder(1.0, count)
    assert ladder(0.3, 3) == (0.15, 0.3, 0.6)


def test_halving_takes_candidates_of_any_kind():
    points = [(("lr", rate), ("k", k)) for rate in (0.1, 0.3, 1.0) for k in (64, 128)]

    def measure(point, rounds):
        rate, k = dict(point).values()
        status = "diverged" if rate == 1.0 else "finished"
        return Trial(point, None, abs(rate - 0.3) + 1 / k, 10, rounds, status)

    rungs = halving(of_all(measure), points, 16)
    assert best_of(rungs).point == points[3]
    assert [(len(rung), rung[0].rounds) for rung in rungs] == [(6, 2), (3, 4), (2, 8), (1, 16)]
    assert [trial.point for trial in rungs[0]] == points


# -- FLASC-S ---------------------------------------------------------------------------------------------------------


def pairs_of(accuracy, sizes, shares):
    calls = []

    def measure(point, rounds):
        size, share = dict(point).values()
        calls.append((size, share))
        return Trial(point, accuracy(size, share), 0.0, int(1000 * size * share), rounds)

    rungs = flasc_search(of_all(measure), Knob("r", (), sizes), Knob("d", (), shares), 40)
    return tuple(value for _, value in best_of(rungs).point), calls


def test_flasc_s_stops_at_the_first_density_at_which_the_larger_rank_wins():
    # below a density of 1/4 a larger rank is worse
    found, calls = pairs_of(lambda r, d: r if d >= 0.25 or r == 1 else 0, (1, 4, 16), (0.0625, 0.25, 1.0))
    assert calls == [(1, 0.25), (4, 0.0625), (1, 1.0), (4, 0.25), (16, 0.25)]
    assert found == (16, 0.25)
    # the larger rank never wins: the density is the largest, and the first run is the best
    found, calls = pairs_of(lambda r, d: -r, (1, 4, 16), (0.25, 0.5, 1.0))
    assert found == (1, 1.0)
    assert len(set(calls)) == len(calls), "rank 1 with all values is measured once"
    # of equal runs the cheaper one
    assert pairs_of(lambda r, d: 0.5, (1, 4), (0.25, 1.0))[0] == (1, 1.0)
    # 3 * 3 / 2 bits is no whole number
    assert pairs_of(lambda k, bits: k * bits, (2, 3, 8), (3, 8))[1] == [(2, 4), (3, 3), (8, 3)]
