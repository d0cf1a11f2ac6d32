"""Searches over any measure: successive halving gives long runs to few candidates, FLASC-S few runs to pairs.

    rung 1        n candidates, each with T / 2^(L - 1) rounds          L = 1 + ceil(log2 n)
    rung i + 1    the better half of rung i, each with twice the rounds
    rung L        one candidate, T rounds

A candidate is any value: a learning rate, a tuple of settings, a method. Each rung trains from round 1 with a number of
rounds of its own, so that schedules end with the run. A candidate whose run fails in a rung is out. The result is the
best candidate of the longest rung that has one which never failed: usually that of the last rung. Paper: Non-stochastic
Best Arm Identification and Hyperparameter Optimization (Jamieson and Talwalkar, AISTATS 2016).

FLASC-S searches a size r, such as a rank, and a share d, such as a density, with runs of all rounds (FLASC, 2024; as in
its text: the printed algorithm uses the index of the density as the index of a rank):

    stage 1   for d in shares:  stop when (r2, d) beats (r1, min(d_max, d r2 / r1))
    stage 2   (r, d) for all other sizes r
    result    the best of all runs

Candidates are judged on validation examples of the clients alone (`ValidationRuns`):

    criterion   accuracy; the loss for tasks without class labels, or if the loss is the objective of the run

Both are means over the clients on the examples that each holds out from training (`task.validation_fraction`), over the
last evaluations of a run. The test set is not used, neither to compare runs nor to tell whether one failed. A run is at
chance if it is not above the accuracy of a constant prediction; with squared error, if its loss is not below that of
the mean of the training targets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from thinwire.core.text import human_bytes, percent
from thinwire.data.losses import bce, mse
from thinwire.data.task import Task
from thinwire.errors import ConfigError, Diverged
from thinwire.federation.settings import Settings
from thinwire.runs.build import build_job
from thinwire.runs.collapse import BROKEN, Chance, Status, judge, validation_chance
from thinwire.runs.config import from_table, to_table
from thinwire.runs.execute import default_folder, execute
from thinwire.runs.records import SavedRun, read_run
from thinwire.runs.toml import Table

MAX_CANDIDATES = 64

# `at chance so far`: after so few rounds that a longer run may learn; it may go on, but is never the result
TrialStatus = Status | Literal["at chance so far"]
Criterion = Literal["accuracy", "loss"]


class BudgetSpent(Exception):
    """The byte budget is used up; `lost` and `rounds` are the bytes and the rounds of the run that was ended."""

    def __init__(self, lost: int, rounds: int = 0) -> None:
        super().__init__(lost, rounds)
        self.lost, self.rounds = lost, rounds


class Trial(NamedTuple):
    """A run of a candidate.

    Args:
        value: the candidate.
        accuracy: the criterion, larger is better; None if there is none.
        loss: decides between equal accuracies, smaller is better; None if unknown.
        bytes: bytes that were sent; decides between equal losses.
        rounds: rounds that were trained.
        status: whether training failed.
        by: `loss` if that is the criterion; then accuracies are only shown.
    """

    value: Any
    accuracy: float | None
    loss: float | None
    bytes: int
    rounds: int
    status: TrialStatus = "finished"
    by: Criterion = "accuracy"

    @property
    def failed(self) -> bool:
        """Whether the run diverged, collapsed or ended at chance."""
        return self.status in BROKEN

    @property
    def outcome(self) -> str:
        """The criterion and the bytes, or how the run failed.

        >>> Trial("a", 0.9, 0.3, 10, 5).outcome, Trial("a", None, 0.25, 10, 5, by="loss").outcome
        ('90.00 % (10 B)', 'loss 0.25 (10 B)')
        >>> Trial("a", 0.1, 2.3, 10, 5, "at chance").outcome
        'at chance'
        """
        if self.status != "finished":
            return self.status.removesuffix(" so far")
        value = f"loss {self.loss:.4g}" if self.by == "loss" else percent(self.accuracy)
        return f"{value} ({human_bytes(self.bytes)})"


class Rung(NamedTuple):
    """Runs of equal length, in the order of their candidates, and the candidates of the next rung, the best first."""

    rounds: int
    trials: tuple[Trial, ...]
    kept: tuple[Any, ...] = ()


class SearchResult(NamedTuple):
    """The result of a search.

    Args:
        value: the best candidate; None if every one failed or is at chance.
        rungs: all runs.
        lost: bytes of a run that the budget ended.
        lost_rounds: its rounds.
    """

    value: Any
    rungs: tuple[Rung, ...]
    lost: int = 0
    lost_rounds: int = 0

    @property
    def trials(self) -> list[Trial]:
        """All runs."""
        return [trial for rung in self.rungs for trial in rung.trials]

    @property
    def bytes(self) -> int:
        """The bytes of all runs."""
        return self.lost + sum(trial.bytes for trial in self.trials)

    @property
    def rounds(self) -> int:
        """The rounds of all runs."""
        return self.lost_rounds + sum(trial.rounds for trial in self.trials)

    @property
    def tried(self) -> tuple[Any, ...]:
        """All candidates of the first rung; rates ascend."""
        return tuple(trial.value for trial in self.rungs[0].trials)

    @property
    def stopped(self) -> bool:
        """Whether the budget ended the search."""
        return self.lost > 0


Measure = Callable[[Any, int], Trial]  # of a candidate and a number of rounds; raises `BudgetSpent`
OnRung = Callable[[Rung], None]
OnTrial = Callable[[Trial], None]


def ladder(center: float, count: int) -> tuple[float, ...]:
    """Rates a factor of 2 apart around one, with one more above it than below if their number is even.

    >>> ladder(0.5, 8)
    (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    """
    if not 2 <= count <= MAX_CANDIDATES:
        raise ConfigError(f"a search takes from 2 to {MAX_CANDIDATES} rates, not {count}; write for example 8")
    below = (count - 1) // 2
    return tuple(math.ldexp(center, i - below) for i in range(count))


def plan(count: int, rounds: int, what: str = "rates") -> tuple[tuple[int, int], ...]:
    """The number of candidates and of rounds of each rung.

    >>> plan(8, 60), plan(5, 100)
    (((8, 7), (4, 15), (2, 30), (1, 60)), ((5, 12), (3, 25), (2, 50), (1, 100)))
    """
    counts = [count]
    while counts[-1] > 1:
        counts.append((counts[-1] + 1) // 2)
    fewest = 1 << (len(counts) - 1)
    if rounds < fewest:
        raise ConfigError(
            f"{count} {what} are searched in {len(counts)} rungs, each with twice the rounds of the one before it: the "
            f"last needs {fewest} rounds or more, not {rounds}; write more rounds, or fewer {what}"
        )
    return tuple((number, rounds >> (len(counts) - 1 - i)) for i, number in enumerate(counts))


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """Trials, the best first: by accuracy (or loss, if that is the criterion), loss, bytes; those that failed last.

    Accuracies at chance are noise: runs at chance so far come after the others, in the order of their losses.

    >>> [trial.value for trial in ranked([Trial("a", 0.5, 1.0, 10, 1), Trial("b", 0.5, 0.9, 20, 1)])]
    ['b', 'a']
    """

    def key(trial: Trial) -> tuple[bool, float, float, int]:
        _, accuracy, loss, sent, _, status, by = trial
        error = math.inf if accuracy is None or by == "loss" or status == "at chance so far" else -accuracy
        return trial.failed, error, math.inf if loss is None or math.isnan(loss) else loss, sent

    return sorted(trials, key=key)


def halve_rates(
    measure: Measure, rates: Sequence[float], rounds: int, *, extend: int = 0, on_rung: OnRung = lambda rung: None
) -> SearchResult:
    """The search for a rate.

    Args:
        measure: runs a rate for a number of rounds.
        rates: ascending, a factor of 2 apart, the likely best one in the middle.
        rounds: of the last rung.
        extend: if the best rate of the first rung is at an end, or all rates fail, up to so many more are tried there
            (below the smallest, if all fail).
        on_rung: is called with each rung when it ends.

    >>> def measure(rate, rounds):
    ...     return Trial(rate, 1 - abs(rate - 1.0) / 10, 0.0, bytes=100 * rounds, rounds=rounds)
    >>> found = halve_rates(measure, (0.5, 1.0, 2.0, 4.0), rounds=8)
    >>> found.value, [(rung.rounds, len(rung.trials)) for rung in found.rungs], found.rounds, found.bytes
    (1.0, [(2, 4), (4, 2), (8, 1)], 24, 2400)
    """
    middle = (len(rates) - 1) // 2
    ahead = [rates[i] for i in sorted(range(len(rates)), key=lambda i: abs(i - middle))]  # a budget ends the last ones
    return halving(measure, ahead, rounds, key=float, extend=extend, on_rung=on_rung)


def _beyond(trials: Iterable[Trial]) -> float | None:
    """The next rate beyond the end that has the best one; None if the best one is not at an end."""
    first, *others = ranked(trials)
    low, high = (end(trial.value for trial in (first, *others)) for end in (min, max))
    if first.failed or first.value == low:
        return float(low / 2)
    return float(2 * high) if first.value == high else None


def halving(
    measure: Measure,
    candidates: Sequence[Any],
    rounds: int,
    *,
    key: Callable[[Any], Any],
    rank: Callable[[Iterable[Trial]], list[Trial]] = ranked,
    extend: int = 0,
    on_rung: OnRung = lambda rung: None,
) -> SearchResult:
    """The search over candidates of any kind, in the order in which they are tried: a budget ends the last ones.

    Args:
        measure: runs a candidate for a number of rounds.
        candidates: values that can be keys of a dictionary.
        rounds: of the last rung.
        key: the order of the candidates in a rung.
        rank: sorts the trials of a rung, the best first.
        extend: how many further rates are tried in the first rung while the best one is at an end.
        on_rung: is called with each rung when it ends.

    >>> def measure(point, rounds):
    ...     return Trial(point, None, abs(point[0] - 0.3) + point[1], bytes=0, rounds=rounds, by="loss")
    >>> halving(measure, [(0.1, 1), (0.1, 2), (0.3, 1), (0.3, 2)], rounds=8, key=tuple).value
    (0.3, 1)
    """
    steps = plan(len(candidates), rounds)
    ahead = list(candidates)
    rungs: list[Rung] = []
    spent = BudgetSpent(0)
    for i, (_, length) in enumerate(steps):
        trials: dict[Any, Trial] = {}
        try:
            for value in ahead:
                trials[value] = measure(value, length)
            for _ in range(extend if i == 0 else 0):
                if (further := _beyond(trials.values())) is None:
                    break
                trials[further] = measure(further, length)
        except BudgetSpent as error:
            spent = error
        fit = [trial.value for trial in rank(trials.values()) if not trial.failed]
        last = i + 1 == len(steps) or spent.lost > 0
        ahead = [] if last else fit[: steps[i + 1][0]]
        if trials:
            rungs.append(Rung(length, tuple(trials[value] for value in sorted(trials, key=key)), tuple(ahead)))
            on_rung(rungs[-1])
        if not ahead:
            break
    return _result(rungs, spent)


def flasc_s(measure: Measure, sizes: Sequence[Any], shares: Sequence[Any], rounds: int) -> SearchResult:
    """FLASC-S over pairs of a size and a share, both ascending; no pair is measured twice.

    >>> def measure(pair, rounds):
    ...     size, share = pair
    ...     return Trial(pair, min(size * share, 2.0) / 4 + size / 100, 0.0, int(100 * size * share), rounds)
    >>> found = flasc_s(measure, (1, 2, 4), (0.25, 0.5, 1.0), rounds=40)
    >>> found.value, found.bytes, len(found.trials)
    ((4, 0.25), 200, 3)
    """
    trials: dict[Any, Trial] = {}
    (small, large), top, spent = sizes[:2], shares[-1], BudgetSpent(0)

    def run(size: Any, share: Any) -> Trial:
        pair = size, share
        if pair not in trials:
            trials[pair] = measure(pair, rounds)
        return trials[pair]

    try:
        share = top
        for d in shares:
            equal = d * large / small  # about as many values as (large, d) sends
            low, high = run(small, min(top, math.floor(equal) if isinstance(top, int) else equal)), run(large, d)
            if not high.failed and ranked([low, high])[0] is high:
                share = d
                break
        for size in sizes[1:]:
            run(size, share)
    except BudgetSpent as error:
        spent = error
    return _result([Rung(rounds, tuple(trials.values()))] if trials else [], spent)


def _result(rungs: Sequence[Rung], spent: BudgetSpent) -> SearchResult:
    """The best candidate of the longest rung that has one which never failed and is above chance."""
    if not rungs:
        raise ConfigError("the budget was spent before one run finished; raise it, or train fewer rounds")
    out = {trial.value for rung in rungs for trial in rung.trials if trial.failed}
    fit = (
        trial.value
        for rung in reversed(rungs)
        for trial in ranked(rung.trials)
        if trial.value not in out and trial.status == "finished"
    )
    return SearchResult(next(fit, None), tuple(rungs), spent.lost, spent.rounds)


# -- runs on validation examples --------------------------------------------------------------------------------------


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
