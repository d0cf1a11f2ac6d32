"""`tw.tune` and `thinwire tune`: search the learning rate, any settings, or a method, by runs on validation examples.

Without `over` the learning rate is searched on a ladder around the method's own; with it all combinations of the values
are candidates; with `bytes` or `accuracy` several methods are. All are searched by successive halving (`halving.py`) on
examples that the clients hold out. A result is run in full, beside the setting that the search
started from. The search has a seed of its own, which must not be one of the seeds of a final comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from thinwire.core.text import html_text, human_bytes, percent, read_bytes
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.protocol.method import Method
from thinwire.runs.check import check
from thinwire.runs.config import to_table
from thinwire.runs.options import Options, overrides_of
from thinwire.runs.search_record import SearchRecord
from thinwire.runs.toml import Table, value_words
from thinwire.search import halving
from thinwire.search.candidates import (
    Knob,
    Knobs,
    Make,
    as_point,
    changes,
    knobs_of,
    maker,
    point_text,
    points,
    rate_key,
    setting,
    start_of,
)
from thinwire.search.halving import (
    MAX_CANDIDATES,
    Confirmation,
    OnRung,
    OnTrial,
    Rung,
    SearchResult,
    Trial,
    ValidationRuns,
    confirm,
    halve_rates,
    ladder,
    plan,
    ranked,
)

SEARCH_SEED = 100  # by default; seeds of comparisons begin at 0
RATES = 8
VALIDATION_FRACTION = 0.1
METHODS = ("fedavg", "int4", "topk+int8", "ef+topk+int4", "fedpara", "flasc", "mapo", "thin")  # for bytes or accuracy
_ADVICE = "train more rounds, or start from other values"

OnSearch = Callable[[Settings, Knobs], tuple[OnTrial, OnRung]]  # what is called with runs and rungs of a search


class NothingTrains(ConfigError):
    """Every candidate of a search diverges, collapses or stays at chance, or none does what is wanted."""


def silent(experiment: Settings, knobs: Knobs) -> tuple[OnTrial, OnRung]:
    """A search without output."""
    return lambda trial: None, lambda rung: None


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of a search.

    Args:
        settings: what is recommended, by dotted path, as for `tw.resolve(..., overrides=...)`.
        experiment: the experiment with these settings, on all examples and with its own seed.
        knobs: the settings that were searched.
        found: the rungs of the search and its result.
        confirmation: the full runs of the result and of the start setting.
        chosen_by: the criterion in words.
        seed: the seed of the search.
    """

    settings: Table
    experiment: Settings
    knobs: tuple[Knob, ...]
    found: SearchResult
    confirmation: Confirmation
    chosen_by: str
    seed: int

    @property
    def method(self) -> Method:
        """The method with the recommended settings, for `tw.simulate`."""
        return self.experiment.method

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The runs of the search, rung by rung."""
        return self.found.rungs

    @property
    def bytes(self) -> int:
        """Bytes of the search, without those of the full runs that confirm it."""
        return self.found.bytes

    @property
    def words(self) -> list[str]:
        """The options of a command that uses the settings."""
        return [word for key, value in self.settings.items() for word in ("--set", f"{key}={value_words(value)}")]

    @property
    def record(self) -> SearchRecord:
        """What a run that uses a rate that was found states about it."""
        rungs = tuple((len(rung.trials), rung.rounds) for rung in self.rungs)
        found, key = self.found, self.knobs[0].paths[0]
        cost = found.rounds, found.bytes
        return SearchRecord(key, found.value, found.tried, rungs, self.seed, self.chosen_by, *cost)

    def __repr__(self) -> str:
        name = f"{self.experiment.name} on {self.experiment.task.label}"
        best = point_text(self.knobs, as_point(self.confirmation.value))
        cost = f"{len(self.found.tried)} candidates, {self.found.rounds:,} rounds, {human_bytes(self.bytes)}"
        lines = (f"Tuned {name}: {best}", f"  {self.confirmation.text}", f"  by {self.chosen_by}", f"  search: {cost}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html_text(repr(self))}</pre>"


def tune(
    method: str | Method | Make | Sequence[str] | Mapping[str, str | Method] | None = None,
    on: Any = None,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    rate: str | None = None,
    rates: int = RATES,
    flasc_s: bool = False,
    bytes: int | str | None = None,
    accuracy: float | None = None,
    share: float = 1.0,
    budget: int | str | None = None,
    full_run: bool = True,
    on_search: OnSearch = silent,
    **options: Unpack[Options],
) -> Tuned:
    """Search the learning rate of a method, other settings, or a method; raises `NothingTrains` if nothing is found.

    Args:
        method: names of methods, an experiment file, a Method, or a function of further settings that returns an
            experiment; with `bytes` or `accuracy` also a list of names, a label for each, or None for a selection.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        over: values to try by short key or dotted path, `{"lr": [0.1, 0.3], "k": [64, 128]}`, in all combinations;
            None for a ladder of learning rates.
        rate: the rate to search, if not `method.client_opt.lr` or `method.server_opt.lr`.
        rates: how many rates the first rung has; half as many more may be tried if the best one is at an end.
        flasc_s: search the two keys of `over`, a size and a share, with few runs of all rounds.
        bytes: find the method that is the most accurate with so many bytes, such as `"5MB"`.
        accuracy: find the method that reaches this accuracy with the fewest bytes.
        share: rounds of the last rung, as a fraction of those of the run.
        budget: bytes that the runs of the search may send, such as `"50MB"`.
        full_run: run the result in full, beside the start setting; without, no further rates are tried at the ends.
        on_search: returns functions that are called with each run and each rung that ends.
        **options: as for `tw.run`; `out` is the folder of the runs, by default `runs/search`; `seed` is the seed of the
            search, by default 100: keep it out of the seeds of a comparison; `validation_fraction` is by default 0.1.
    """
    how: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    seed = how.pop("seed", overrides_of(how).get("seed", SEARCH_SEED))
    data_dir, fraction = how.get("data_dir"), how.pop("validation_fraction", VALIDATION_FRACTION)
    where: dict[str, Any] = {"fraction": fraction, "out": Path(how.pop("out", "runs/search"))}
    where["data_dir"] = data_dir and Path(data_dir)
    where["budget"] = None if budget is None else read_bytes(str(budget))
    if bytes is not None or accuracy is not None:
        if (bytes is not None and accuracy is not None) or over or rate or flasc_s:
            raise ConfigError("a method is searched for --bytes or --accuracy alone; leave the other options out")
        several: Any = {"method": method} if isinstance(method, Method) else method or METHODS
        several = [several] if isinstance(several, str) else several
        named = dict(several) if isinstance(several, Mapping) else {name: name for name in several}
        makes = {name: maker(one, on, **{**how, "name": name}) for name, one in named.items()}
        limit = None if bytes is None else read_bytes(str(bytes))
        return _search_methods(makes, limit, accuracy, share, seed, on_search, where)
    if over and (rate is not None or rates != RATES):
        raise ConfigError("--rate and --rates search one rate, --over names the values to try; leave one of them out")
    if method is None or (isinstance(method, Sequence | Mapping) and not isinstance(method, str)):
        raise ConfigError("one method is tuned, or several for a number of bytes or an accuracy; write --bytes 5MB")
    make = method if callable(method) else maker(method, on, **how)
    experiment = make({"seed": seed})
    rounds = _rounds_of(experiment, share)
    if over is None:
        key = rate or rate_key(experiment)
        own = setting(to_table(experiment), key)
        if not isinstance(own, float) or not 0 < own < math.inf:
            raise ConfigError(f"{key} must be a number above 0 to be searched as a rate, not {own!r}")
        knobs: tuple[Knob, ...] = (Knob((key,), ladder(own, rates)),)
    else:
        knobs = _searchable(experiment, over, flasc_s)
    candidates, start = points(knobs), start_of(experiment, knobs)

    def variant(value: Any) -> Settings:
        return make({"seed": seed, **changes(experiment, knobs, as_point(value))})

    for point in candidates:
        variant(point)  # raises for impossible values before the first run
    shortest = rounds if flasc_s else plan(len(candidates), rounds, "settings" if over else "rates")[0][1]
    on_trial, on_rung = on_search(experiment, knobs)
    runs = ValidationRuns(experiment, variant, shortest, on_trial=on_trial, **where)
    if over is None:
        extend = rates // 2 if full_run else 0
        found = halve_rates(runs.measure, knobs[0].values, rounds, extend=extend, on_rung=on_rung)
    elif flasc_s:
        found = halving.flasc_s(runs.measure, knobs[0].values, knobs[1].values, rounds)
        on_rung(found.rungs[0])
    else:  # the start setting first, if it is a candidate
        ahead = sorted(candidates, key=lambda point: point != start)
        found = halving.halving(runs.measure, ahead, rounds, key=candidates.index, on_rung=on_rung)
    if found.value is None:
        raise NothingTrains(_why_nothing(experiment, knobs, found))
    measure = runs.measure if full_run and not found.stopped else None
    confirmation = confirm(measure, found.value, start[0] if over is None else start, experiment.rounds)
    if confirmation.value is None:
        raise NothingTrains(f"{experiment.name} on {experiment.task.label}: {confirmation.text}; {_ADVICE}")
    settings = changes(experiment, knobs, as_point(confirmation.value))
    return Tuned(settings, make(settings), knobs, found, confirmation, runs.chosen_by, seed)


def _rounds_of(experiment: Settings, share: float) -> int:
    """The rounds of the last rung: a share of those of the experiment."""
    if not 0 < share <= 1:
        raise ConfigError(
            f"share must be above 0 and at most 1, a part of the rounds, not {share}; write for example 0.5"
        )
    return max(1, round(share * experiment.rounds))


def _searchable(experiment: Settings, over: Mapping[str, Sequence[Any]], flasc_s: bool) -> tuple[Knob, ...]:
    """The knobs of a search; raises a ConfigError for what cannot be searched by runs of different lengths."""
    knobs = knobs_of(experiment, over)
    for knob in knobs:
        if set(knob.paths) & {"rounds", "seed"}:
            raise ConfigError(f"a search tries runs of different lengths on one seed, so {knob.label} is not searched")
        if not all(isinstance(value, int | float | str) for value in knob.values):
            raise ConfigError(
                f"a search takes numbers and words as values of {knob.label}; `thinwire sweep` takes tables"
            )
    if (count := len(points(knobs))) > MAX_CANDIDATES:
        raise ConfigError(f"a search takes at most {MAX_CANDIDATES} settings, not {count}; write fewer values")
    ordered = all(list(knob.values) == sorted(knob.values) and knob.values[0] > 0 for knob in knobs)
    if flasc_s and (len(knobs) != 2 or len(knobs[0].values) < 2 or not ordered):
        raise ConfigError(
            "--flasc-s searches two settings with ascending values: --over rank=1,4,8 --over density=1/16,1/4,1"
        )
    return knobs


def _why_nothing(experiment: Settings, knobs: Knobs, found: SearchResult) -> str:
    """One line about a search without a result."""
    last = {trial.value: trial.status for trial in found.trials}
    counts = Counter(status.removesuffix(" so far") for status in last.values())
    causes = ", ".join(f"{count} {status}" for status, count in counts.items())
    on = f"{experiment.name} on {experiment.task.label} in {found.rungs[-1].rounds} rounds ({causes})"
    if isinstance(found.tried[0], tuple):
        return f"none of {len(found.tried)} settings trains {on}; {_ADVICE}"
    key, (low, *_, high) = knobs[0].paths[0], found.tried
    return (
        f"no {key} from {low:g} to {high:g} trains {on}; train more rounds, or start from another rate: --set {key}=..."
    )


def _search_methods(
    makes: Mapping[str, Make],
    limit: int | None,
    accuracy: float | None,
    share: float,
    seed: int,
    on_search: OnSearch,
    where: Mapping[str, Any],
) -> Tuned:
    """The method that is the most accurate within `limit` bytes, or that reaches an accuracy with the fewest.

    Within `limit` bytes a method trains as many rounds as `check` says fit, and a method of which no round fits is
    out. For an accuracy a rung keeps the cheapest of the methods that are expected to reach it in all their rounds N,
    1 - (1 - accuracy(n)) sqrt(n / N). The result is the best of all runs, each of which is a whole run.
    """
    if (accuracy is not None and not 0 < accuracy < 1) or (limit is not None and limit < 1):
        raise ConfigError(
            "an accuracy is between 0 and 1, such as --accuracy 0.84, bytes are 1 or more, as --bytes 5MB"
        )
    rounds: dict[str, int] = {}  # of each method, those that fit
    for name, make in makes.items():
        experiment = make({"seed": seed})
        rounds[name] = _rounds_of(experiment, share)
        if limit is not None:
            total = check(experiment, where["data_dir"])["bytes_of_all_rounds"]
            rounds[name] = min(rounds[name], experiment.rounds * limit // max(1, total))
    wish = f"an accuracy of {percent(accuracy)}" if limit is None else human_bytes(limit)
    names, most = [name for name, count in rounds.items() if count], max(rounds.values())
    if not names:
        raise NothingTrains(f"one round of each of {len(makes)} methods sends more than {wish}; allow more bytes")
    shortest = plan(len(names), most, "methods")[0][1]
    first, knobs = makes[names[0]]({"seed": seed}), (Knob(("method",), tuple(names), "method"),)
    on_trial, on_rung = on_search(first, knobs)
    runs = ValidationRuns(
        first,
        lambda value: makes[value[0]]({"seed": seed, "rounds": value[1]}),
        shortest,
        on_trial=lambda trial: on_trial(trial._replace(value=trial.value[0])),
        **where,
    )
    if accuracy is not None and runs.by == "loss":
        raise ConfigError(f"runs on {first.task.label} are ranked by loss, not by accuracy; write --bytes 5MB")

    def measure(name: str, length: int) -> Trial:
        count = max(1, length * rounds[name] // most)
        return runs.measure((name, count), count)._replace(value=name)

    def by_bytes(trial: Trial) -> tuple[bool, float, int]:
        error = (1 - (trial.accuracy or 0.0)) * math.sqrt(trial.rounds / rounds[trial.value])
        return trial.failed, max(error, 1 - (accuracy or 0.0)), trial.bytes

    rank = ranked if accuracy is None else partial(sorted, key=by_bytes)
    found = halving.halving(measure, names, most, key=names.index, rank=rank, on_rung=on_rung)
    trained = [trial for trial in ranked(found.trials) if trial.status == "finished"]
    if limit is None:
        fit = [trial for trial in trained if (trial.accuracy or 0.0) >= (accuracy or 0.0)]
        fit.sort(key=lambda trial: trial.bytes)
    else:
        fit = [trial for trial in trained if trial.bytes <= limit]
    if not fit:
        best = f"; {trained[0].value} ended at {trained[0].outcome}" if trained else ""
        raise NothingTrains(f"none of {len(names)} methods does {wish} in {most} rounds{best}; allow more")
    name, count = fit[0].value, fit[0].rounds
    text = f"expect {fit[0].outcome} after {count} rounds"
    confirmation, experiment = Confirmation(name, count, fit[0], text=text), makes[name]({"rounds": count})
    return Tuned({"rounds": count}, experiment, knobs, found._replace(value=name), confirmation, runs.chosen_by, seed)
