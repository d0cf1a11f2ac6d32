"""`tw.tune` and `thinwire tune`: search the learning rate, or any settings, then run in full what is recommended.

Without `over` the learning rate is searched on a ladder around the method's own (`tune_rate.py`). With `over` all
combinations of the given values are candidates. Both are searched by successive halving on validation examples of the
clients (`validation_runs.py`), and the result is confirmed (`confirm.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.units import human_bytes, read_bytes
from thinwire.errors import ConfigError
from thinwire.experiments.confirm import Confirmation, confirm
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.knobs import Knob, changes, knobs_of, point_text, points, start_of
from thinwire.experiments.request import Make, maker
from thinwire.experiments.successive_halving import MOST_RATES, Halved, Rung, halving
from thinwire.experiments.toml import Table, value_words
from thinwire.experiments.tune_rate import (
    DEFAULT,
    RATES,
    SEARCH_SEED,
    VALIDATION_FRACTION,
    RateSearch,
    halve_rates,
    ladder_of,
    rate_key,
    rounds_of,
    shortest,
)
from thinwire.experiments.validation_runs import OnTrial, ValidationRuns, validation_runs
from thinwire.protocol.method import Method


class NothingTrains(ConfigError):
    """Every candidate of a search diverges, collapses or stays at chance."""


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
    experiment: Experiment
    knobs: tuple[Knob, ...]
    found: Halved
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
    def rounds(self) -> int:
        """Rounds of the search, without those of the full runs."""
        return self.found.rounds

    @property
    def words(self) -> list[str]:
        """The options of a command that uses the settings."""
        return [word for key, value in self.settings.items() for word in ("--set", f"{key}={value_words(value)}")]

    def __repr__(self) -> str:
        name = f"{self.experiment.name} on {self.experiment.task.label}"
        best = point_text(self.knobs, as_point(self.confirmation.value))
        cost = f"{len(self.found.tried)} candidates, {self.rounds:,} rounds, {human_bytes(self.bytes)}"
        lines = (f"Tuned {name}: {best}", f"  {self.confirmation.text}", f"  by {self.chosen_by}", f"  search: {cost}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from thinwire.core.text import html_text

        return f"<pre>{html_text(repr(self))}</pre>"


def tune(
    method: str | Method,
    on: Any = None,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    rate: str | None = None,
    rates: int = RATES,
    share: float = 1.0,
    rounds: int | None = None,
    clients: int | None = None,
    cohort: int | None = None,
    seed: int = SEARCH_SEED,
    budget: int | str | None = None,
    validation_fraction: float = VALIDATION_FRACTION,
    out: Path | str = "runs/search",
    overrides: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    device: str | None = None,
    data_dir: Path | str | None = None,
    on_trial: OnTrial = lambda trial: None,
) -> Tuned:
    """Search the learning rate of a method, or any settings, on validation examples of the clients.

    Args:
        method: names of methods, an experiment file, or a Method.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        over: values to try by short key or dotted path, `{"lr": [0.1, 0.3], "k": [64, 128]}`, in all combinations;
            None for a ladder of learning rates.
        rate: the rate to search, if not `method.client_opt.lr` or `method.server_opt.lr`.
        rates: how many rates the first rung has.
        share: rounds of the last rung, as a fraction of those of the run.
        rounds: rounds of the run.
        clients: number of clients.
        cohort: clients in a round.
        seed: the seed of the search; keep it out of the seeds of a comparison.
        budget: bytes that the runs may send, such as `"50MB"`.
        validation_fraction: fraction of each client's examples that is held out.
        out: the folder of the runs; finished ones are used again.
        overrides: settings by dotted path: the start setting.
        recipe: the name of a recipe.
        device: `cpu` or `cuda`.
        data_dir: the folder of datasets.
        on_trial: is called with each run that ends.
    """
    options: dict[str, Any] = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    make = maker(method, on, recipe=recipe, overrides=overrides, **options)
    return tune_settings(
        make,
        over,
        RateSearch(rate, rates, share, rates // 2, validation_fraction),
        seed=seed,
        budget=read_bytes(budget) if isinstance(budget, str) else budget,
        out=Path(out),
        data_dir=None if data_dir is None else Path(data_dir),
        on_trial=on_trial,
    )


def tune_settings(
    make: Make,
    over: Mapping[str, Sequence[Any]] | None = None,
    search: RateSearch = DEFAULT,
    *,
    seed: int = SEARCH_SEED,
    budget: int | None = None,
    out: Path | None = None,
    data_dir: Path | None = None,
    on_trial: OnTrial = lambda trial: None,
    on_rung: Callable[[Rung], None] = lambda rung: None,
) -> Tuned:
    """The search over the experiments that `make` returns; raises `NothingTrains` if no candidate does.

    Args:
        make: the experiment with further settings.
        over: values to try by key; None for the ladder of `search`.
        search: how; `key`, `rates` and `extend` are for the ladder alone.
        seed: of the search.
        budget: bytes that all runs may send; None for no limit.
        out: the folder of the runs; None for a temporary one.
        data_dir: the folder of datasets.
        on_trial: is called with each run that ends.
        on_rung: is called with each rung that ends.
    """
    experiment = make({"seed": seed})
    if over is None:
        key = search.key or rate_key(experiment)
        knobs: tuple[Knob, ...] = (Knob((key,), ladder_of(experiment, key, search)),)
        count = search.rates
    else:
        knobs = _searchable(experiment, over)
        count = len(points(knobs))
    start = start_of(experiment, knobs)

    def variant(value: Any) -> Experiment:
        return make({"seed": seed, **changes(experiment, knobs, as_point(value))})

    for point in points(knobs):
        variant(point)  # raises for impossible values before the first run
    length = shortest(experiment, count, search.share, "rates" if over is None else "settings")
    fraction = search.validation_fraction
    paths = {"out": out, "data_dir": data_dir}
    with validation_runs(
        experiment, variant, length, fraction=fraction, budget=budget, on_trial=on_trial, **paths
    ) as runs:
        if over is None:
            halved = halve_rates(runs.measure, experiment, knobs[0].paths[0], search, on_rung)
        else:
            halved = _halve_points(runs, knobs, start, rounds_of(experiment, search.share), on_rung)
        if halved.value is None:
            raise NothingTrains(why_nothing(experiment, knobs, halved))
        first = start[0] if over is None else start
        if halved.stopped:  # no budget is left for a full run
            confirmation = Confirmation(halved.value, experiment.rounds, None, is_start=halved.value == first)
        else:
            confirmation = confirm(runs.measure, halved.value, first, experiment.rounds)
    if confirmation.value is None:
        raise NothingTrains(f"{experiment.name} on {experiment.task.label}: {confirmation.text}; {_ADVICE}")
    settings = changes(experiment, knobs, as_point(confirmation.value))
    return Tuned(settings, make(settings), knobs, halved, confirmation, runs.chosen_by, seed)


_ADVICE = "train more rounds, or start from other values"


def as_point(value: Any) -> tuple[Any, ...]:
    """A candidate as one value for each knob: a rate is the only one."""
    return value if isinstance(value, tuple) else (value,)


def _searchable(experiment: Experiment, over: Mapping[str, Sequence[Any]]) -> tuple[Knob, ...]:
    """The knobs of a search; raises a ConfigError for what cannot be searched by runs of different lengths."""
    knobs = knobs_of(experiment, over)
    for knob in knobs:
        if set(knob.paths) & {"rounds", "seed"}:
            raise ConfigError(f"a search tries runs of different lengths on one seed, so {knob.label} is not searched")
        if not all(isinstance(value, int | float | str) for value in knob.values):
            raise ConfigError(
                f"a search takes numbers and words as values of {knob.label}; `thinwire sweep` takes tables"
            )
    if (count := len(points(knobs))) > MOST_RATES:
        raise ConfigError(f"a search takes at most {MOST_RATES} settings, not {count}; write fewer values")
    return knobs


def _halve_points(
    runs: ValidationRuns, knobs: Sequence[Knob], start: Any, rounds: int, on_rung: Callable[[Rung], None]
) -> Halved:
    """Successive halving of all combinations, the start setting first if it is one of them."""
    candidates = points(knobs)
    ahead = sorted(candidates, key=lambda point: point != start)
    return halving(runs.measure, ahead, rounds, key=candidates.index, on_rung=on_rung)


def why_nothing(experiment: Experiment, knobs: Sequence[Knob], found: Halved) -> str:
    """One line about a search without a result."""
    last: dict[Any, str] = {trial.value: trial.measured.status for rung in found.rungs for trial in rung.trials}
    counts = Counter("at chance" if status == "at chance so far" else status for status in last.values())
    causes = ", ".join(f"{count} {status}" for status, count in counts.items())
    on = f"{experiment.name} on {experiment.task.label} in {found.rungs[-1].rounds} rounds ({causes})"
    if isinstance(found.tried[0], tuple):
        return f"none of {len(found.tried)} settings trains {on}; {_ADVICE}"
    key, (low, *_, high) = knobs[0].paths[0], found.tried
    return (
        f"no {key} from {low:g} to {high:g} trains {on}; train more rounds, or start from another rate: --set {key}=..."
    )
