"""`tw.tune` and `thinwire tune`: search the learning rate, any settings, or a method, by runs on validation examples.

Successive halving gives long runs to few candidates:

    rung 1        n candidates, each with T / 2^(L - 1) rounds          L = 1 + ceil(log2 n)
    rung i + 1    the better half of rung i, each with twice the rounds
    rung L        one candidate, and the setting that the search started from, T rounds each

Each rung trains from round 1 with a number of rounds of its own, so that schedules end with the run. A candidate whose
run fails in a rung is out. The result is the best candidate of the longest rung that has one which never failed. Paper:
Non-stochastic Best Arm Identification and Hyperparameter Optimization (Jamieson and Talwalkar, AISTATS 2016).

FLASC-S searches a size r, such as a rank, and a share d, such as a density, with runs of all rounds (FLASC, 2024; as in
its text: the printed algorithm uses the index of the density as the index of a rank):

    stage 1   for d in shares:  stop when (r2, d) beats (r1, min(d_max, d r2 / r1))
    stage 2   (r, d) for all other sizes r
    result    the best of all runs, and of that of the start

The search has a seed of its own, which must not be one of the seeds of a final comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from thinwire.core.text import human_bytes, read_bytes
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.protocol.method import Method
from thinwire.reports.page import Cells
from thinwire.reports.rows import value_text
from thinwire.runs.check import check
from thinwire.runs.config import to_table
from thinwire.runs.jobs import Jobs
from thinwire.runs.options import Options, overrides_of
from thinwire.runs.probe import rate_key
from thinwire.runs.records import SearchRecord
from thinwire.runs.toml import Table, flat
from thinwire.search.candidates import Knob, Make, Point, changes, knobs_of, makers, points, start_of
from thinwire.search.trials import Measure, Trial, ValidationRuns, over as with_rounds, ranked

SEARCH_SEED = 100  # by default; seeds of comparisons begin at 0
RATES = 8
MAX_CANDIDATES = 64
VALIDATION_FRACTION = 0.1
METHODS = ("fedavg", "int4", "topk+int8", "topk+int4", "fedpara", "flasc", "mapo", "thin")  # within some bytes


class NothingTrains(ConfigError):
    """Every candidate of a search diverges, collapses, stays at chance, or sends too many bytes."""


Rung = tuple[Trial, ...]  # runs of equal length, in the order of their candidates
OnTrial = Callable[[Settings, Trial], Any]  # is called with each run that ends


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of a search.

    Args:
        settings: what is recommended, by dotted path, as for `tw.resolve(..., overrides=...)`.
        experiment: the experiment with these settings, on all examples and with its own seed.
        knobs: the settings that were searched.
        rungs: the runs of the search, rung by rung.
        best: the run of what is recommended.
        start: the setting that the search started from, if it was run.
        chosen_by: the criterion in words.
        seed: the seed of the search.
    """

    settings: Table
    experiment: Settings
    knobs: tuple[Knob, ...]
    rungs: tuple[Rung, ...]
    best: Trial
    start: Point | None
    chosen_by: str
    seed: int

    @property
    def method(self) -> Method:
        """The method with the recommended settings, for `tw.simulate`."""
        return self.experiment.method

    @property
    def trials(self) -> list[Trial]:
        """The runs of the search."""
        return [trial for rung in self.rungs for trial in rung]

    @property
    def bytes(self) -> int:
        """Bytes of the search."""
        return sum(trial.bytes for trial in self.trials)

    @property
    def rounds(self) -> int:
        """Rounds of all runs of the search."""
        return sum(trial.rounds for trial in self.trials)

    @property
    def record(self) -> SearchRecord:
        """What a run that uses a rate that was found states about it."""
        rungs = tuple((len(rung), max(trial.rounds for trial in rung)) for rung in self.rungs)
        tried, value = tuple(trial.point[0][1] for trial in self.rungs[0]), self.best.point[0][1]
        key = self.knobs[0].paths[0]
        return SearchRecord(key, value, tried, rungs, self.seed, self.chosen_by, self.rounds, self.bytes)

    def cells(self) -> Cells:
        """The runs as a table."""
        names = [knob.name for knob in self.knobs]
        rows = [
            [
                *(value_text(value) for _, value in one.point),
                f"{one.rounds:,}",
                "-" if one.value is None else one.by.text(one.value),
                "-" if one.loss is None else f"{one.loss:.4g}",
                human_bytes(one.bytes),
                one.status,
            ]
            for one in self.trials
        ]
        title = f"{self.experiment.name} on {self.experiment.task.label}: the runs of the search"
        heads = [*names, "rounds", f"validation {self.best.by.name}", "loss", "bytes", "status"]
        return Cells(title, heads, rows, left=len(names))

    def plain(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        return {
            "settings": self.settings,
            "searched": [path for knob in self.knobs for path in knob.paths or (knob.name,)],
            "best": self.best.plain(),
            "chosen_by": self.chosen_by,
            "seed": self.seed,
            "rounds_of_the_search": self.rounds,
            "bytes_of_the_search": self.bytes,
            "rungs": [[trial.plain() for trial in rung] for rung in self.rungs],
        }

    def __repr__(self) -> str:
        own = [trial for trial in self.rungs[-1] if trial.point == self.start]
        start = f"; the start setting {own[0].outcome}" if own and own[0] is not self.best else ""
        return (
            f"{self.best.name} over {self.best.rounds} rounds: {self.best.outcome}{start}\n"
            f"by {self.chosen_by}, on seed {self.seed}\n"
            f"the search: {len(self.trials)} runs, {self.rounds:,} rounds, {human_bytes(self.bytes)}"
        )


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
    measure: Measure, candidates: Sequence[Point], rounds: int, *, extend: int = 0, start: Point | None = None
) -> tuple[Rung, ...]:
    """Successive halving.

    Args:
        measure: runs candidates for a number of rounds.
        candidates: in the order of the tables.
        rounds: of the last rung.
        extend: if the best of ascending rates is at an end, or all fail, up to so many more are tried there (below the
            smallest, if all fail).
        start: has a place in the last rung.

    >>> def measure(points, rounds):
    ...     return [Trial(one, 1 - abs(one[0][1] - 1.0) / 10, 0.0, 100 * rounds, rounds) for one in points]
    >>> rungs = halving(measure, [(("lr", rate),) for rate in (0.5, 1.0, 2.0, 4.0)], rounds=8, start=(("lr", 0.5),))
    >>> best_of(rungs).point, [(rung[0].rounds, len(rung)) for rung in rungs]
    ((('lr', 1.0),), [(2, 4), (4, 2), (8, 2)])
    """
    rungs: list[Rung] = []
    steps, ahead = plan(len(candidates), rounds), list(candidates)
    for (_, length), (following, _) in zip(steps, [*steps[1:], (0, 0)], strict=True):
        last = [start] if start and not following and start not in ahead else []
        trials = measure([*ahead, *last], length)
        for _ in range(0 if rungs else extend):
            best = ranked(trials)[0]
            if best.failed or best is trials[0]:
                trials = measure([_times(trials[0].point, 0.5)], length) + trials
            elif best is trials[-1]:
                trials += measure([_times(best.point, 2.0)], length)
        rungs.append(tuple(trials))
        kept = [trial for trial in ranked(trials) if not trial.failed][:following]
        ahead = [trial.point for trial in trials if trial in kept]
        if not ahead:
            break
    return tuple(rungs)


def _times(rate: Point, factor: float) -> Point:
    return tuple((name, value * factor) for name, value in rate)


def flasc_search(
    measure: Measure, size: Knob, share: Knob, rounds: int, start: Point | None = None
) -> tuple[Rung, ...]:
    """FLASC-S over the ascending values of a size and a share, and a start; no pair is measured twice.

    >>> def measure(points, rounds):
    ...     pairs = [dict(point).values() for point in points]
    ...     found = [(min(size * share, 2.0) / 4 + size / 100, int(100 * size * share)) for size, share in pairs]
    ...     return [Trial(point, value, 0.0, cost, rounds) for point, (value, cost) in zip(points, found)]
    >>> rungs = flasc_search(measure, Knob("r", (), (1, 2, 4)), Knob("d", (), (0.25, 0.5, 1.0)), rounds=40)
    >>> best_of(rungs).point, len(rungs[0])
    ((('r', 4), ('d', 0.25)), 3)
    """
    trials: dict[Point, Trial] = {}
    (small, large), top = size.values[:2], share.values[-1]

    def run(*pairs: tuple[Any, Any]) -> list[Trial]:
        points = [tuple(zip((size.name, share.name), pair, strict=True)) for pair in pairs]
        new = [point for point in points if point not in trials]
        trials.update(zip(new, measure(new, rounds), strict=True))
        return [trials[point] for point in points]

    chosen = top
    for d in share.values:
        equal = d * large / small  # about as many values as (large, d) sends
        low, high = run((small, min(top, math.floor(equal) if isinstance(top, int) else equal)), (large, d))
        if not high.failed and ranked([low, high])[0] is high:
            chosen = d
            break
    run(*((r, chosen) for r in size.values[1:]))
    if start:
        run((dict(start)[size.name], dict(start)[share.name]))
    return (tuple(trials.values()),)


def best_of(rungs: Sequence[Rung], most: float = math.inf) -> Trial | None:
    """The best run of the longest rung that has a candidate which never failed and is above chance.

    Args:
        rungs: all runs.
        most: the largest number of bytes of the run.
    """
    out = {trial.point for rung in rungs for trial in rung if trial.failed}
    order = (trial for rung in reversed(rungs) for trial in ranked(rung))
    return next((one for one in order if one.point not in out and one.status == "finished" and one.bytes <= most), None)


# -- searches by runs --------------------------------------------------------------------------------------------------


def tune(
    method: str | Method | Make | Sequence[str] | Mapping[str, str | Method] | None = None,
    on: Any = None,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    rates: int = RATES,
    flasc_s: bool = False,
    bytes: int | str | None = None,
    jobs: int = 1,
    on_trial: OnTrial = lambda experiment, trial: None,
    **options: Unpack[Options],
) -> Tuned:
    """Search the learning rate of a method, other settings, or a method; raises `NothingTrains` if nothing is found.

    Args:
        method: names of methods, an experiment file, a Method, or a function of further settings that returns an
            experiment; with `bytes` also a list of names, a label for each, or None for a selection.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        over: values to try by short key or dotted path, `{"lr": [0.1, 0.3], "k": [64, 128]}`, in all combinations;
            None for a ladder of learning rates.
        rates: how many rates the first rung has; half as many more may be tried if the best one is at an end.
        flasc_s: search the two keys of `over`, a size and a share, with few runs of all rounds.
        bytes: find what is the most accurate with so many bytes, such as `"5MB"`: every candidate trains as many
            rounds as `check` says fit, and one of which no round fits is out.
        jobs: number of runs at a time (`runs/jobs.py`).
        on_trial: is called with the experiment and each run that ends.
        **options: as for `tw.run`; `out` is the folder of the runs, by default `runs/search`; `seed` is the seed of the
            search, by default 100: keep it out of the seeds of a comparison; `validation_fraction` is by default 0.1.
    """
    how: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    seed = how.pop("seed", overrides_of(how).get("seed", SEARCH_SEED))
    data_dir = Path(how["data_dir"]) if "data_dir" in how else None
    fraction, out = how.pop("validation_fraction", VALIDATION_FRACTION), Path(how.pop("out", "runs/search"))
    limit = None if bytes is None else read_bytes(str(bytes))
    if limit is not None and limit < 1:
        raise ConfigError("--bytes is 1 or more, such as 5MB")
    if (over and rates != RATES) or (flasc_s and (limit or not over)):
        raise ConfigError(
            "--rates, --over, and --over with --flasc-s are three searches, the first two also with --bytes; leave one "
            "of them out"
        )
    makes = {"": method} if callable(method) else makers(METHODS if method is None else method, on, how)
    first = next(iter(makes.values()))
    experiment = first({"seed": seed})
    if len(makes) == 1:
        knobs = _searchable(experiment, over, flasc_s) if over is not None else (_rates(experiment, rates),)
    elif over or limit is None:
        raise ConfigError("one method is tuned, or several for a number of bytes; write --bytes 5MB")
    else:
        knobs = (Knob("method", (), tuple(makes)),)

    def settings(point: Point, more: Table) -> Settings:
        return makes.get(point[0][1], first)({**changes(experiment, knobs, point), **more})

    whole = {point: settings(point, {"seed": seed}) for point in points(knobs)}  # raises for impossible values
    rounds = {point: one.rounds for point, one in whole.items()}
    if limit is not None:
        costs = {point: max(1, check(one, data_dir)["bytes_of_all_rounds"]) for point, one in whole.items()}
        rounds = {point: min(count, count * limit // costs[point]) for point, count in rounds.items()}
        if not any(rounds.values()):
            raise NothingTrains(
                f"one round of each of {len(rounds)} candidates sends more than {human_bytes(limit)}; allow more bytes"
            )
    candidates, most = [point for point, count in rounds.items() if count], max(rounds.values())

    def shortened(point: Point, length: int) -> Settings:
        own = max(1, length * rounds.get(point, most) // most)
        if limit is None:
            return with_rounds(settings(point, {"seed": seed}), own)
        return settings(point, {"seed": seed, "rounds": own})  # what is found is a whole run of so many rounds

    lengths = [most] if flasc_s else [length for _, length in plan(len(candidates), most)]
    runs = ValidationRuns(shortened(candidates[0], lengths[0]), fraction, out, data_dir)

    start = None if limit else start_of(experiment, knobs)
    with Jobs(jobs, experiment.engine.device) as places:

        def measure(points: Sequence[Point], length: int) -> list[Trial]:
            trials = dict[Point, Trial]()
            for trial in runs.measure({point: shortened(point, length) for point in points}, places):
                trials[trial.point] = trial
                on_trial(experiment, trial)
            return [trials[point] for point in points]

        if flasc_s:
            rungs = flasc_search(measure, knobs[0], knobs[1], most, start)
        else:
            extend = rates // 2 if over is None and len(makes) == 1 else 0
            rungs = halving(measure, candidates, most, extend=extend, start=start)
    best = best_of(rungs, limit or math.inf)
    if best is None:
        raise NothingTrains(_why_nothing(experiment, knobs, rungs, lengths[len(rungs) - 1], limit or math.inf))
    rounds_found = {"rounds": best.rounds} if limit else {}
    found = changes(experiment, knobs, best.point) | rounds_found
    return Tuned(found, settings(best.point, rounds_found), knobs, rungs, best, start, runs.chosen_by, seed)


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


def _why_nothing(experiment: Settings, knobs: Sequence[Knob], rungs: Sequence[Rung], rounds: int, most: float) -> str:
    """One line about a search without a result."""
    last = {trial.point: trial for rung in rungs for trial in rung}
    counts = Counter(
        f"above {human_bytes(most)}" if trial.bytes > most else trial.status.removesuffix(" so far")
        for trial in last.values()
    )
    causes = ", ".join(f"{count} {status}" for status, count in counts.items())
    keys = ", ".join(path for knob in knobs for path in knob.paths or [knob.name])
    return (
        f"none of {len(last)} settings of {keys} trains {experiment.name} on {experiment.task.label} in "
        f"{rounds} rounds ({causes}); train more rounds, or start from other values"
    )
