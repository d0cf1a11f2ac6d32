"""Search for the learning rate of a method on a task, by successive halving on validation examples of the clients.

Rates are a factor of 2 apart around the method's own. A run is judged by the mean accuracy of the clients on the
examples that each of them holds out from training (`task.validation_fraction`), over its last evaluations; the test set
is not used, neither to compare runs nor to tell whether one failed. A run that diverged, collapsed or ended at chance
(`collapse.py`) never wins. The search has a seed of its own, which must not be one of the seeds of a final comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.knobs import Knob, set_knob, setting
from thinwire.experiments.search_record import SearchRecord
from thinwire.experiments.successive_halving import Halved, Measure, Rung, Trial, ladder, plan, successive_halving
from thinwire.experiments.validation_runs import validation_runs

SEARCH_SEED = 100  # by default; seeds of comparisons begin at 0
RATES = 8
VALIDATION_FRACTION = 0.1


class RateSearch(NamedTuple):
    """What is searched, and how.

    Args:
        key: the setting, such as `method.client_opt.lr`; None for `rate_key`.
        rates: how many rates the first rung has.
        share: rounds of the last rung, as a fraction of those of the experiment.
        extend: how many more rates may be tried if the best one is at an end.
        validation_fraction: fraction of each client's examples that is held out, unless the experiment has one.
    """

    key: str | None = None
    rates: int = RATES
    share: float = 1.0
    extend: int = RATES // 2
    validation_fraction: float = VALIDATION_FRACTION


DEFAULT = RateSearch()


class RateFound(NamedTuple):
    """The result of a search: the setting, its runs, the criterion in words, and the seed."""

    key: str
    found: Halved
    chosen_by: str
    seed: int

    def record(self) -> SearchRecord:
        """What a run that uses the rate states about it."""
        found = self.found
        assert found.value is not None
        rungs = tuple((len(rung.trials), rung.rounds) for rung in found.rungs)
        return SearchRecord(
            self.key, found.value, found.tried, rungs, self.seed, self.chosen_by, found.rounds, found.bytes
        )

    def applied(self, experiment: Experiment) -> Experiment:
        """An experiment with the rate that was found."""
        assert self.found.value is not None
        return set_knob(experiment, Knob((self.key,), ()), self.found.value)


def rate_key(experiment: Experiment) -> str:
    """The learning rate that decides how far a round moves: the clients', or the server's where that alone does.

    Adam, Yogi and Adagrad normalize the mean update of the clients, and a sketch (EvoFed) sends ranks: there the
    clients' rate hardly changes the length of the server's step. The posterior of FedPM has no rate to search.

    >>> from thinwire.experiments.resolve import resolve
    >>> rate_key(resolve("fedavg")), rate_key(resolve("fedavgm")), rate_key(resolve("fedadam"))
    ('method.client_opt.lr', 'method.client_opt.lr', 'method.server_opt.lr')
    """
    normalized = to_table(experiment)["method"]["server_opt"]["kind"] not in ("sgd", "beta-posterior")
    return f"method.{'server' if normalized or not experiment.method.sketch.is_identity else 'client'}_opt.lr"


def tune_rate(
    experiment: Experiment,
    search: RateSearch = DEFAULT,
    *,
    budget: int | None = None,
    out: Path | None = None,
    data_dir: Path | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    on_rung: Callable[[Rung], None] = lambda rung: None,
) -> RateFound:
    """Find the learning rate of an experiment such as `resolve("mapo", "digits", {"seed": 100})`.

    Args:
        experiment: the experiment; its seed is that of the search, its rate the middle of the ladder.
        search: what is searched, and how.
        budget: the search ends when its runs have sent so many bytes; None for no limit.
        out: a folder for the directories of all runs. Finished runs in it are used again, so that a stopped search
            continues.
        data_dir: the folder of datasets.
        on_trial: is called with each run that ends.
        on_rung: is called with each rung that ends.
    """
    key = search.key or rate_key(experiment)
    ladder_of(experiment, key, search)  # raises before anything is prepared

    def variant(rate: float) -> Experiment:
        return set_knob(experiment, Knob((key,), ()), rate)

    with validation_runs(
        experiment,
        variant,
        shortest(experiment, search.rates, search.share),
        fraction=search.validation_fraction,
        out=out,
        data_dir=data_dir,
        budget=budget,
        on_trial=on_trial,
    ) as runs:
        halved = halve_rates(runs.measure, experiment, key, search, on_rung)
    return RateFound(key, halved, runs.chosen_by, experiment.seed)


def halve_rates(
    measure: Measure, experiment: Experiment, key: str, search: RateSearch, on_rung: Callable[[Rung], None]
) -> Halved:
    """Successive halving of the rates around that of an experiment."""
    rates = ladder_of(experiment, key, search)
    rounds = rounds_of(experiment, search.share)
    return successive_halving(measure, rates, rounds, extend=search.extend, on_rung=on_rung)


def ladder_of(experiment: Experiment, key: str, search: RateSearch) -> tuple[float, ...]:
    """The rates of the first rung; raises a ConfigError if they cannot be searched."""
    rounds_of(experiment, search.share)
    return ladder(_center(experiment, key), search.rates)


def shortest(experiment: Experiment, count: int, share: float, what: str = "rates") -> int:
    """The rounds of the first rung of a search with so many candidates."""
    return plan(count, rounds_of(experiment, share), what)[0][1]


def rounds_of(experiment: Experiment, share: float) -> int:
    """The rounds of the last rung: a share of those of the experiment."""
    if not 0 < share <= 1:
        raise ConfigError(
            f"share must be above 0 and at most 1, a part of the rounds, not {share}; write for example 0.5"
        )
    return max(1, round(share * experiment.rounds))


def _center(experiment: Experiment, key: str) -> float:
    """The rate of the experiment: the middle of the ladder."""
    value = setting(to_table(experiment), key)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} must be a number above 0 to be searched as a rate, not {value!r}")
    return value
