"""Runs of candidates, judged on validation examples of the clients alone, and the runs that confirm a result.

    criterion   accuracy; the loss for tasks without class labels, or if the loss is the objective of the run

Both are means over the clients on the examples that each holds out from training (`task.validation_fraction`), over the
last evaluations of a run. The test set is not used, neither to compare runs nor to tell whether one failed. A run is at
chance if it is not above the accuracy of a constant prediction; with squared error, if its loss is not below that of
the mean of the training targets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from thinwire.data.losses import bce, mse
from thinwire.data.task import Task
from thinwire.errors import ConfigError, Diverged
from thinwire.federation.settings import Settings
from thinwire.runs.build import build_job
from thinwire.runs.collapse import BROKEN, Chance, judge, validation_chance
from thinwire.runs.config import from_table, to_table
from thinwire.runs.execute import default_folder, execute
from thinwire.runs.records import SavedRun, read_run
from thinwire.runs.toml import Table
from thinwire.search.halving import BudgetSpent, Measure, Trial, TrialStatus, ranked

Criterion = Literal["accuracy", "loss"]
OnTrial = Callable[[Trial], None]


class ValidationRuns:
    """Runs candidates, each in its own directory; input that cannot be run is refused before the first of them.

    Finished runs are used again, and a candidate that was measured with the same number of rounds is not run again.

    Args:
        experiment: the experiment with its own settings.
        variant: the experiment of a candidate, with all its rounds.
        rounds: of the shortest run.
        fraction: of each client's examples that is held out, unless the experiment has one.
        out: the folder of the run directories.
        data_dir: the folder of datasets.
        budget: bytes that all runs together may send; None for no limit.
        on_trial: is called with each run that ends.
    """

    def __init__(
        self,
        experiment: Settings,
        variant: Callable[[Any], Settings],
        rounds: int,
        *,
        fraction: float,
        out: Path,
        data_dir: Path | None = None,
        budget: int | None = None,
        on_trial: OnTrial = lambda trial: None,
    ) -> None:
        held = held_out(experiment, fraction)
        simulation = held.engine.prepare(build_job(over(held, rounds), data_dir))
        task = simulation.job.task
        labels = task.loss is bce or not task.train.targets.is_floating_point()
        self.by: Criterion = "accuracy" if labels and simulation.job.ranked_by.name != "loss" else "loss"
        self.chance, self.constant_loss = validation_chance(simulation), constant_loss(task)
        self.variant, self.fraction, self.on_trial = variant, held.task.validation_fraction, on_trial
        self.out, self.data_dir, self.budget, self.spent = out, data_dir, budget, 0
        self.known: dict[tuple[Any, int], Trial] = {}

    def measure(self, value: Any, rounds: int) -> Trial:
        """Run a candidate for a number of rounds; raises `BudgetSpent` if the budget ends its run."""
        if (value, rounds) not in self.known:
            run = self._run(over(held_out(self.variant(value), self.fraction), rounds))
            self.known[value, rounds] = trial_of(value, run, self.chance, self.by, self.constant_loss)
            self.on_trial(self.known[value, rounds])
        return self.known[value, rounds]

    def _run(self, experiment: Settings) -> SavedRun:
        sent = 0

        def add(more: int, rounds: int) -> None:
            nonlocal sent
            sent += more
            if self.budget is not None and self.spent + sent > self.budget:
                raise BudgetSpent(sent, rounds)

        path = default_folder(experiment, self.out)
        with suppress(Diverged):  # its totals until then are written
            execute(
                experiment,
                path,
                data_dir=self.data_dir,
                resume=True,
                on_round=lambda one: add(one.bytes_up + one.bytes_down + one.bytes_catchup, one.round),
            )
        run = read_run(path)
        found = run.summary or {}
        add(found["bytes_total_honest"] - sent, found["rounds"])
        self.spent += sent
        return run

    @property
    def chosen_by(self) -> str:
        """The criterion in words."""
        return f"{self.by} on the {100 * self.fraction:g} % of each client's examples that are held out"


def constant_loss(task: Task) -> float | None:
    """The mean over clients of the squared error of a constant, the mean training target, on their held-out examples.

    None for other losses than the squared error: there the output of a constant prediction is not known.
    """
    if task.loss is not mse or task.client_tests is None:
        return None
    own, targets = task.client_tests, task.train.targets
    trained = torch.cat([torch.as_tensor(task.clients.client(i)) for i in range(len(task.clients))])
    mean = targets[trained].mean(0, keepdim=True)
    held = [targets[own.client(i)] for i in range(len(own)) if len(own.client(i))]
    return statistics.fmean(float(mse(mean.expand_as(one), one).mean()) for one in held)


def trial_of(
    value: Any, run: SavedRun, chance: Chance | None, by: Criterion = "accuracy", constant_loss: float | None = None
) -> Trial:
    """Accuracy and loss on validation examples, cost and status of a run.

    Args:
        value: the candidate.
        run: its run, finished or diverged.
        chance: the chance accuracy on the validation examples; None if unknown.
        by: the criterion; without accuracy it is the loss.
        constant_loss: the loss of a constant prediction on the validation examples; None if unknown.
    """
    records, totals = run.records, run.summary or {}
    accuracy, loss = (mean_of_last(records, name) for name in ("client_accuracy", "client_loss"))
    status: TrialStatus = "diverged" if totals.get("status") == "diverged" else judge(records, chance).status
    if status not in BROKEN:
        if accuracy is None and loss is None:
            raise ConfigError(f"{run.path} has no accuracy and no loss on validation examples to compare by")
        no_better = chance is not None and accuracy is not None and accuracy <= chance.ceiling
        if no_better or (constant_loss is not None and loss is not None and loss >= constant_loss):
            status = "at chance so far"
    cost = totals["bytes_total_honest"], totals["rounds"]
    return Trial(value, accuracy, loss, *cost, status, "loss" if accuracy is None else by)


def mean_of_last(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a value over the last tenth of the evaluations, at least one and at most five; None without any.

    >>> mean_of_last([{"loss": 40.0 - i} for i in range(20)], "loss")
    21.5
    """
    values = [record[name] for record in records if record.get(name) is not None]
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


class Confirmation(NamedTuple):
    """The full runs after a search.

    Args:
        value: what is recommended; None if neither run trains.
        rounds: of each run.
        found: the run of the result of the search; None if the budget ended it.
        start: the run of the start setting; None if the budget ended it, if both are the same, or if there is none.
        is_start: whether the start setting is recommended.
        text: the outcome in one sentence.
    """

    value: Any
    rounds: int
    found: Trial | None
    start: Trial | None = None
    is_start: bool = False
    text: str = ""


def confirm(measure: Measure | None, found: Any, start: Any, rounds: int) -> Confirmation:
    """Run the result of a search and the start setting in full; the better one that does not fail is recommended.

    Args:
        measure: runs a candidate for a number of rounds; None if the budget is spent.
        found: the result of the search.
        start: the start setting.
        rounds: of the whole run.

    >>> def measure(value, rounds):  # 2 was the best of shorter runs
    ...     return Trial(value, {1: 0.9, 2: 0.8}[value], 0.5, bytes=10, rounds=rounds)
    >>> print(confirm(measure, 2, 1, 60).text)
    the result is worse than the start setting over 60 rounds: 80.00 % (10 B), the start setting 90.00 % (10 B)
    """
    runs: list[Trial] = []
    if measure:
        with suppress(BudgetSpent):
            for value in dict.fromkeys((found, start)):
                runs.append(measure(value, rounds))
    if not runs:
        text = f"not confirmed over {rounds} rounds: the budget was spent before"
        return Confirmation(found, rounds, None, is_start=found == start, text=text)
    own, before = runs[0], next(iter(runs[1:]), None)
    best = next((trial.value for trial in ranked(runs) if trial.status == "finished"), None)
    if before:
        other = f"the start setting {before.outcome}"
    else:
        other = "which is the start setting" if found == start else "the start setting was not run: no budget left"
    if best is None:
        verb = "neither trains" if before else "not confirmed"
    elif best == found:
        verb = "confirmed"
    else:
        verb = "the result is worse than the start setting" if own.status == "finished" else "the result fails"
    text = f"{verb} over {rounds} rounds: {own.outcome}, {other}"
    return Confirmation(best, rounds, own, before, best == start, text)
