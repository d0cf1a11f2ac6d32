"""The status of a run, from its records: finished, at chance, collapsed or diverged.

    chance     frequency p of the most frequent class in a test set of n labels: the accuracy of a constant prediction
    error      sqrt(p (1 - p) / n), its standard error
    at chance  accuracy <= p + min(2 error, (1 - p) / 10)
    learned    accuracy >  p + max(3 error, (1 - p) / 10)        a tenth of the way from chance to 1

A run is `collapsed` if it had learned and its latest accuracy is at chance. It is `at chance` if it never learned,
after at least ten rounds, or with a test loss above ten times that of a uniform prediction, ln(classes). It is
`diverged` if a loss is not finite. Otherwise it is `finished`.

Without accuracy the training loss is checked. A run is `collapsed` if that of each of its latest
five rounds is above ten times that of round 1: training made the model worse than it was, for good. Slow starts
and warm-ups do not do that, a single bad cohort does it for one round only. A first loss of 0 or less is no measure.

>>> curve = [{"round": i, "accuracy": a} for i, a in ((10, 0.3), (20, 0.5), (30, 0.1), (40, 0.1))]
>>> judge(curve, Chance(share=0.1, examples=10_000, classes=10))[:2]
('collapsed', 30)
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from thinwire.core.text import percent
from thinwire.runs.files import INVALID, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.federation.federation import Federation


Status = Literal["finished", "at chance", "collapsed", "diverged"]
BROKEN: tuple[Status, ...] = ("at chance", "collapsed", "diverged")
FAILED_RUNS = "diverged or collapsed"  # the head of a column that counts them
FAIR_ROUNDS = 10  # with fewer, a run that never learned may only have been too short
FAIR_LOSS = 10.0  # times the loss of a uniform prediction: more is no slow start
HIGH_LOSS = 10.0  # times the training loss of round 1, for tasks without accuracy
HIGH_ROUNDS = 5  # so many rounds in a row, and a high training loss is a collapse
MIN_EXAMPLES = 100  # for a meaningful accuracy


class Chance(NamedTuple):
    """The chance accuracy.

    Args:
        share: the accuracy of the best constant prediction.
        examples: number of labels.
        classes: number of classes.
        metric: the key of the records to compare with.
    """

    share: float
    examples: int
    classes: int
    metric: Literal["accuracy", "client_accuracy"] = "accuracy"

    @property
    def ceiling(self) -> float:
        """The largest accuracy that is at chance.

        >>> round(Chance(0.1, 10_000, 10).ceiling, 4), round(Chance(0.5, 20, 2).ceiling, 4)
        (0.106, 0.55)
        """
        return self.share + min(2 * self._error, (1 - self.share) / 10)

    @property
    def learned(self) -> float:
        """The accuracy above which a run has learned."""
        return self.share + max(3 * self._error, (1 - self.share) / 10)

    @property
    def _error(self) -> float:
        return math.sqrt(self.share * (1 - self.share) / self.examples)


class Verdict(NamedTuple):
    """The status of a run.

    Args:
        status: the status.
        round: the round since when; None if it is `finished`.
        why: the reason in one sentence.
    """

    status: Status
    round: int | None = None
    why: str = ""


def judge(records: Sequence[Mapping[str, Any]], chance: Chance | None) -> Verdict:
    """The status of a run after these records.

    Args:
        records: lines of `metrics.jsonl`; `round`, `loss`, `test_loss` and an accuracy are used.
        chance: the chance accuracy; None for a task without accuracy.
    """
    if since := _since(records, lambda one: not all(_is_finite(one.get(key, 0.0)) for key in ("loss", "test_loss"))):
        what = "test" if _is_finite(records[-1].get("loss", 0.0)) else "training"
        why = f"the {what} loss is {records[-1]['test_loss' if what == 'test' else 'loss']} since round {since}"
        return Verdict("diverged", since, why)
    if chance is None:
        return _judge_loss(records)
    key = chance.metric
    since = _since(records, lambda one: None if one.get(key) is None else one[key] <= chance.ceiling)
    if not since:
        return Verdict("finished")
    evaluated = [one for one in records if one.get(key) is not None]
    last, best, guess = evaluated[-1], max(evaluated, key=lambda one: one[key]), math.log(chance.classes)
    name, noise = key.replace("_", " "), f"{100 * (chance.ceiling - chance.share):.2f}"
    constant = (
        f"chance (at most {percent(chance.ceiling)}: {percent(chance.share)} for a constant prediction and "
        f"{noise} points of noise among {chance.examples:,} examples)"
    )
    if best[key] > chance.learned:
        why = f"{name} {percent(last[key])} is back at {constant} since round {since}; {percent(best[key])} in round"
        return Verdict("collapsed", since, f"{why} {best['round']}")
    test_loss = last.get("test_loss") or 0.0
    if last["round"] < FAIR_ROUNDS and test_loss <= FAIR_LOSS * guess:
        return Verdict("finished")
    why = f"{name} {percent(last[key])} in round {last['round']} is not above {constant}"
    return Verdict("at chance", last["round"], why)


def _judge_loss(records: Sequence[Mapping[str, Any]]) -> Verdict:
    """The status by the training loss; a regression is at chance if its R2 was never above 0."""
    found = [(one["round"], one["metrics"].get("r2")) for one in records if isinstance(one.get("metrics"), Mapping)]
    r2s = [(number, r2) for number, r2 in found if isinstance(r2, int | float) and math.isfinite(r2)]
    if r2s and r2s[-1][0] >= FAIR_ROUNDS and max(r2 for _, r2 in r2s) <= 0:
        number, r2 = r2s[-1]
        why = f"r2 {r2:.4g} in round {number} is not above 0, that of predicting the mean"
        return Verdict("at chance", number, why)
    first = (records[0].get("loss") or 0.0) if records else 0.0
    since = _since(records, lambda one: 0 < HIGH_LOSS * first < (one.get("loss") or 0.0))
    if not since or records[-1]["round"] - since + 1 < HIGH_ROUNDS:
        return Verdict("finished")
    limit = f"{HIGH_LOSS:g} times that of the first round ({first:.4g})"
    why = f"training loss {records[-1]['loss']:.4g} is above {limit} since round {since}"
    return Verdict("collapsed", since, why)


def _since(records: Sequence[Mapping[str, Any]], bad: Callable[[Mapping[str, Any]], bool | None]) -> int:
    """The first round since which every record is bad; 0 if the latest is not. None is for a record without a value."""
    since = 0
    for record in reversed(records):
        found = bad(record)
        if found is False:
            break
        since = record["round"] if found else since
    return since


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def news(was: Verdict, now: Verdict) -> str | None:
    """The change of status by one more record, in a sentence; None if it is the same.

    >>> records = [{"round": 9, "accuracy": 0.8}, {"round": 10, "accuracy": 0.1}]
    >>> text = news(Verdict("finished"), judge(records, Chance(0.1, 10_000, 10)))
    >>> text.partition(" (")[0], text.partition(") ")[2]
    ('collapsed: accuracy 10.00 % is back at chance', 'since round 10; 80.00 % in round 9')
    """
    if was.status == now.status:
        return None
    if now.status in BROKEN:
        return f"{now.status}: {now.why}"
    return "the training loss is low again" if was.why.startswith("training loss") else "above chance again"


def known_verdict(summary: Mapping[str, Any] | None) -> Verdict | None:
    """The verdict of a summary; None if it has none, or one that is not valid."""
    found = summary or {}
    try:
        known = {"round": found.get("status_round"), "why": found.get("status_why", "")}
        verdict: Verdict = unpack(Verdict, {"status": found.get("status"), **known})
    except INVALID:
        return None
    return verdict


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
    return found if found.examples > 0 and 0 < found.share < 1 < found.classes else None


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


def chance_of(federation: Federation) -> Chance | None:
    """The chance accuracy of a run; None without a test set of class labels, or with fewer than 100 examples.

    If clients keep a part of the model private, the public model alone is not used. Then it is the mean over clients of
    the chance accuracy on each client's validation examples, and None without those.
    """
    from thinwire.data.losses import is_regression  # late: it imports torch

    task = federation.job.task
    shared = None if task.test is None or is_regression(task.loss) else chance_among(task.test.targets)
    found = validation_chance(federation) if _is_private(federation) else shared
    return found if found and found.examples >= MIN_EXAMPLES else None


def validation_chance(federation: Federation) -> Chance | None:
    """The chance accuracy on the validation examples of clients: the best constant prediction, averaged over clients.

    If clients keep a part of the model private, each client has a constant prediction of its own. None without
    validation examples, or if their targets are no classes.
    """
    task = federation.job.task
    if (own := task.client_tests) is None:
        return None
    found = chance_among(*(task.train.targets[own.client(i)] for i in range(len(own))), each=_is_private(federation))
    return found and found._replace(metric="client_accuracy")


def _is_private(federation: Federation) -> bool:
    return any(stage.sendable.size < stage.coords.size for stage in federation.contract.stages)


def chance_among(*labels: Tensor, each: bool = False) -> Chance | None:
    """The mean over label sets of the accuracy of one constant prediction; None if they are no classes, or all equal.

    Args:
        *labels: the sets, of which negative labels are ignored.
        each: one constant prediction for each set, instead of one for all.

    >>> import torch
    >>> chance_among(torch.tensor([0, 1, 1, -100]))
    Chance(share=0.6666666666666666, examples=3, classes=2, metric='accuracy')
    >>> chance_among(torch.tensor([0, 1]), torch.tensor([1, 1, 2, 2])).share
    0.5
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
    return Chance(share, sum(own.total() for own in counts), len(classes)) if share < 1 else None
