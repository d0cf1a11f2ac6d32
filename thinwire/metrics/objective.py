"""The objective of a run: the one number by which its rounds, and runs of a comparison, are ranked.

    accuracy      the share of correct labels, where targets are class labels; higher is better
    loss          the test loss; lower is better
    NAME          a metric of the run, such as r2; higher is better unless the metric says otherwise

>>> objective_of({}, has_accuracy=False)
Objective(name='loss', higher_is_better=False)
>>> objective_of({}, has_accuracy=True).value({"accuracy": 0.5, "test_loss": 1.2})
0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.errors import UnknownName
from thinwire.metrics.base import Metric

M = TypeVar("M", bound=Metric)

_FIELDS = {"accuracy": "accuracy", "loss": "test_loss"}  # objective -> field of a record


@dataclass(frozen=True)
class Objective:
    """The number by which runs are ranked.

    Args:
        name: `accuracy`, `loss` (the test loss), or the name of a metric.
        higher_is_better: the direction.

    >>> r2 = Objective("r2")
    >>> r2.better(0.8, 0.7), r2.better(0.8, None), Objective("loss", False).better(0.8, 0.7)
    (True, True, False)
    >>> Objective().text(0.9123), r2.text(0.9123)
    ('91.23 %', '0.9123')
    """

    name: str = "accuracy"
    higher_is_better: bool = True

    @property
    def label(self) -> str:
        """Its name in tables and on axes.

        >>> Objective().label, Objective("loss", False).label, Objective("r2").label
        ('test accuracy', 'test loss', 'r2')
        """
        return f"test {self.name}" if self.name in _FIELDS else self.name

    @property
    def validation_key(self) -> str:
        """Where records have its value on the validation examples of the clients (see `metric_value`).

        >>> Objective().validation_key, Objective("r2").validation_key
        ('client_accuracy', 'clients_eval.r2')
        """
        return f"client_{self.name}" if self.name in _FIELDS else f"clients_eval.{self.name}"

    @property
    def key(self) -> str:
        """Where records have its value (see `metric_value`).

        >>> [Objective(name).key for name in ("accuracy", "loss", "r2")]
        ['accuracy', 'test_loss', 'metrics.r2']
        """
        return _FIELDS.get(self.name, f"metrics.{self.name}")

    def value(self, record: Mapping[str, Any]) -> float | None:
        """Its value in a record as a dictionary; None in rounds without evaluation, and where it is not finite."""
        return metric_value(record, self.key)

    def better(self, value: float | None, than: float | None) -> bool:
        """Whether a value is strictly better than another; any value is better than None."""
        if value is None or than is None:
            return than is None and value is not None
        return value > than if self.higher_is_better else value < than

    def text(self, value: float | None) -> str:
        """A value for readers: accuracy in percent, others with four digits; `-` for None."""
        if value is None:
            return "-"
        return f"{100 * value:.2f} %" if self.name == "accuracy" else f"{value:.4g}"

    def summary(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Its entry in `summary.json`: the best value with its round, and the last one.

        >>> rounds = [{"round": 1, "test_loss": 2.0}, {"round": 2, "test_loss": 3.0}]
        >>> Objective("loss", False).summary(rounds)
        {'name': 'loss', 'higher_is_better': False, 'best': 2.0, 'best_round': 1, 'final': 3.0}
        """
        best, at, final = None, None, None
        for record in records:
            value = self.value(record)
            final = final if value is None else value
            if self.better(value, best):
                best, at = value, record["round"]
        found = {"best": best, "best_round": at, "final": final}
        return {"name": self.name, "higher_is_better": self.higher_is_better, **found}


def metric_value(record: Mapping[str, Any], metric: str) -> float | None:
    """The value of a metric in a record; None if the round has none, or it is not a finite number.

    Args:
        record: a line of `metrics.jsonl`.
        metric: a key of the record, `metrics.NAME` or `clients_eval.NAME`.

    >>> record = {"accuracy": 0.9, "metrics": {"macro_f1": 0.8}, "clients_eval": None}
    >>> [metric_value(record, metric) for metric in ("accuracy", "metrics.macro_f1", "clients_eval.p10")]
    [0.9, 0.8, None]
    """
    field, _, name = metric.partition(".")
    found = record.get(field)
    if name:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if is_number(found) and abs(found) < 1e300 else None  # type: ignore[arg-type]


def is_number(value: Any) -> bool:
    """Whether a value is a number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def objective_of(metrics: Mapping[str, Metric], has_accuracy: bool, name: str = "") -> Objective:
    """The objective of a run.

    Args:
        metrics: the metrics of the run by name.
        has_accuracy: whether targets are class labels, so that records have an accuracy.
        name: the chosen objective; "" for accuracy if there is one, then r2 if it is a metric, then loss.
    """
    if not name:
        name = "accuracy" if has_accuracy else "r2" if "r2" in metrics else "loss"
    if name in metrics:
        return Objective(name, getattr(metrics[name], "higher_is_better", True))
    if name == "loss":
        return Objective(name, higher_is_better=False)
    if name == "accuracy" and has_accuracy:
        return Objective()
    raise UnknownName("metric of the run", name, [*(["accuracy"] if has_accuracy else []), "loss", *metrics])


def shown(record: Mapping[str, Any], name: str = "") -> tuple[str, str] | None:
    """What to show of a record while a run goes on: a label and a value as text; None in rounds without evaluation.

    Args:
        record: a record as a dictionary.
        name: the chosen objective; "" for accuracy, then r2, then the test loss, whichever the record has.

    >>> shown({"accuracy": 0.5, "test_loss": 1.2}), shown({"test_loss": 1.2, "metrics": {"r2": 0.75, "mae": 2.0}})
    (('accuracy', '50.00 %'), ('r2', '0.75'))
    """
    for one in [name] if name else ["accuracy", "r2", "loss"]:
        objective = Objective(one)
        if (value := objective.value(record)) is not None:
            return "test loss" if one == "loss" else one, objective.text(value)
    return None


def lower_is_better(metric: M) -> M:
    """Mark a metric of which the lowest value is best, such as an error; usable as a decorator.

    >>> @lower_is_better
    ... def mean_error(outputs, targets):
    ...     return float((outputs - targets).abs().mean())
    >>> objective_of({"mean_error": mean_error}, has_accuracy=False, name="mean_error").higher_is_better
    False
    """
    metric.higher_is_better = False  # type: ignore[attr-defined]
    return metric
