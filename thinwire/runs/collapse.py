"""The status of a run, from its records: finished, at chance, collapsed or diverged.

    chance     frequency p of the most frequent class in a test set of n labels: the accuracy of a constant prediction
    error      sqrt(p (1 - p) / n), its standard error
    at chance  accuracy <= p + min(2 error, (1 - p) / 10)
    learned    accuracy >  p + max(3 error, (1 - p) / 10)        a tenth of the way from chance to 1

A run is `collapsed` if it had learned and its latest accuracy is at chance. It is `at chance` if it never learned,
after at least ten rounds, or with a test loss, or after three rounds a training loss in any of them, above ten times
that of a uniform prediction, ln(classes). It is `diverged` if a loss is not finite. Otherwise it is `finished`.

A regression is judged by R2 in the same way: predicting the mean has R2 = 0, so at chance is R2 <= 0, learned R2 > 0.1.

Without accuracy, in a regression too, the training loss is checked. A run is `collapsed` if that of each of its latest
five rounds is above ten times that of round 1: training made the model worse than it was, for good. Slow starts
and warm-ups do not do that, a single bad cohort does it for one round only. A first loss of 0 or less is no measure.

>>> curve = [{"round": i, "accuracy": a} for i, a in ((10, 0.3), (20, 0.5), (30, 0.1), (40, 0.1))]
>>> judge(curve, Chance(share=0.1, examples=10_000, classes=10))[:2]
('collapsed', 30)

Chance accuracy on the test set of a run: the frequency of its most frequent class; for a regression, R2 = 0.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from thinwire.core.text import percent
from thinwire.runs.files import INVALID, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.federation.federation import Federation


Status = Literal["finished", "at chance", "collapsed", "diverged"]
BROKEN: tuple[Status, ...] = ("at chance", "collapsed", "diverged")
FAILED_RUNS = "diverged or collapsed"  # the head of a column that counts them
FAIR_ROUNDS = 10  # with fewer, a run that never learned may only have been too short
FEW_ROUNDS = 3  # a large training loss at the very start may come from the initial weights
SLOW_LOSS = 2.0  # times the loss of a uniform prediction: a slow start stays below
FAIR_LOSS = 10.0  # times the loss of a uniform prediction: more is no slow start
HIGH_LOSS = 10.0  # times the training loss of round 1, for tasks without accuracy
HIGH_ROUNDS = 5  # so many rounds in a row, and a high training loss is a collapse


class Chance(NamedTuple):
    """The chance accuracy; of a regression, the R2 of predicting the mean.

    Args:
        share: the accuracy of the best constant prediction; 0 for R2.
        examples: number of labels.
        classes: number of classes; 0 for R2.
        metric: the key of the records to compare with, `accuracy` or `client_accuracy`; or `r2` of their metrics.
    """

    share: float
    examples: int
    classes: int
    metric: str = "accuracy"

    @property
    def error(self) -> float:
        """The standard error of the chance accuracy."""
        return math.sqrt(self.share * (1 - self.share) / self.examples)

    @property
    def ceiling(self) -> float:
        """The largest accuracy that is at chance.

        >>> round(Chance(0.1, 10_000, 10).ceiling, 4), round(Chance(0.5, 20, 2).ceiling, 4)
        (0.106, 0.55)
        """
        return 0.0 if self.is_r2 else self.share + min(2 * self.error, (1 - self.share) / 10)

    @property
    def learned(self) -> float:
        """The accuracy above which a run has learned."""
        return 0.1 if self.is_r2 else self.share + max(3 * self.error, (1 - self.share) / 10)

    @property
    def is_r2(self) -> bool:
        """Whether runs are judged by R2."""
        return self.metric == "r2"

    def value(self, record: Mapping[str, Any]) -> float | None:
        """What a record has of the metric; None in rounds without evaluation."""
        found = (record.get("metrics") or {}).get("r2") if self.is_r2 else record.get(self.metric)
        return found if found is None or _finite(found) or not self.is_r2 else None

    def text(self, value: float) -> str:
        """A value as text."""
        return f"{value:.4g}" if self.is_r2 else percent(value)

    @property
    def words(self) -> str:
        """The chance value in a sentence."""
        constant = f"chance ({percent(self.share)} for a constant prediction)"
        return "0, that of predicting the mean" if self.is_r2 else constant


class Verdict(NamedTuple):
    """The status of a run, the round since when (None if it is `finished`), and the reason in one sentence."""

    status: Status
    round: int | None = None
    why: str = ""


class Course(NamedTuple):
    """The facts about the records so far that decide the status."""

    chance: Chance | None
    best: float = -1.0
    best_round: int = 0
    last: float = -1.0
    last_round: int = 0  # the latest round with an accuracy
    low_since: int = 0  # the first round since which every accuracy was at chance; 0 if the latest is not
    test_loss: float | None = None
    non_finite: int = 0  # the first round since which the loss was not finite; 0 if the latest is finite
    non_finite_what: str = ""
    peak_loss: float = 0.0  # the largest training loss
    first_loss: float | None = None  # training loss of the first round; only without accuracy, as the next three
    loss: float = 0.0
    loss_round: int = 0
    high_since: int = 0  # the first round since which every training loss was high; 0 if the latest is not

    def after(self, record: Mapping[str, Any]) -> Course:
        """The course after one more record."""
        number, loss, test_loss = record["round"], record.get("loss"), record.get("test_loss")
        losses = {"training loss": loss, "test loss": test_loss}
        wrong = [f"the {name} is {one}" for name, one in losses.items() if one is not None and not _finite(one)]
        new: dict[str, Any] = {"non_finite": (self.non_finite or number) if wrong else 0}
        new["non_finite_what"] = "".join(wrong[:1])
        if _finite(loss):
            new["peak_loss"] = max(self.peak_loss, loss)  # type: ignore[type-var]
            if self.chance is None or self.chance.is_r2:
                first = loss if self.first_loss is None else self.first_loss
                high = (self.high_since or number) if 0 < HIGH_LOSS * first < loss else 0  # type: ignore[operator]
                new |= {"first_loss": first, "loss": loss, "loss_round": number, "high_since": high}
        if self.chance is not None and (value := self.chance.value(record)) is not None:
            low = (self.low_since or number) if value <= self.chance.ceiling else 0
            new |= {"last": value, "last_round": number, "low_since": low, "test_loss": test_loss}
            new |= {"best": value, "best_round": number} if value > self.best else {}
        return self._replace(**new)

    def along(self, records: Iterable[Mapping[str, Any]]) -> Course:
        """The course after several records."""
        course = self
        for record in records:
            course = course.after(record)
        return course

    @property
    def verdict(self) -> Verdict:
        """The status after these records."""
        if self.non_finite:
            return Verdict("diverged", self.non_finite, f"{self.non_finite_what} since round {self.non_finite}")
        if self.high_since and self.loss_round - self.high_since + 1 >= HIGH_ROUNDS:
            first = f"{HIGH_LOSS:g} times that of the first round ({self.first_loss:.4g})"
            why = f"training loss {self.loss:.4g} is above {first} since round {self.high_since}"
            return Verdict("collapsed", self.high_since, why)
        if self.chance is None or not self.low_since:
            return Verdict("finished")
        name, last, chance = self.chance.metric.replace("_", " "), self.chance.text(self.last), self.chance.words
        if self.best > self.chance.learned:
            best = f"{self.chance.text(self.best)} in round {self.best_round}"
            why = f"{name} {last} is back at {chance} since round {self.low_since}; {best}"
            return Verdict("collapsed", self.low_since, why)
        if self.last_round < FAIR_ROUNDS and not self._extreme:
            return Verdict("finished")
        return Verdict("at chance", self.last_round, f"{name} {last} in round {self.last_round} is not above {chance}")

    @property
    def _extreme(self) -> bool:
        """Whether losses are too large for a slow start."""
        if self.chance is None or self.chance.metric != "accuracy":
            return False
        peak = self.peak_loss if self.last_round >= FEW_ROUNDS else 0.0
        return max(self.test_loss or 0.0, peak) > FAIR_LOSS * math.log(self.chance.classes)

    @property
    def healthy(self) -> bool:
        """Whether the latest values are finite, and above chance; without accuracy, whether the loss is not high."""
        return not (self.non_finite or self.low_since or self.high_since)

    @property
    def too_fast(self) -> bool:
        """Whether training failed as it does with a learning rate that is too large.

        A run at chance whose loss never rose may as well have a rate that is too small, or need more rounds.
        """
        status = self.verdict.status
        if status != "at chance" or self.chance is None:
            return status in ("diverged", "collapsed")
        if self.chance.is_r2:
            return False  # a training loss that rises for good is a collapse
        return self._extreme or self.peak_loss > SLOW_LOSS * math.log(self.chance.classes)


def judge(records: Iterable[Mapping[str, Any]], chance: Chance | None) -> Verdict:
    """The status of a run after these records.

    Args:
        records: lines of `metrics.jsonl`; `round`, `loss`, `test_loss` and an accuracy are used.
        chance: the chance accuracy; None for a task without accuracy.
    """
    return Course(chance).along(records).verdict


def news(before: Course, after: Course) -> str | None:
    """The change of status by one more record, in a sentence; None if it is the same.

    >>> start = Course(Chance(0.1, 10_000, 10)).after({"round": 9, "accuracy": 0.8})
    >>> print(news(start, start.after({"round": 10, "accuracy": 0.1})))
    collapsed: accuracy 10.00 % is back at chance (10.00 % for a constant prediction) since round 10; 80.00 % in round 9
    """
    was, now = before.verdict, after.verdict
    if was.status == now.status:
        return None
    if now.status in BROKEN:
        return f"{now.status}: {now.why}"
    low = after.chance is None or (after.chance.is_r2 and was.status == "collapsed" and not before.low_since)
    return "the training loss is low again" if low else "above chance again"


def summary_of(verdict: Verdict, chance: Chance | None = None) -> dict[str, Any]:
    """The keys of a summary about the status."""
    known = {} if chance is None or chance.is_r2 else {"chance_accuracy": chance.share}
    return {"status": verdict.status, "status_round": verdict.round, "status_why": verdict.why, **known}


def known_verdict(summary: Mapping[str, Any] | None) -> Verdict | None:
    """The verdict of a summary; None if it has none. The values may come from a damaged file."""
    found: dict[str, Any] = {**(summary or {})}
    status, number, why = (found.get(key) for key in ("status", "status_round", "status_why"))
    if status is None or status not in get_args(Status):
        return None
    return Verdict(status, number if isinstance(number, int) else None, why if isinstance(why, str) else "")


def known_chance(value: Any) -> Chance | None:
    """The chance accuracy of `environment.json`; None if it is not valid.

    >>> known_chance(Chance(0.1, 100, 10)._asdict())
    Chance(share=0.1, examples=100, classes=10, metric='accuracy')
    >>> known_chance({"share": "a", "examples": 0, "classes": 10})
    """
    try:
        found: Chance = unpack(Chance, value)
    except INVALID:
        return None
    sound = found.examples > 0 and (found.share == 0 if found.is_r2 else 0 < found.share < 1 < found.classes)
    return found if sound and found.metric in ("r2", "accuracy", "client_accuracy") else None


def is_broken(summary: Mapping[str, Any]) -> bool:
    """Whether the run of a summary collapsed, diverged or stayed at chance; older summaries have no status."""
    return summary.get("status") in BROKEN


def count_broken(statuses: Iterable[str | None]) -> str:
    """Counts of collapsed, diverged and at-chance runs, for a table; `-` if there are none.

    >>> count_broken(["collapsed", "finished", "collapsed"]), count_broken(["finished", None])
    ('2 of 3 collapsed', '-')
    """
    all_of = list(statuses)
    counts = {status: all_of.count(status) for status in BROKEN}
    return ", ".join(f"{n} of {len(all_of)} {status}" for status, n in counts.items() if n) or "-"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


MIN_EXAMPLES = 100  # for a meaningful accuracy


def chance_of(simulation: Federation) -> Chance | None:
    """The chance accuracy of a run; None without a test set of class labels, or with fewer than 100 examples.

    Of a regression it is the R2 of predicting the mean, which is 0.

    If clients keep a part of the model private, the public model alone is not used. Then it is the mean over clients of
    the chance accuracy on each client's validation examples, and None without those.
    """
    from thinwire.data.losses import is_regression  # late: it imports torch

    task = simulation.job.task
    if _private(simulation):
        found = validation_chance(simulation)
    elif task.test is None:
        return None
    else:
        regression = Chance(0.0, len(task.test), 0, "r2") if is_regression(task.loss) else None
        found = regression or chance_among(task.test.targets)
    return found if found and found.examples >= MIN_EXAMPLES else None


def chance_among(labels: Tensor) -> Chance | None:
    """The chance accuracy for some labels; None if they are no classes, or all equal. Negative labels are ignored.

    >>> import torch
    >>> chance_among(torch.tensor([0, 1, 1, -100]))
    Chance(share=0.6666666666666666, examples=3, classes=2, metric='accuracy')
    """
    found = chance_over_clients([labels])
    return found and found._replace(metric="accuracy")


def validation_chance(simulation: Federation) -> Chance | None:
    """The chance accuracy on the validation examples of clients: the best constant prediction, averaged over clients.

    If clients keep a part of the model private, each client has a constant prediction of its own. None without
    validation examples, or if their targets are no classes.
    """
    task = simulation.job.task
    if (own := task.client_tests) is None:
        return None
    labels = [task.train.targets[own.client(i)] for i in range(len(own))]
    return chance_over_clients(labels, _private(simulation))


def _private(simulation: Federation) -> bool:
    return any(stage.sendable.size < stage.coords.size for stage in simulation.contract.stages)


def chance_over_clients(labels: list[Tensor], each: bool = False) -> Chance | None:
    """The mean over clients of the accuracy of one constant prediction, or of one for each; without negative labels.

    >>> import torch
    >>> chance_over_clients([torch.tensor([0, 1]), torch.tensor([1, 1, 2, 2])])
    Chance(share=0.5, examples=6, classes=3, metric='client_accuracy')
    """
    if not labels or labels[0].is_floating_point() or labels[0].is_complex():
        return None
    counts = [own for one in labels if (own := Counter(one[one >= 0].flatten().tolist()))]
    classes = set().union(*counts)
    if len(classes) < 2:
        return None
    if each:
        share = statistics.fmean(max(own.values()) / own.total() for own in counts)
    else:
        share = max(statistics.fmean(own[one] / own.total() for own in counts) for one in classes)
    return Chance(share, sum(own.total() for own in counts), len(classes), "client_accuracy") if share < 1 else None
