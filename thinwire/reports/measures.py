"""What a table of a paper measures, taken from a run: an accuracy, rounds, seconds, bytes.

    best_accuracy, final_accuracy, best_client_accuracy, final_client_accuracy       in per cent
    rounds to 0.8                      until that accuracy was first reached
    minutes to 0.8 at 2 Mbps           the same by the model of `network.py`, of the bytes and training times of the run
    seconds a round at 2 Mbps          of all rounds but the first, in which nothing has to be sent down
    MB a round                         what one client sends and receives in such a round, without catch-up

and what a paper calls the cost of a method, of which `cost` gives ours:

    bytes_up        all bytes that clients sent, in per cent of the first row's
    to_worst        bytes without catch-up until the best accuracy of the worst run of the column, in per cent likewise
    gigabytes       bytes of all messages without catch-up
    numbers         numbers that are trained, in per cent of the model's weights
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from thinwire.errors import ConfigError
from thinwire.experiments.config import Experiment
from thinwire.experiments.grid import Line, metrics, summary, to_target
from thinwire.experiments.link_time import link, seconds

Cost = Literal["bytes_up", "to_worst", "gigabytes", "numbers"]
_TO = re.compile(r"(rounds|minutes) to (0\.\d+)(?: at (.+))?")


def heading(measure: str) -> str:
    """What a column of these numbers is called.

    >>> heading("best_accuracy"), heading("rounds to 0.8")
    ('best accuracy %', 'rounds to 0.8')
    """
    return measure.replace("_", " ") + " %" if measure.endswith("_accuracy") else measure


def measured(measure: str, experiment: Experiment, out: Path) -> float | None:
    """The number of a finished run; None if it has none, such as rounds to an accuracy that it never reached."""
    found = summary(experiment, out)
    if found is None:
        return None
    if measure.endswith("_accuracy") and measure in found:
        return None if found[measure] is None else 100 * float(found[measure])
    later = metrics(experiment, out)[1:]
    if measure == "MB a round":
        clients = sum(record["clients"] for record in later)
        return sum(record["bytes_up"] + record["bytes_down"] for record in later) / clients / 1e6 if clients else None
    if measure.startswith("seconds a round at "):
        speed = link(measure.removeprefix("seconds a round at "))
        return seconds(later, speed) / len(later) if later else None
    if goal := _TO.fullmatch(measure):
        reached = to_target(experiment, out, float(goal[2]))
        if reached is None or goal[1] == "rounds":
            return float(reached[0]) if reached else None
        return seconds(metrics(experiment, out)[: reached[0]], link(goal[3])) / 60
    raise ConfigError(f"no measure of a table: {measure!r}; write best_accuracy, or rounds to 0.8")


def cost(kind: str, line: Line, column: Sequence[Line], out: Path) -> float | None:
    """What the paper would call the cost of a line; None before its runs are done.

    Args:
        kind: one of `Cost`.
        line: the line.
        column: all lines of its column, the yardstick first.
        out: the folder of the run directories.
    """
    if kind not in get_args(Cost):
        raise ConfigError(f"cost must be one of {', '.join(get_args(Cost))}, not {kind!r}")
    found = _done(line, out)
    if not found:
        return None
    if kind == "gigabytes":
        return statistics.fmean(s["bytes_total_ideal"] for _, s in found) / 1e9
    if kind == "numbers":
        return statistics.fmean(100 * s["trainable"] / s["parameters"] for _, s in found)
    worst = min((s["best_accuracy"] or 0.0 for other in column for _, s in _done(other, out)), default=0.0)
    own, first = (_spent(kind, one, worst, out) for one in (line, column[0]))
    return 100 * own / first if own is not None and first else None


def _spent(kind: str, line: Line, worst: float, out: Path) -> float | None:
    """MeanInterval bytes, up, or both ways until an accuracy."""
    found = _done(line, out)
    if kind == "bytes_up":
        spent = [s["bytes_up"] for _, s in found]
    else:
        spent = [reached[2] for e, _ in found if (reached := to_target(e, out, worst))]
    return statistics.fmean(spent) if spent else None


def _done(line: Line, out: Path) -> list[tuple[Experiment, dict[str, float]]]:
    return [(e, s) for e in line.runs if (s := summary(e, out))]
