"""Search for the learning rate of a method on a task, by successive halving on validation examples of the clients.

Rates are a factor of 2 apart around the method's own. A run is judged by the mean accuracy of the clients on the
examples that each of them holds out from training (`task.validation_fraction`), over its last evaluations; the test set
is not used, neither to compare runs nor to tell whether one failed. A run that diverged, collapsed or ended at chance
(`collapse.py`) never wins. The search has a seed of its own, which must not be one of the seeds of a final comparison.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.chance import validation_chance
from thinwire.experiments.collapse import BROKEN, Chance, judge
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.load import from_table
from thinwire.experiments.search_record import SearchRecord
from thinwire.experiments.successive_halving import (
    Halved,
    Measured,
    Rung,
    Trial,
    TrialStatus,
    ladder,
    plan,
    successive_halving,
)
from thinwire.experiments.toml import Table
from thinwire.experiments.trials import Ran, Trials
from thinwire.experiments.tune import Knob, set_knob, setting

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
        assert found.rate is not None
        rungs = tuple((len(rung.trials), rung.rounds) for rung in found.rungs)
        return SearchRecord(
            self.key, found.rate, found.rates, rungs, self.seed, self.chosen_by, found.rounds, found.bytes
        )

    def applied(self, experiment: Experiment) -> Experiment:
        """An experiment with the rate that was found."""
        assert self.found.rate is not None
        return set_knob(experiment, Knob((self.key,), ()), self.found.rate)


def rate_key(experiment: Experiment) -> str:
    """The learning rate that decides how far a round moves: the clients', or the server's where that alone does.

    Adam, Yogi and Adagrad normalize the mean update of the clients, and a sketch (EvoFed) sends ranks: there the
    clients' rate hardly changes the length of the server's step.

    >>> from thinwire.experiments.resolve import resolve
    >>> rate_key(resolve("fedavg")), rate_key(resolve("fedavgm")), rate_key(resolve("fedadam"))
    ('method.client_opt.lr', 'method.client_opt.lr', 'method.server_opt.lr')
    """
    normalized = to_table(experiment)["method"]["server_opt"]["kind"] != "sgd"
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
    knob, rounds = Knob((key,), ()), _rounds(experiment, search.share)
    rates = ladder(_center(experiment, key), search.rates)
    lengths = plan(search.rates, rounds)
    experiment = held_out(experiment, search.validation_fraction)
    simulation = experiment.engine.prepare(build_job(over(experiment, lengths[0][1]), data_dir))  # refuses bad input
    chance = validation_chance(simulation)
    with nullcontext(out) if out is not None else TemporaryDirectory() as folder:
        trials = Trials(Path(folder), data_dir, budget)

        def measure(rate: float, length: int) -> Measured:
            found = measured(trials.run(over(set_knob(experiment, knob, rate), length)), chance)
            on_trial(Trial(rate, found))
            return found

        halved = successive_halving(measure, rates, rounds, extend=search.extend, on_rung=on_rung)
    fraction = experiment.task.validation_fraction
    by = f"accuracy on the {100 * fraction:g} % of each client's examples that are held out"
    return RateFound(key, halved, by, experiment.seed)


def measured(ran: Ran, chance: Chance | None) -> Measured:
    """Accuracy and loss on validation examples, cost and status of a run.

    Args:
        ran: the run.
        chance: the chance accuracy on the validation examples; None if unknown.
    """
    records = ran.records()
    accuracy, loss = (mean_of_last(records, name) for name in ("client_accuracy", "client_loss"))
    status: TrialStatus = "diverged" if ran.summary.get("status") == "diverged" else judge(records, chance).status
    if status not in BROKEN and accuracy is None and loss is None:
        raise ConfigError(f"{ran.path} has no accuracy and no loss on validation examples to compare by")
    if status not in BROKEN and chance is not None and accuracy is not None and accuracy <= chance.ceiling:
        status = "at chance so far"
    return Measured(accuracy, loss, ran.bytes, ran.rounds, status)


def mean_of_last(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a value over the last tenth of the evaluations, at least one and at most five; None without any.

    >>> mean_of_last([{"loss": 40.0 - i} for i in range(20)], "loss")
    21.5
    """
    values = [record[name] for record in records if record.get(name) is not None]
    return statistics.fmean(values[-min(5, math.ceil(len(values) / 10)) :]) if values else None


def held_out(experiment: Experiment, fraction: float) -> Experiment:
    """The experiment with validation examples, and without a target on the test set that would end a run."""
    if not fraction and not experiment.task.validation_fraction:
        raise ConfigError("the learning rate is never chosen by the test set; write --validation-fraction 0.1")
    task = replace(experiment.task, validation_fraction=experiment.task.validation_fraction or fraction)
    return replace(experiment, task=task, eval=replace(experiment.eval, target_accuracy=1.0))


def over(experiment: Experiment, rounds: int) -> Experiment:
    """The experiment over another number of rounds; counts of rounds in it keep their fraction of the run.

    >>> from thinwire.experiments.resolve import resolve
    >>> over(resolve("slora", overrides={"rounds": 80, "method.next_stage.at": 20}), 8).method.next_stage.at
    2
    """
    if rounds == experiment.rounds:
        return experiment
    share, table = rounds / experiment.rounds, to_table(experiment)
    method = table["method"]
    for slot in ("lr_schedule", "server_lr_schedule"):
        if slot in method:
            method[slot] = _scaled(method[slot], share)
    if stage := method.get("next_stage"):
        method["next_stage"] = {**stage, "at": max(1, round(stage["at"] * share))}
    return from_table({**table, "rounds": rounds})


def _scaled(schedule: Table, share: float) -> Table:
    """A learning-rate schedule with its counts of rounds (`rounds`, `at`) times a share.

    >>> _scaled({"kind": "warmup", "rounds": 10, "inner": {"kind": "multistep", "at": [50, 52], "by": 0.1}}, 0.1)
    {'kind': 'warmup', 'rounds': 1, 'inner': {'kind': 'multistep', 'at': [5, 6], 'by': 0.1}}
    """
    out = dict(schedule)
    if isinstance(count := out.get("rounds"), int) and count > 0:
        out["rounds"] = max(1, round(count * share))
    if isinstance(counts := out.get("at"), list):
        scaled: list[int] = []
        for one in counts:
            scaled.append(max(scaled[-1] + 1 if scaled else 1, round(one * share)))
        out["at"] = scaled
    if isinstance(inner := out.get("inner"), dict):
        out["inner"] = _scaled(inner, share)
    return out


def _rounds(experiment: Experiment, share: float) -> int:
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
