"""Trials: runs of candidates, judged on validation examples of the clients alone.

    criterion   the objective of the run: accuracy, loss, or a metric (`metrics/objective.py`)

It is the mean over the clients on the examples that each holds out from training (`task.validation_fraction`), over the
last evaluations of a run. The test set is not used, neither to compare runs nor to tell whether one failed. A run is at
chance if it is not above the accuracy of a constant prediction.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thinwire.core.text import human_bytes
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.federation.simulation import make_simulation
from thinwire.metrics.objective import Objective, metric_value
from thinwire.reports.rows import value_text
from thinwire.runs.build import build_job
from thinwire.runs.collapse import BROKEN, Chance, Status, judge, validation_chance
from thinwire.runs.config import nested, to_table, update
from thinwire.runs.execute import default_folder
from thinwire.runs.jobs import Jobs
from thinwire.runs.records import SavedRun, read_run
from thinwire.runs.toml import flat
from thinwire.search.candidates import Point

# `at chance so far`: after so few rounds that a longer run may learn; it may go on, but is never the result
TrialStatus = Status | Literal["at chance so far"]


class Trial(NamedTuple):
    """A run of a candidate.

    Args:
        point: the candidate.
        value: the criterion; None if it is unknown, or the loss.
        loss: decides between equal values, smaller is better; None if unknown.
        bytes: bytes that were sent; decides between equal losses.
        rounds: rounds that were trained.
        status: whether training failed.
        by: the criterion.
    """

    point: Point
    value: float | None
    loss: float | None
    bytes: int
    rounds: int
    status: TrialStatus = "finished"
    by: Objective = Objective()

    @property
    def name(self) -> str:
        """The candidate as text.

        >>> Trial((("lr", 0.3), ("k", 64)), 0.9, 0.3, 10, 5).name
        'lr 0.3, k 64'
        """
        return ", ".join(f"{name} {value_text(value)}" for name, value in self.point)

    @property
    def failed(self) -> bool:
        """Whether the run diverged, collapsed or ended at chance."""
        return self.status in BROKEN

    @property
    def outcome(self) -> str:
        """The criterion and the bytes, or how the run failed.

        >>> Trial((), 0.9, 0.3, 10, 5).outcome, Trial((), None, 0.25, 10, 5).outcome
        ('90.00 % (10 B)', 'loss 0.25 (10 B)')
        >>> Trial((), 0.1, 2.3, 10, 5, "at chance").outcome
        'at chance'
        """
        if self.status != "finished":
            return self.status.removesuffix(" so far")
        value = f"loss {self.loss:.4g}" if self.value is None else self.by.text(self.value)
        metric = "" if self.value is None or self.by.name == "accuracy" else f"{self.by.name} "
        return f"{metric}{value} ({human_bytes(self.bytes)})"

    def plain(self) -> dict[str, Any]:
        """Its values, for JSON."""
        return {**self._asdict(), "point": dict(self.point), "by": self.by.name}


Measure = Callable[[Sequence[Point], int], list[Trial]]  # of candidates and a number of rounds


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Trials, the best first: by the criterion, loss, bytes; those that failed last.

    Accuracies at chance are noise: runs at chance so far come after the others, in the order of their losses.

    >>> a, b = Trial((("lr", 1),), 0.5, 1.0, 10, 1), Trial((("lr", 2),), 0.5, 0.9, 20, 1)
    >>> ranked([a, b]) == [b, a]
    True
    """

    def key(trial: Trial) -> tuple[bool, float, float, int]:
        noise = trial.value is None or trial.status == "at chance so far"
        sign = -1 if trial.by.higher_is_better else 1
        loss = math.inf if trial.loss is None or math.isnan(trial.loss) else trial.loss
        return trial.failed, math.inf if noise else sign * (trial.value or 0.0), loss, trial.bytes

    return sorted(trials, key=key)


class ValidationRuns:
    """Runs candidates, each in its own directory; input that cannot be run is refused before the first of them.

    Args:
        experiment: the shortest run.
        fraction: of each client's examples that is held out, unless the experiment has one.
        out: the folder of the run directories, of which finished ones are used again.
        data_dir: the folder of datasets.
    """

    def __init__(self, experiment: Settings, fraction: float, out: Path, data_dir: Path | None = None) -> None:
        held = held_out(experiment, fraction)
        simulation = make_simulation(held.engine, build_job(held, data_dir))
        self.by = simulation.job.ranked_by
        self.chance = validation_chance(simulation)
        self.fraction, self.out, self.data_dir = held.task.validation_fraction, out, data_dir

    def measure(self, runs: Mapping[Point, Settings], jobs: Jobs) -> Iterator[Trial]:
        """Run the experiments of some candidates, and yield the trial of each when it has ended."""
        held = [(point, held_out(one, self.fraction)) for point, one in runs.items()]
        for ended in jobs.finish([one for _, one in held], self.out, data_dir=self.data_dir):
            for point in (point for point, one in held if one == ended):
                yield trial_of(point, read_run(default_folder(ended, self.out)), self.chance, self.by)

    @property
    def chosen_by(self) -> str:
        """The criterion in words."""
        return f"{self.by.name} on the {100 * self.fraction:g} % of each client's examples that are held out"


def trial_of(point: Point, run: SavedRun, chance: Chance | None, by: Objective) -> Trial:
    """The criterion on validation examples, cost and status of a run.

    Args:
        point: the candidate.
        run: its run, finished or diverged.
        chance: the chance accuracy on the validation examples; None if unknown.
        by: the criterion; without accuracy it is the loss.
    """
    records, totals = run.records, run.summary or {}
    accuracy, loss = (mean_of_last(records, name) for name in ("client_accuracy", "client_loss"))
    status: TrialStatus = "diverged" if totals.get("status") == "diverged" else judge(records, chance).status
    if status not in BROKEN:
        if accuracy is None and loss is None:
            raise ConfigError(f"{run.path} has no accuracy and no loss on validation examples to compare by")
        if chance is not None and accuracy is not None and accuracy <= chance.ceiling:
            status = "at chance so far"
    cost = totals["bytes_total_honest"], totals["rounds"]
    value = None if by.name == "loss" else mean_of_last(records, by.validation_key)
    return Trial(point, value, loss, *cost, status, by)


def mean_of_last(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a value over the last tenth of the evaluations, at least one and at most five; None without any.

    >>> mean_of_last([{"loss": 40.0 - i} for i in range(20)], "loss")
    21.5
    """
    values = [value for record in records if (value := metric_value(record, name)) is not None]
    return statistics.fmean(values[-min(5, math.ceil(len(values) / 10)) :]) if values else None


def held_out(experiment: Settings, fraction: float) -> Settings:
    """The experiment with validation examples, and without a target on the test set that would end a run."""
    if not fraction and not experiment.task.validation_fraction:
        raise ConfigError("the learning rate is never chosen by the test set; write --validation-fraction 0.1")
    task = replace(experiment.task, validation_fraction=experiment.task.validation_fraction or fraction)
    return replace(experiment, task=task, eval=replace(experiment.eval, target_accuracy=1.0))


def over(experiment: Settings, rounds: int) -> Settings:
    """The experiment over another number of rounds; counts of rounds in it keep their fraction of the run.

    >>> from thinwire.runs.config import resolve
    >>> over(resolve("slora", overrides={"rounds": 80, "method.next_stage.at": 20}), 8).method.next_stage.at
    2
    """
    if rounds == experiment.rounds:
        return experiment
    share = rounds / experiment.rounds
    changed: dict[str, Any] = {"rounds": rounds}
    for path, count in flat(to_table(experiment)).items():
        if count and re.fullmatch(r"method\.(next_stage\.at|(server_)?lr_schedule\.(.*\.)?(at|rounds))", path):
            scaled = [max(1, round(one * share)) for one in (count if isinstance(count, list) else [count])]
            ascending = list(itertools.accumulate(scaled, lambda last, one: max(last + 1, one)))
            changed[path] = ascending if isinstance(count, list) else ascending[0]
    return update(experiment, nested(changed))
