"""Values as text in tables and charts of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.core.text import visible
from thinwire.core.units import human_bytes
from thinwire.experiments.records import ROLLED_BACK
from thinwire.metrics.objective import Objective
from thinwire.reports.objectives import ACCURACY, number_text
from thinwire.reports.seed_groups import MeanInterval

NARROW = 340  # pixels: every chart is drawn wide and narrow, and the style sheet shows the one that fits


def retry_text(retry: Mapping[str, Any]) -> str:
    """One time that a run went back, in a sentence; the values may come from a damaged file.

    >>> found = {"round": 3, "status": "diverged", "from_round": 0, "lr": 0.5, "bytes_abandoned": 2000}
    >>> retry_text(found)
    'round 3 diverged: back to the start with learning rate 0.5, 2 kB abandoned'
    """
    known = {key: retry.get(key) for key in ("round", "from_round", "lr", "bytes_abandoned")}
    number, back, lr, lost = (value if isinstance(value, int | float) else 0 for value in known.values())
    where = f"round {back}" if back else "the start"
    status = visible(str(retry.get("status")), 40)
    if status == ROLLED_BACK:
        out = [one for one in retry.get("left_out") or () if isinstance(one, int)]
        without = f" without clients {', '.join(map(str, out[:20]))}" if out else ""
        return f"round {number} {status}: back to {where}{without}, {human_bytes(lost)} abandoned"
    return f"round {number} {status}: back to {where} with learning rate {lr:.4g}, {human_bytes(lost)} abandoned"


def accuracy_text(value: MeanInterval | None) -> str:
    """Mean and standard deviation in percent, without the sign.

    >>> accuracy_text(MeanInterval.of([0.5, 0.7]))
    '60.00 ± 14.14'
    """
    if value is None:
        return "-"
    return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.half is not None else "")


def metric_text(value: MeanInterval | None) -> str:
    """Mean and standard deviation of a metric in its own unit."""
    if value is None:
        return "-"
    return number_text(value.mean) + (f" ± {number_text(value.std, 2)}" if value.half is not None else "")


def accuracy_interval(value: MeanInterval | None) -> str:
    """The 95 % interval of a mean accuracy, in percent."""
    if value is None or value.half is None:
        return "-"
    low, high = max(0.0, value.mean - value.half), min(1.0, value.mean + value.half)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def value_text(objective: Objective, value: MeanInterval | None) -> str:
    """Mean and standard deviation of an objective: accuracy in percent, others in their own unit."""
    return accuracy_text(value) if objective == ACCURACY else metric_text(value)


def value_interval(objective: Objective, value: MeanInterval | None) -> str:
    """The 95 % interval of the mean of an objective."""
    if objective == ACCURACY or value is None or value.half is None:
        return accuracy_interval(value)
    return f"{number_text(value.mean - value.half)} to {number_text(value.mean + value.half)}"


def byte_interval(value: MeanInterval) -> str:
    """The 95 % interval of a mean number of bytes."""
    if value.half is None:
        return "-"
    return f"{human_bytes(max(0.0, value.mean - value.half))} to {human_bytes(value.mean + value.half)}"


def setting_text(value: Any) -> str:
    """The value of a setting."""
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def ident(text: str) -> str:
    """A text as part of an HTML id.

    >>> ident("cifar 10 %")
    'cifar-10--'
    """
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)
