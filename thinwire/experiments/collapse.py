"""Whether a run learned anything that it still knows: judged from its records against guessing.

    chance     share p of the most frequent class among the n answers of the test set: what a constant answer gets
    error      sqrt(p (1 - p) / n), the standard error of such an accuracy
    at chance  accuracy <= p + min(2 error, (1 - p) / 10)
    learned    accuracy >  p + max(3 error, (1 - p) / 10)        a tenth of the way from guessing to all right

A run is `collapsed` if it had learned and its newest accuracy is at chance, and `at chance` if it never learned and
had a fair trial: ten rounds, or a test loss above ten times that of guessing, ln(classes). It is `diverged` if a loss
is not finite. Otherwise it is `finished`. Losses without an accuracy (regression) are only checked for being finite.

>>> curve = [{"round": i, "accuracy": a} for i, a in ((10, 0.3), (20, 0.5), (30, 0.1), (40, 0.1))]
>>> judge(curve, Chance(share=0.1, examples=10_000, classes=10))[:2]
('collapsed', 30)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from thinwire.core.units import percent

Status = Literal["finished", "at chance", "collapsed", "diverged"]
BROKEN: tuple[Status, ...] = ("at chance", "collapsed", "diverged")
FAIR_ROUNDS = 10  # of a run that never learned: with fewer it may only have been too short
FAIR_LOSS = 10.0  # times the loss of guessing: no slow start is that bad


class Chance(NamedTuple):
    """What guessing gets.

    Args:
        share: the accuracy of the best constant answer.
        examples: how many answers the accuracy is a mean of.
        classes: how many different answers there are.
        metric: the key of the records that it belongs to, `accuracy` or `client_accuracy`.
    """

    share: float
    examples: int
    classes: int
    metric: str = "accuracy"

    @property
    def error(self) -> float:
        """The standard error of an accuracy on so many examples."""
        return math.sqrt(self.share * (1 - self.share) / self.examples)

    @property
    def ceiling(self) -> float:
        """The largest accuracy that is at chance.

        >>> round(Chance(0.1, 10_000, 10).ceiling, 4), round(Chance(0.5, 20, 2).ceiling, 4)
        (0.106, 0.55)
        """
        return self.share + min(2 * self.error, (1 - self.share) / 10)

    @property
    def learned(self) -> float:
        """The accuracy above which something was learned, and not by luck."""
        return self.share + max(3 * self.error, (1 - self.share) / 10)


class Verdict(NamedTuple):
    """How a run stands: its status, the round since when (None if nothing is wrong), and a sentence that says why."""

    status: Status
    round: int | None = None
    why: str = ""


class Course(NamedTuple):
    """What has to be remembered of the records so far."""

    chance: Chance | None
    best: float = -1.0
    best_round: int = 0
    last: float = -1.0
    last_round: int = 0  # the newest round with an accuracy
    low_since: int = 0  # the first round from which on every accuracy was at chance; 0 if the newest is not
    test_loss: float | None = None
    unsound: int = 0  # the first round from which on the loss was not finite; 0 if the newest is
    unsound_what: str = ""

    def after(self, record: Mapping[str, Any]) -> Course:
        """The course with one more record."""
        losses = {"training loss": record.get("loss"), "test loss": record.get("test_loss")}
        wrong = [f"the {name} is {value}" for name, value in losses.items() if value is not None and not _finite(value)]
        found = self._replace(
            unsound=(self.unsound or record["round"]) if wrong else 0, unsound_what="".join(wrong[:1])
        )
        if self.chance is None or (value := record.get(self.chance.metric)) is None:
            return found
        number = record["round"]
        if value > self.best:
            found = found._replace(best=value, best_round=number)
        low = (self.low_since or number) if value <= self.chance.ceiling else 0
        return found._replace(last=value, last_round=number, low_since=low, test_loss=record.get("test_loss"))

    def along(self, records: Iterable[Mapping[str, Any]]) -> Course:
        """The course with more records."""
        course = self
        for record in records:
            course = course.after(record)
        return course

    @property
    def verdict(self) -> Verdict:
        """How the run stands after these records."""
        if self.unsound:
            return Verdict("diverged", self.unsound, f"{self.unsound_what} since round {self.unsound}")
        if self.chance is None or not self.low_since:
            return Verdict("finished")
        name, told = self.chance.metric.replace("_", " "), percent(self.last)
        guess = f"chance ({percent(self.chance.share)} by a constant answer)"
        if self.best > self.chance.learned:
            was = f"{percent(self.best)} in round {self.best_round}"
            why = f"{name} {told} is back at {guess} since round {self.low_since}; {was}"
            return Verdict("collapsed", self.low_since, why)
        if not self._tried:
            return Verdict("finished")
        return Verdict("at chance", self.last_round, f"{name} {told} in round {self.last_round} is not above {guess}")

    @property
    def _tried(self) -> bool:
        """Whether a run that never learned had a fair trial."""
        assert self.chance is not None
        wild = self.test_loss is not None and self.test_loss > FAIR_LOSS * math.log(self.chance.classes)
        return self.last_round >= FAIR_ROUNDS or (wild and self.chance.metric == "accuracy")


def judge(records: Iterable[Mapping[str, Any]], chance: Chance | None) -> Verdict:
    """How a run stands after these records.

    Args:
        records: lines of `metrics.jsonl`; of each, `round`, `loss`, `test_loss` and an accuracy are looked at.
        chance: what guessing gets; None where no accuracy says how good the model is.
    """
    return Course(chance).along(records).verdict


def news(before: Course, after: Course) -> str | None:
    """What one more record changed, in a sentence; None if nothing did.

    >>> start = Course(Chance(0.1, 10_000, 10)).after({"round": 9, "accuracy": 0.8})
    >>> print(news(start, start.after({"round": 10, "accuracy": 0.1})))
    collapsed: accuracy 10.00 % is back at chance (10.00 % by a constant answer) since round 10; 80.00 % in round 9
    """
    was, now = before.verdict, after.verdict
    if was.status == now.status:
        return None
    return f"{now.status}: {now.why}" if now.status in BROKEN else "above chance again"


def summary_of(verdict: Verdict, chance: Chance | None = None) -> dict[str, Any]:
    """The keys of a summary that say how a run ended."""
    known = {} if chance is None else {"chance_accuracy": chance.share}
    return {"status": verdict.status, "status_round": verdict.round, "status_why": verdict.why, **known}


def known_verdict(summary: Mapping[str, Any] | None) -> Verdict | None:
    """The verdict that a summary holds; None where it holds none. Nothing of a file is trusted."""
    status, number, why = ((summary or {}).get(key) for key in ("status", "status_round", "status_why"))
    for known in (*BROKEN, "finished"):
        if status == known:
            return Verdict(known, number if isinstance(number, int) else None, why if isinstance(why, str) else "")
    return None


def known_chance(value: Any) -> Chance | None:
    """What `environment.json` says of chance; None where it makes no sense.

    >>> known_chance(Chance(0.1, 100, 10)._asdict())
    Chance(share=0.1, examples=100, classes=10, metric='accuracy')
    >>> known_chance({"share": "a", "examples": 0, "classes": 10})
    """
    if not isinstance(value, dict):
        return None
    share, examples, classes, metric = (value.get(key) for key in Chance._fields)
    if not isinstance(share, float) or not 0 < share < 1 or metric not in ("accuracy", "client_accuracy"):
        return None
    if type(examples) is not int or type(classes) is not int or examples < 1 or classes < 2:
        return None
    return Chance(share, examples, classes, metric)


def is_broken(summary: Mapping[str, Any]) -> bool:
    """Whether a summary says that the run collapsed, diverged or stayed at chance; an old one says nothing."""
    return summary.get("status") in BROKEN


def count_broken(statuses: Iterable[str | None]) -> str:
    """How many of several runs broke down, in words for a table; `-` if none.

    >>> count_broken(["collapsed", "finished", "collapsed"]), count_broken(["finished", None])
    ('2 of 3 collapsed', '-')
    """
    all_of = list(statuses)
    counts = {status: all_of.count(status) for status in BROKEN}
    return ", ".join(f"{n} of {len(all_of)} {status}" for status, n in counts.items() if n) or "-"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
