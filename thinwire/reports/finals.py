"""Final accuracy beside best accuracy, and runs that broke down, in every table that shows an accuracy.

    | method | best accuracy % | runs |      ->      | method | best accuracy % | final accuracy % | broke down | runs |

A table is widened after it was made, from the numbers of the runs behind each row: those of `summary.json`, or those
that were published beside a page. So pages that are written from run directories and pages that are written again from
published numbers have the same columns.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.experiments.collapse import BROKEN, count_broken

BROKE = "broke down"
_ACCURACY = re.compile(r"(our )?(best|final) (own )?accuracy %")
Run = Mapping[str, Any]


def spread(values: Sequence[float | None], scale: float = 100.0) -> str:
    """MeanInterval and standard deviation in words.

    >>> spread([0.5, 0.7]), spread([None])
    ('60.00 ± 14.14', '-')
    """
    known = [scale * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.2f}" + (f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else "")


def widened(
    head: Sequence[str], rows: Sequence[Sequence[str]], runs: Sequence[Sequence[Run]]
) -> tuple[list[str], list[list[str]]]:
    """The table with final beside best, and after the last accuracy how many runs broke down.

    Args:
        head: the names of the columns.
        rows: the cells; rows of runs that did not finish may be short.
        runs: the runs behind each row, with `best_accuracy`, `final_accuracy`, `status`.

    >>> run = {"best_accuracy": 0.5, "final_accuracy": 0.1, "status": "collapsed"}
    >>> head, rows = widened(["method", "best accuracy %", "runs"], [["x", "50.00", "a1"]], [[run]])
    >>> head
    ['method', 'best accuracy %', 'final accuracy %', 'broke down', 'runs']
    >>> rows
    [['x', '50.00', '10.00', '1 of 1 collapsed', 'a1']]
    """
    heads = [name for name in head if name != BROKE]
    kept = [i for i, name in enumerate(head) if name != BROKE]
    table = [[row[i] if i < len(row) else "-" for i in kept] for row in rows]
    for name in [name for name in heads if _ACCURACY.fullmatch(name)]:
        other = name.replace("best", "final") if "best" in name else name.replace("final", "best")
        key = other.removeprefix("our ").removesuffix(" %").replace(" ", "_")
        if other in heads or not any(run.get(key) is not None for mine in runs for run in mine):
            continue
        at = heads.index(name)
        place = at + 1 if "best" in name or name.startswith("our ") else at  # what the table is about stays first
        heads.insert(place, other)
        for cells, mine in zip(table, runs, strict=True):
            cells.insert(place, "-" if cells[at] == "-" else spread([run.get(key) for run in mine]))
    last = max((i for i, name in enumerate(heads) if _ACCURACY.fullmatch(name)), default=-1)
    if last >= 0:
        heads.insert(last + 1, BROKE)
        for cells, mine in zip(table, runs, strict=True):
            cells.insert(last + 1, count_broken(run.get("status") for run in mine))
    return heads, table


def trial_words(by: str, runs: Sequence[Run]) -> str:
    """What a search tells of one choice: what it goes by, the final accuracy if that is another, what went wrong.

    >>> trial_words("best_accuracy", [{"best_accuracy": 0.5528, "final_accuracy": 0.1, "status": "collapsed"}])
    '55.28, final 10.00, collapsed'
    """
    value, final = (statistics.fmean(100 * (run.get(key) or 0.0) for run in runs) for key in (by, "final_accuracy"))
    other = by == "best_accuracy" and f"{final:.2f}" != f"{value:.2f}"
    wrong = [status for status in dict.fromkeys(run.get("status") for run in runs) if status in BROKEN]
    return f"{value:.2f}" + (f", final {final:.2f}" if other else "") + "".join(f", {status}" for status in wrong)


def judged_on(by: str) -> str:
    """Which examples a search goes by.

    >>> judged_on("best_accuracy"), judged_on("final own accuracy %")
    ('on the test set', 'on examples that clients hold out')
    """
    return "on examples that clients hold out" if "own" in by else "on the test set"


def ended(runs: Sequence[Run]) -> str:
    """How many runs collapsed or ended at chance, as the end of a sentence; nothing if none did.

    >>> ended([{"status": "collapsed"}, {"status": "at chance"}, {"status": "at chance"}])
    '; 1 run collapsed; 2 runs ended at chance'
    """
    statuses = [run.get("status") for run in runs]
    out = ""
    for status, words in (("collapsed", "collapsed"), ("at chance", "ended at chance")):
        if count := statuses.count(status):
            out += f"; {count} run{'s' if count > 1 else ''} {words}"
    return out
