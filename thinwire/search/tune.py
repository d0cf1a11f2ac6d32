"""`tw.tune` and `thinwire tune`: search the learning rate, any settings, or a method, by runs on validation examples.

Successive halving gives long runs to few candidates:

    rung 1        n candidates, each with T / 2^(L - 1) rounds          L = 1 + ceil(log2 n)
    rung i + 1    the better half of rung i, each with twice the rounds
    rung L        one candidate, T rounds

Each rung trains from round 1 with a number of rounds of its own, so that schedules end with the run. A candidate whose
run fails in a rung is out. The result is the best candidate of the longest rung that has one which never failed. Paper:
Non-stochastic Best Arm Identification and Hyperparameter Optimization (Jamieson and Talwalkar, AISTATS 2016).

FLASC-S searches a size r, such as a rank, and a share d, such as a density, with runs of all rounds (FLASC, 2024; as in
its text: the printed algorithm uses the index of the density as the index of a rank):

    stage 1   for d in shares:  stop when (r2, d) beats (r1, min(d_max, d r2 / r1))
    stage 2   (r, d) for all other sizes r
    result    the best of all runs

A result is run in full, beside the setting that the search started from. The search has a seed of its own, which must
not be one of the seeds of a final comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from thinwire.core.text import human_bytes, percent, read_bytes
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.protocol.method import Method
from thinwire.runs.check import check
from thinwire.runs.config import to_table
from thinwire.runs.options import Options, overrides_of
from thinwire.runs.search_record import SearchRecord
from thinwire.runs.toml import Table, flat
from thinwire.search.candidates import (
    Knob,
    Knobs,
    Make,
    Point,
    changes,
    knobs_of,
    maker,
    point_text,
    points,
    rate_key,
    start_of,
)
from thinwire.search.trials import Measure, Trial, ValidationRuns, over as with_rounds, ranked

SEARCH_SEED = 100  # by default; seeds of comparisons begin at 0
RATES = 8
MAX_CANDIDATES = 64
VALIDATION_FRACTION = 0.1
METHODS = ("fedavg", "int4", "topk+int8", "ef+topk+int4", "fedpara", "flasc", "mapo", "thin")  # for bytes or accuracy


class NothingTrains(ConfigError):
    """Every candidate of a search diverges, collapses or stays at chance, or none does what is wanted."""


class Rung(NamedTuple):
    """Runs of equal length, in the order of their candidates, and the candidates of the next rung, the best first."""

    number: int
    rounds: int
    trials: tuple[Trial, ...]
    kept: tuple[Point, ...] = ()


OnSearch = Callable[[Settings, Trial | Rung], Any]  # is called with each run and each rung that ends


class Confirmation(NamedTuple):
    """The full runs after a search.

    Args:
        point: what is recommended; None if neither run trains.
        rounds: of each run.
        found: the run of the result of the search; None without full runs.
        start: the run of the start setting; None if both are the same.
        text: the outcome in one sentence.
    """

    point: Point | None
    rounds: int
    found: Trial | None = None
    start: Trial | None = None
    text: str = ""


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of a search.

    Args:
        settings: what is recommended, by dotted path, as for `tw.resolve(..., overrides=...)`.
        experiment: the experiment with these settings, on all examples and with its own seed.
        knobs: the settings that were searched.
        rungs: the runs of the search, rung by rung.
        found: the best candidate of the search.
        confirmation: the full runs of the result and of the start setting.
        chosen_by: the criterion in words.
        seed: the seed of the search.
    """

    settings: Table
    experiment: Settings
    knobs: tuple[Knob, ...]
    rungs: tuple[Rung, ...]
    found: Point
    confirmation: Confirmation
    chosen_by: str
    seed: int

    @property
    def method(self) -> Method:
        """The method with the recommended settings, for `tw.simulate`."""
        return self.experiment.method

    @property
    def trials(self) -> list[Trial]:
        """The runs of the search."""
        return [trial for rung in self.rungs for trial in rung.trials]

    @property
    def bytes(self) -> int:
        """Bytes of the search, without those of the full runs that confirm it."""
        return sum(trial.bytes for trial in self.trials)

    @property
    def rounds(self) -> int:
        """Rounds of all runs of the search."""
        return sum(trial.rounds for trial in self.trials)

    @property
    def tried(self) -> tuple[Point, ...]:
        """All candidates; rates ascend."""
        return tuple(trial.point for trial in self.rungs[0].trials)

    @property
    def record(self) -> SearchRecord:
        """What a run that uses a rate that was found states about it."""
        rungs = tuple((len(rung.trials), rung.rounds) for rung in self.rungs)
        tried, value = tuple(point[0][1] for point in self.tried), self.found[0][1]
        key = self.knobs[0].paths[0]
        return SearchRecord(key, value, tried, rungs, self.seed, self.chosen_by, self.rounds, self.bytes)

    def __repr__(self) -> str:
        name = f"{self.experiment.name} on {self.experiment.task.label}"
        cost = f"{len(self.tried)} candidates, {self.rounds:,} rounds, {human_bytes(self.bytes)}"
        best = point_text(self.confirmation.point or self.found)
        lines = (f"Tuned {name}: {best}", f"  {self.confirmation.text}", f"  by {self.chosen_by}", f"  search: {cost}")
        return "\n".join(lines)


# -- searches over any measure -----------------------------------------------------------------------------------------


def ladder(center: float, count: int) -> tuple[float, ...]:
    """Rates a factor of 2 apart around one, with one more above it than below if their number is even.

    >>> ladder(0.5, 8)
    (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    """
    if not 2 <= count <= MAX_CANDIDATES:
        raise ConfigError(f"a search takes from 2 to {MAX_CANDIDATES} rates, not {count}; write for example 8")
    below = (count - 1) // 2
    return tuple(math.ldexp(center, i - below) for i in range(count))


def plan(count: int, rounds: int) -> list[tuple[int, int]]:
    """The number of candidates and of rounds of each rung.

    >>> plan(8, 60), plan(5, 100)
    ([(8, 7), (4, 15), (2, 30), (1, 60)], [(5, 12), (3, 25), (2, 50), (1, 100)])
    """
    counts = [count]
    while counts[-1] > 1:
        counts.append((counts[-1] + 1) // 2)
    last = len(counts) - 1
    if not rounds >> last:
        raise ConfigError(
            f"{count} candidates are searched in {last + 1} rungs, each with twice the rounds of the one before it: "
            f"the last needs {1 << last} rounds or more, not {rounds}; write more rounds, or fewer candidates"
        )
    return [(number, rounds >> (last - i)) for i, number in enumerate(counts)]


def halving(
    measure: Measure,
    candidates: Sequence[Point],
    rounds: int,
    *,
    rank: Callable[[Iterable[Trial]], list[Trial]] = ranked,
    extend: int = 0,
    on_rung: Callable[[Rung], Any] = lambda rung: None,
) -> tuple[Rung, ...]:
    """Successive halving.

    Args:
        measure: runs a candidate for a number of rounds.
        candidates: in the order of the tables.
        rounds: of the last rung.
        rank: sorts the trials of a rung, the best first.
        extend: if the best of ascending rates is at an end, or all fail, up to so many more are tried there (below the
            smallest, if all fail).
        on_rung: is called with each rung when it ends.

    >>> def measure(point, rounds):
    ...     return Trial(point, 1 - abs(point[0][1] - 1.0) / 10, 0.0, bytes=100 * rounds, rounds=rounds)
    >>> rungs = halving(measure, [(("lr", rate),) for rate in (0.5, 1.0, 2.0, 4.0)], rounds=8)
    >>> best_of(rungs), [(rung.rounds, len(rung.trials)) for rung in rungs]
    ((('lr', 1.0),), [(2, 4), (4, 2), (8, 1)])
    """
    rungs: list[Rung] = []
    steps, ahead = plan(len(candidates), rounds), list(candidates)
    for (_, length), (following, _) in zip(steps, [*steps[1:], (0, 0)], strict=True):
        trials = [measure(point, length) for point in ahead]
        for _ in range(0 if rungs else extend):
            best = ranked(trials)[0]
            if best.failed or best is trials[0]:
                trials.insert(0, measure(_times(trials[0].point, 0.5), length))
            elif best is trials[-1]:
                trials.append(measure(_times(best.point, 2.0), length))
        kept = [trial.point for trial in rank(trials) if not trial.failed][:following]
        rungs.append(Rung(len(rungs) + 1, length, tuple(trials), tuple(kept)))
        on_rung(rungs[-1])
        ahead = [trial.point for trial in trials if trial.point in kept]
        if not ahead:
            break
    return tuple(rungs)


def _times(rate: Point, factor: float) -> Point:
    return tuple((name, value * factor) for name, value in rate)


def flasc_search(measure: Measure, size: Knob, share: Knob, rounds: int) -> tuple[Rung, ...]:
    """FLASC-S over the ascending values of a size and a share; no pair is measured twice.

    >>> def measure(point, rounds):
    ...     size, share = dict(point).values()
    ...     return Trial(point, min(size * share, 2.0) / 4 + size / 100, 0.0, int(100 * size * share), rounds)
    >>> rungs = flasc_search(measure, Knob("r", (), (1, 2, 4)), Knob("d", (), (0.25, 0.5, 1.0)), rounds=40)
    >>> best_of(rungs), len(rungs[0].trials)
    ((('r', 4), ('d', 0.25)), 3)
    """
    trials: dict[Point, Trial] = {}
    (small, large), top = size.values[:2], share.values[-1]

    def run(r: Any, d: Any) -> Trial:
        point = (size.name, r), (share.name, d)
        trials[point] = trials.get(point) or measure(point, rounds)
        return trials[point]

    chosen = top
    for d in share.values:
        equal = d * large / small  # about as many values as (large, d) sends
        low, high = run(small, min(top, math.floor(equal) if isinstance(top, int) else equal)), run(large, d)
        if not high.failed and ranked([low, high])[0] is high:
            chosen = d
            break
    for r in size.values[1:]:
        run(r, chosen)
    return (Rung(1, rounds, tuple(trials.values())),)


def best_of(rungs: Sequence[Rung]) -> Point | None:
    """The best candidate of the longest rung that has one which never failed and is above chance."""
    out = {trial.point for rung in rungs for trial in rung.trials if trial.failed}
    order = (trial for rung in reversed(rungs) for trial in ranked(rung.trials))
    return next((one.point for one in order if one.point not in out and one.status == "finished"), None)


def confirm(measure: Measure, found: Point, start: Point, rounds: int) -> Confirmation:
    """Run the result of a search and the start setting in full; the better one that does not fail is recommended.

    >>> def measure(point, rounds):  # 2 was the best of shorter runs
    ...     return Trial(point, {1: 0.9, 2: 0.8}[dict(point)["lr"]], 0.5, bytes=10, rounds=rounds)
    >>> print(confirm(measure, (("lr", 2),), (("lr", 1),), 60).text)
    the result is worse than the start setting over 60 rounds: 80.00 % (10 B), the start setting 90.00 % (10 B)
    """
    own = measure(found, rounds)
    before = None if found == start else measure(start, rounds)
    runs = ranked([own, before] if before else [own])
    best = next((trial.point for trial in runs if trial.status == "finished"), None)
    if best is None:
        verb = "neither trains" if before else "not confirmed"
    elif best == found:
        verb = "confirmed"
    else:
        verb = "the result is worse than the start setting" if own.status == "finished" else "the result fails"
    other = f"the start setting {before.outcome}" if before else "which is the start setting"
    return Confirmation(best, rounds, own, before, f"{verb} over {rounds} rounds: {own.outcome}, {other}")


# -- searches by runs --------------------------------------------------------------------------------------------------


def tune(
    method: str | Method | Make | Sequence[str] | Mapping[str, str | Method] | None = None,
    on: Any = None,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    rates: int = RATES,
    flasc_s: bool = False,
    bytes: int | str | None = None,
    accuracy: float | None = None,
    full_run: bool = True,
    on_search: OnSearch = lambda experiment, found: None,
    **options: Unpack[Options],
) -> Tuned:
    """Search the learning rate of a method, other settings, or a method; raises `NothingTrains` if nothing is found.

    Args:
        method: names of methods, an experiment file, a Method, or a function of further settings that returns an
            experiment; with `bytes` or `accuracy` also a list of names, a label for each, or None for a selection.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        over: values to try by short key or dotted path, `{"lr": [0.1, 0.3], "k": [64, 128]}`, in all combinations;
            None for a ladder of learning rates.
        rates: how many rates the first rung has; half as many more may be tried if the best one is at an end.
        flasc_s: search the two keys of `over`, a size and a share, with few runs of all rounds.
        bytes: find what is the most accurate with so many bytes, such as `"5MB"`: every candidate trains as many
            rounds as `check` says fit, and one of which no round fits is out.
        accuracy: find what reaches this accuracy with the fewest bytes: a rung keeps the cheapest of those that are
            expected to reach it in all their rounds N, 1 - (1 - accuracy(n)) sqrt(n / N).
        full_run: run the result in full, beside the start setting; without, no further rates are tried at the ends.
        on_search: is called with the experiment and each run (`Trial`), and each rung (`Rung`), that ends.
        **options: as for `tw.run`; `out` is the folder of the runs, by default `runs/search`; `seed` is the seed of the
            search, by default 100: keep it out of the seeds of a comparison; `validation_fraction` is by default 0.1.
    """
    how: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    seed = how.pop("seed", overrides_of(how).get("seed", SEARCH_SEED))
    data_dir = Path(how["data_dir"]) if "data_dir" in how else None
    fraction, out = how.pop("validation_fraction", VALIDATION_FRACTION), Path(how.pop("out", "runs/search"))
    limit = None if bytes is None else read_bytes(str(bytes))
    if (limit is not None and limit < 1) or (accuracy is not None and not 0 < accuracy < 1):
        raise ConfigError("--bytes is 1 or more, such as 5MB; --accuracy is between 0 and 1, such as 0.84")
    goal = limit is not None or accuracy is not None
    if (over and rates != RATES) or (flasc_s and (goal or not over)) or (limit and accuracy):
        raise ConfigError(
            "--rates, --over, and --over with --flasc-s are three searches, the first two also with --bytes or "
            "--accuracy; leave one of them out"
        )
    space = _space(_makes(method, on, how), seed, over, rates, flasc_s, goal)
    experiment, knobs = space.experiment, space.knobs

    def variant(point: Point, length: int) -> Settings:
        if goal:  # what is found is a whole run of so many rounds
            return space.settings(point, {"seed": seed, "rounds": length})
        return with_rounds(space.settings(point, {"seed": seed}), length)

    whole = {point: space.settings(point, {"seed": seed}) for point in points(knobs)}  # raises for impossible values
    rounds = {point: one.rounds for point, one in whole.items()}
    if limit is not None:
        costs = {point: max(1, check(one, data_dir)["bytes_of_all_rounds"]) for point, one in whole.items()}
        rounds = {point: min(count, count * limit // costs[point]) for point, count in rounds.items()}
    candidates, most = [point for point, count in rounds.items() if count], max(rounds.values())
    wish = human_bytes(limit) if limit else f"an accuracy of {percent(accuracy)}"
    if not candidates:
        raise NothingTrains(f"one round of each of {len(rounds)} candidates sends more than {wish}; allow more bytes")

    def fitting(point: Point, length: int) -> int:
        return max(1, length * rounds.get(point, most) // most)

    shortest = most if flasc_s else plan(len(candidates), most)[0][1]
    first = variant(candidates[0], fitting(candidates[0], shortest))
    on_step = partial(on_search, experiment)
    runs = ValidationRuns(first, variant, fraction=fraction, out=out, data_dir=data_dir, on_trial=on_step)
    if accuracy is not None and runs.by == "loss":
        raise ConfigError(f"runs on {experiment.task.label} are ranked by loss, not by accuracy; write --bytes 5MB")

    def measure(point: Point, length: int) -> Trial:
        return runs.measure(point, fitting(point, length))

    def cheapest(trial: Trial) -> tuple[bool, float, int]:
        error = (1 - (trial.accuracy or 0.0)) * math.sqrt(trial.rounds / rounds.get(trial.point, most))
        return trial.failed, max(error, 1 - (accuracy or 0.0)), trial.bytes

    if flasc_s:
        rungs = flasc_search(measure, knobs[0], knobs[1], most)
        on_step(rungs[0])
    else:
        extend = rates // 2 if full_run and space.is_ladder else 0
        rank: Any = ranked if accuracy is None else partial(sorted, key=cheapest)
        rungs = halving(measure, candidates, most, rank=rank, extend=extend, on_rung=on_step)
    if (found := best_of(rungs)) is None:
        raise NothingTrains(_why_nothing(experiment, knobs, rungs))
    if goal:
        full = _within(rungs, limit, accuracy, wish)
    else:
        full = confirm(measure, found, start_of(experiment, knobs), most) if full_run else Confirmation(found, most)
    if full.point is None:
        raise NothingTrains(f"{experiment.name} on {experiment.task.label}: {full.text}; train more rounds")
    rounds_found = {"rounds": full.rounds} if goal else {}
    best, found = space.settings(full.point, rounds_found), full.point if goal else found
    return Tuned(space.changes(full.point) | rounds_found, best, knobs, rungs, found, full, runs.chosen_by, seed)


@dataclass(frozen=True, eq=False)
class _Space:
    """What is searched: knobs of one method, or several methods."""

    makes: Mapping[str, Make]
    experiment: Settings
    knobs: tuple[Knob, ...]
    is_ladder: bool = False

    def changes(self, point: Point) -> Table:
        """The settings of a candidate by dotted path."""
        return {} if len(self.makes) > 1 else changes(self.experiment, self.knobs, point)

    def settings(self, point: Point, more: Table) -> Settings:
        """The experiment of a candidate, with further settings."""
        make = self.makes[point[0][1]] if len(self.makes) > 1 else next(iter(self.makes.values()))
        return make({**self.changes(point), **more})


def _space(makes: Mapping[str, Make], seed: int, over: Any, rates: int, flasc_s: bool, goal: bool) -> _Space:
    experiment = next(iter(makes.values()))({"seed": seed})
    if len(makes) == 1:
        knobs = (_rates(experiment, rates),) if over is None else _searchable(experiment, over, flasc_s)
        return _Space(makes, experiment, knobs, over is None)
    if over or not goal:
        raise ConfigError("one method is tuned, or several for a number of bytes or an accuracy; write --bytes 5MB")
    return _Space(makes, experiment, (Knob("method", ("method",), tuple(makes)),))


def _makes(method: Any, on: Any, options: Mapping[str, Any]) -> dict[str, Make]:
    """The methods that are searched, by name."""
    if callable(method):
        return {"": method}
    several = METHODS if method is None else [method] if isinstance(method, str | Method) else method
    if isinstance(several, Mapping):
        return {name: maker(one, on, **{**options, "name": name}) for name, one in several.items()}
    return {str(one): maker(one, on, **options) for one in several}


def _within(rungs: Sequence[Rung], limit: int | None, accuracy: float | None, wish: str) -> Confirmation:
    """The most accurate of all runs within some bytes, or the one that reaches an accuracy with the fewest."""
    trained = [one for one in ranked(one for rung in rungs for one in rung.trials) if one.status == "finished"]
    fit = [one for one in trained if (one.bytes <= limit if limit else (one.accuracy or 0.0) >= (accuracy or 1.0))]
    if not fit:
        best = f"{point_text(trained[0].point)} ended at {trained[0].outcome}"
        raise NothingTrains(f"none of {len(rungs[0].trials)} candidates does {wish}; {best}; allow more")
    best_trial = fit[0] if limit else min(fit, key=lambda one: one.bytes)
    text = f"expect {best_trial.outcome} after {best_trial.rounds} rounds"
    return Confirmation(best_trial.point, best_trial.rounds, best_trial, text=text)


def _rates(experiment: Settings, count: int) -> Knob:
    """A ladder of learning rates around the experiment's own."""
    key = rate_key(experiment)
    own = flat(to_table(experiment)).get(key)
    if not isinstance(own, float) or not 0 < own < math.inf:
        raise ConfigError(f"{key} must be a number above 0 to be searched as a rate, not {own!r}; write --over")
    return Knob(key.rpartition(".")[2], (key,), ladder(own, count))


def _searchable(experiment: Settings, over: Mapping[str, Sequence[Any]], flasc_s: bool) -> tuple[Knob, ...]:
    """The knobs of a search; raises a ConfigError for what cannot be searched by runs of different lengths."""
    knobs = knobs_of(experiment, over)
    for knob in knobs:
        plain = all(isinstance(value, int | float | str) for value in knob.values)
        if set(knob.paths) & {"rounds", "seed"} or not plain:
            raise ConfigError(
                f"a search tries numbers and words, in runs of different lengths on one seed, so {knob.name} is not "
                "searched; `thinwire sweep` takes tables and rounds"
            )
    if (count := len(points(knobs))) > MAX_CANDIDATES:
        raise ConfigError(f"a search takes at most {MAX_CANDIDATES} settings, not {count}; write fewer values")
    ordered = all(list(knob.values) == sorted(knob.values) and knob.values[0] > 0 for knob in knobs)
    if flasc_s and (len(knobs) != 2 or len(knobs[0].values) < 2 or not ordered):
        raise ConfigError(
            "--flasc-s searches two settings with ascending values: --over rank=1,4,8 --over density=1/16,1/4,1"
        )
    return knobs


def _why_nothing(experiment: Settings, knobs: Knobs, rungs: Sequence[Rung]) -> str:
    """One line about a search without a result."""
    last = {trial.point: trial.status for rung in rungs for trial in rung.trials}
    counts = Counter(status.removesuffix(" so far") for status in last.values())
    causes = ", ".join(f"{count} {status}" for status, count in counts.items())
    keys = ", ".join(path for knob in knobs for path in knob.paths)
    return (
        f"none of {len(last)} settings of {keys} trains {experiment.name} on {experiment.task.label} in "
        f"{rungs[-1].rounds} rounds ({causes}); train more rounds, or start from other values"
    )
