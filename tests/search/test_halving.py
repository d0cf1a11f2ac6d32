"""Searches over artificial measures: successive halving, FLASC-S, and the runs that confirm a result."""

import math

import pytest

from thinwire.errors import ConfigError
from thinwire.search.halving import BudgetSpent, Trial, confirm, flasc_s, halve_rates, halving, ladder, plan

RATES = ladder(1.0, 8)  # 1/8 to 16


def counted(accuracy, status=lambda rate, rounds: "finished", loss=lambda rate: 0.0):
    calls = []

    def measure(rate, rounds):
        calls.append((rate, rounds))
        return Trial(rate, accuracy(rate), loss(rate), 10 * rounds, rounds, status(rate, rounds))

    return measure, calls


def closeness(best):
    return lambda rate: 1 / (1 + abs(rate - best))


def test_each_rung_keeps_the_better_half_and_doubles_the_rounds():
    measure, calls = counted(closeness(4.0))
    rungs = []
    found = halve_rates(measure, RATES, 40, on_rung=rungs.append)
    assert found.value == 4.0
    assert [(len(rung.trials), rung.rounds) for rung in found.rungs] == [(8, 5), (4, 10), (2, 20), (1, 40)]
    assert [rung.kept for rung in found.rungs] == [(4.0, 2.0, 1.0, 0.5), (4.0, 2.0), (4.0,), ()]
    assert calls[0] == (1.0, 5), "the method's own rate is tried first"
    assert tuple(rungs) == found.rungs
    assert found.rounds == sum(rounds for _, rounds in calls) == 4 * 40
    assert found.bytes == 10 * found.rounds
    assert not found.stopped


@pytest.mark.parametrize(("best", "expected"), [(64.0, 64.0), (1 / 64, 1 / 64), (1e9, 256.0), (1e-9, 2.0**-7)])
def test_a_best_rate_at_an_end_extends_the_ladder_there_up_to_a_bound(best, expected):
    measure, calls = counted(lambda rate: -abs(math.log2(rate / best)))
    found = halve_rates(measure, RATES, 40, extend=4)
    assert found.value == expected
    assert len([rate for rate, rounds in calls if rounds == 5]) <= 12
    assert [len(rung.trials) for rung in found.rungs[1:]] == [4, 2, 1], "later rungs cost the same"
    assert list(found.tried) == sorted(found.tried)
    assert halve_rates(measure, RATES, 40).value == (16.0 if best > 1 else 0.125)


def test_rates_that_fail_are_out():
    measure, calls = counted(closeness(1.0), lambda rate, rounds: "diverged")
    found = halve_rates(measure, RATES, 40, extend=4)
    assert (found.value, len(found.rungs), len(calls)) == (None, 1, 12)
    assert min(found.tried) == 0.125 / 16, "smaller rates are tried if all fail"
    measure, _ = counted(closeness(1.0), lambda rate, rounds: "finished" if rate < 0.1 else "diverged")
    assert halve_rates(measure, RATES, 40, extend=4).value == 0.0625
    # the larger rates are the best of short runs and collapse in long ones
    measure, _ = counted(closeness(16.0), lambda rate, rounds: "collapsed" if rate * rounds > 100 else "finished")
    found = halve_rates(measure, RATES, 40)
    assert [rung.kept for rung in found.rungs[1:]] == [(8.0, 4.0), (4.0,), ()]
    assert found.value == 2.0, "the best that never failed; it is of the second rung"
    for status, count in (("at chance", 8), ("at chance so far", 15)):
        measure, calls = counted(closeness(1.0), lambda rate, rounds, status=status: status)
        assert halve_rates(measure, RATES, 40).value is None
        assert len(calls) == count, "a short run may go on"


def test_ties_are_decided_by_loss_then_by_bytes():
    measure, _ = counted(lambda rate: 0.9, loss=lambda rate: abs(rate - 0.5))
    assert halve_rates(measure, RATES, 40).value == 0.5
    measure, _ = counted(lambda rate: 0.9, loss=lambda rate: 3.0 if rate == 2.0 else math.nan)
    assert halve_rates(measure, RATES, 40).value == 2.0
    found = halve_rates(lambda rate, rounds: Trial(rate, 0.9, 1.0, int(abs(rate - 8) * 9), rounds), RATES, 40)
    assert found.value == 8.0
    measure, _ = counted(  # accuracies at chance are noise
        lambda rate: 0.11 if rate == 1.0 else 0.1,
        lambda rate, rounds: "at chance so far" if rounds < 40 else "finished",
        lambda rate: abs(rate - 4),
    )
    assert halve_rates(measure, RATES, 40).value == 4.0
    assert halve_rates(lambda rate, rounds: Trial(rate, None, abs(rate - 4), 1, rounds), RATES, 40).value == 4.0


def test_a_spent_budget_returns_the_best_so_far():
    def within(limit):
        spent = 0

        def measure(rate, rounds):
            nonlocal spent
            if spent + 10 * rounds > limit:
                raise BudgetSpent(limit - spent + 1, 2)
            spent += 10 * rounds
            return Trial(rate, closeness(2.0)(rate), 0.0, 10 * rounds, rounds)

        return halve_rates(measure, RATES, 40)

    first = within(5 * 50)  # in the first rung: the rates around the middle
    assert first.stopped
    assert first.tried == (0.25, 0.5, 1.0, 2.0, 4.0)
    assert (first.value, first.bytes, first.rounds) == (2.0, 251, 27)
    second = within(8 * 50 + 100)  # the best of the first rung is the first of the second
    assert ([len(rung.trials) for rung in second.rungs], second.value) == ([8, 1], 2.0)
    with pytest.raises(ConfigError, match="before one run finished"):
        within(10)
    assert not within(10_000).stopped


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(ConfigError, match="the last needs 8 rounds or more, not 7"):
        plan(8, 7)
    for count in (1, 65):
        with pytest.raises(ConfigError, match="from 2 to 64 rates"):
            ladder(1.0, count)
    assert ladder(0.3, 3) == (0.15, 0.3, 0.6)


def test_halving_takes_candidates_of_any_kind():
    points = [(rate, k) for rate in (0.1, 0.3, 1.0) for k in (64, 128)]

    def measure(point, rounds):
        status = "diverged" if point[0] == 1.0 else "finished"
        return Trial(point, None, abs(point[0] - 0.3) + 1 / point[1], 10, rounds, status, "loss")

    found = halving(measure, points, 16, key=points.index)
    assert found.value == (0.3, 128)
    assert [(len(rung.trials), rung.rounds) for rung in found.rungs] == [(6, 2), (3, 4), (2, 8), (1, 16)]
    assert [trial.value for trial in found.rungs[0].trials] == points


# -- FLASC-S ---------------------------------------------------------------------------------------------------------


def pairs_of(accuracy, sizes, shares):
    calls = []

    def measure(pair, rounds):
        calls.append(pair)
        return Trial(pair, accuracy(*pair), 0.0, int(1000 * pair[0] * pair[1]), rounds)

    return flasc_s(measure, sizes, shares, 40), calls


def test_flasc_s_stops_at_the_first_density_at_which_the_larger_rank_wins():
    # below a density of 1/4 a larger rank is worse
    found, calls = pairs_of(lambda r, d: r if d >= 0.25 or r == 1 else 0, (1, 4, 16), (0.0625, 0.25, 1.0))
    assert calls == [(1, 0.25), (4, 0.0625), (1, 1.0), (4, 0.25), (16, 0.25)]
    assert found.value == (16, 0.25)
    assert found.bytes == sum(int(1000 * r * d) for r, d in calls)
    # the larger rank never wins: the density is the largest, and the first run is the best
    found, calls = pairs_of(lambda r, d: -r, (1, 4, 16), (0.25, 0.5, 1.0))
    assert found.value == (1, 1.0)
    assert len(set(calls)) == len(calls), "rank 1 with all values is measured once"
    # of equal runs the cheaper one
    assert pairs_of(lambda r, d: 0.5, (1, 4), (0.25, 1.0))[0].value == (1, 1.0)
    # 3 * 3 / 2 bits is no whole number
    assert pairs_of(lambda k, bits: k * bits, (2, 3, 8), (3, 8))[1] == [(2, 4), (3, 3), (8, 3)]


def test_flasc_s_returns_the_best_so_far_if_the_budget_is_spent():
    def measure(pair, rounds):
        if pair[0] == 16:
            raise BudgetSpent(7)
        return Trial(pair, pair[0] * pair[1] / 4, 0.0, 100, rounds)

    found = flasc_s(measure, (1, 4, 16), (0.25, 1.0), 40)
    assert (found.value, found.bytes, found.stopped) == ((4, 1.0), 100 * len(found.trials) + 7, True)
    with pytest.raises(ConfigError, match="before one run finished"):
        flasc_s(measure, (16, 32), (1.0,), 40)


# -- confirmation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "start", "value", "words"),
    [
        ((0.9, "finished"), (0.8, "finished"), "a", "confirmed over 60 rounds: 90.00 %"),
        ((0.7, "finished"), (0.8, "finished"), "b", "the result is worse than the start setting over 60 rounds"),
        (
            (0.9, "collapsed"),
            (0.8, "finished"),
            "b",
            "the result fails over 60 rounds: collapsed, the start setting 80",
        ),
        ((0.9, "finished"), (0.1, "diverged"), "a", "confirmed over 60 rounds: 90.00 % (10 B), the start setting div"),
        ((0.1, "at chance so far"), (0.1, "at chance"), None, "neither trains over 60 rounds: at chance, the start"),
        (None, (0.8, "finished"), "a", "not confirmed over 60 rounds: the budget was spent"),
        ((0.9, "finished"), None, "a", "the start setting was not run"),
    ],
)
def test_the_better_of_the_two_full_runs_is_recommended(found, start, value, words):
    def measure(name, rounds):
        assert rounds == 60
        if (given := {"a": found, "b": start}[name]) is None:
            raise BudgetSpent(7)
        return Trial(name, given[0], 0.5, 10, rounds, given[1])

    result = confirm(measure, "a", "b", 60)
    assert result.value == value
    assert words in result.text


def test_if_the_result_is_the_start_setting_there_is_one_run():
    measure, calls = counted(lambda value: 0.9)
    text = "confirmed over 60 rounds: 90.00 % (600 B), which is the start setting"
    assert (confirm(measure, "a", "a", 60).text, len(calls)) == (text, 1)
    failed, _ = counted(lambda value: 0.9, lambda value, rounds: "collapsed")
    assert confirm(failed, "a", "a", 60).value is None
