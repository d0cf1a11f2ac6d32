"""Runs of candidates, judged on validation examples of the clients alone; for every search by successive halving.

    criterion   accuracy; the loss for tasks without class labels, or if the loss is the objective of the run

Both are means over the clients on the examples that each holds out from training (`task.validation_fraction`), over the
last evaluations of a run. The test set is not used, neither to compare runs nor to tell whether one failed. A run is at
chance if it is not above the accuracy of a constant prediction; with squared error, if its loss is not below that of
the mean of the training targets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from thinwire.data.losses import bce, mse
from thinwire.data.task import Task
from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.chance import validation_chance
from thinwire.experiments.collapse import BROKEN, Chance, judge
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.load import from_table
from thinwire.experiments.successive_halving import Measured, Trial, TrialStatus
from thinwire.experiments.toml import Table
from thinwire.experiments.trials import Ran, Trials

Criterion = Literal["accuracy", "loss"]
OnTrial = Callable[[Trial], None]


class ValidationRuns:
    """Measures candidates; a candidate that was measured with the same number of rounds is not run again.

    Args:
        variant: the experiment of a candidate, with all its rounds.
        trials: runs it.
        fraction: of each client's examples that is held out, unless the experiment has one.
        chance: the chance accuracy on the validation examples; None if unknown.
        by: the criterion.
        constant_loss: the loss of the best constant prediction, for tasks without accuracy; None if unknown.
        on_trial: is called with each run that ends.
    """

    def __init__(
        self,
        variant: Callable[[Any], Experiment],
        trials: Trials,
        fraction: float,
        chance: Chance | None,
        by: Criterion,
        constant_loss: float | None,
        on_trial: OnTrial,
    ) -> None:
        self.variant, self.trials, self.fraction = variant, trials, fraction
        self.chance, self.by, self.constant_loss, self.on_trial = chance, by, constant_loss, on_trial
        self.known: dict[tuple[Any, int], Measured] = {}

    def measure(self, value: Any, rounds: int) -> Measured:
        """Accuracy and loss of a candidate after a number of rounds; raises `Spent` if the budget ends its run."""
        if (value, rounds) not in self.known:
            experiment = over(held_out(self.variant(value), self.fraction), rounds)
            found = measured(self.trials.run(experiment), self.chance, self.by, self.constant_loss)
            self.known[value, rounds] = found
            self.on_trial(Trial(value, found))
        return self.known[value, rounds]

    @property
    def chosen_by(self) -> str:
        """The criterion in words."""
        return f"{self.by} on the {100 * self.fraction:g} % of each client's examples that are held out"


@contextmanager
def validation_runs(
    experiment: Experiment,
    variant: Callable[[Any], Experiment],
    rounds: int,
    *,
    fraction: float,
    out: Path | None = None,
    data_dir: Path | None = None,
    budget: int | None = None,
    on_trial: OnTrial = lambda trial: None,
) -> Iterator[ValidationRuns]:
    """Prepare the runs of a search; input that cannot be run is refused before the first of them.

    Args:
        experiment: the experiment with its own settings.
        variant: the experiment of a candidate.
        rounds: of the shortest run.
        fraction: of each client's examples that is held out, unless the experiment has one.
        out: a folder for the directories of all runs; None for a temporary one.
        data_dir: the folder of datasets.
        budget: bytes that all runs together may send; None for no limit.
        on_trial: is called with each run that ends.
    """
    held = held_out(experiment, fraction)
    simulation = held.engine.prepare(build_job(over(held, rounds), data_dir))
    chance = validation_chance(simulation)
    task = simulation.job.task
    labels = task.loss is bce or not task.train.targets.is_floating_point()
    by: Criterion = "accuracy" if labels and simulation.job.ranked_by.name != "loss" else "loss"
    with nullcontext(out) if out is not None else TemporaryDirectory() as folder:
        trials = Trials(Path(folder), data_dir, budget)
        part, constant = held.task.validation_fraction, constant_loss(task)
        yield ValidationRuns(variant, trials, part, chance, by, constant, on_trial)


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


def measured(
    ran: Ran, chance: Chance | None, by: Criterion = "accuracy", constant_loss: float | None = None
) -> Measured:
    """Accuracy and loss on validation examples, cost and status of a run.

    Args:
        ran: the run.
        chance: the chance accuracy on the validation examples; None if unknown.
        by: the criterion; without accuracy it is the loss.
        constant_loss: the loss of a constant prediction on the validation examples; None if unknown.
    """
    records = ran.records()
    accuracy, loss = (mean_of_last(records, name) for name in ("client_accuracy", "client_loss"))
    status: TrialStatus = "diverged" if ran.summary.get("status") == "diverged" else judge(records, chance).status
    if status not in BROKEN and accuracy is None and loss is None:
        raise ConfigError(f"{ran.path} has no accuracy and no loss on validation examples to compare by")
    if status not in BROKEN and chance is not None and accuracy is not None and accuracy <= chance.ceiling:
        status = "at chance so far"
    if status not in BROKEN and constant_loss is not None and loss is not None and loss >= constant_loss:
        status = "at chance so far"
    return Measured(accuracy, loss, ran.bytes, ran.rounds, status, "loss" if accuracy is None else by)


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
