"""Statements in the verdict on a paper, written from the runs of the page's tables: rows, numbers and directions.

A verdict is text with statements in braces, of a table, its column, a row, a relation and mostly another row:

    {flasc-1; alpha 0.01; FLASC, density 1/4; ahead of; LoRA, rank 16}

becomes

    FLASC, density 1/4 is 3.51 points ahead of LoRA, rank 16 (55.05 ± 2.17 against 51.54 ± 2.22; Table 1, alpha 0.01)

    ahead of, behind         the means differ in that direction by more than their spread, sqrt(std^2 + std'^2)
    level with               they do not
    above the paper, below the paper      the same against the published value, by more than the std of the row
    as in the paper                       no more than that
    bytes of                 honest bytes, as a share of those of the other row
    cost                     cost as the paper counts it, beside the paper's
    reaches                  the value alone
    failed                   how many runs failed; at least one did

`ahead of by at least 1`, `behind by at most 2` and `bytes of at most 45 %` also bound the number. Failed runs of a row
are reported with it; a row whose runs all failed, or that has fewer than two, carries no statement. A verdict with a
statement that the runs do not carry is an error, and the page then has the reason instead (`page_verdict`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.runs.collapse import BROKEN

STATEMENT = re.compile(r"\{([^{}]*)\}")
_BOUND = re.compile(r"(.*?)(?: by)? at (least|most) (\d+(?:\.\d+)?)(?: %)?")


class Row(NamedTuple):
    """A row of a table in one column.

    Args:
        values: the measure of each finished run; accuracies in percent.
        statuses: of each run, diverged ones included; None where a run has none.
        sent: mean honest bytes; None if no run is finished.
        published: the paper's value; 0 if it has none.
        cost: cost as the paper counts, and the paper's; None where there is none.
        unit: of the cost.
    """

    values: list[float]
    statuses: list[str | None]
    sent: float | None = None
    published: float = 0.0
    cost: tuple[float | None, float | None] = (None, None)
    unit: str = "%"

    @property
    def mean(self) -> float:
        """The mean over finished runs."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """The standard deviation over finished runs."""
        return statistics.stdev(self.values)

    @property
    def text(self) -> str:
        """Mean and standard deviation."""
        return f"{self.mean:.2f} ± {self.std:.2f}"


class TableRows(NamedTuple):
    """The rows of a table, by column and label; its title, such as `Table 1`."""

    title: str
    rows: Mapping[tuple[str, str], Row]


def verdict_text(text: str, tables: Mapping[str, TableRows]) -> str:
    """A verdict with its statements written out; a statement that the runs do not carry is a ConfigError.

    Args:
        text: the verdict, with statements in braces.
        tables: the tables of the page, by name.

    >>> rows = {("IID", "a"): Row([60.0, 62.0], ["finished"] * 2), ("IID", "b"): Row([50.0, 51.0], ["finished"] * 2)}
    >>> verdict_text("Holds: {t; IID; a; ahead of; b}.", {"t": TableRows("Table 1", rows)})
    'Holds: a is 10.50 points ahead of b (61.00 ± 1.41 against 50.50 ± 0.71; Table 1, IID).'
    >>> verdict_text("{t; IID; b; ahead of; a}", {"t": TableRows("Table 1", rows)})
    Traceback (most recent call last):
    thinwire.errors.ConfigError: not carried by the runs: {t; IID; b; ahead of; a}: it is 10.50 points behind
    """
    return STATEMENT.sub(lambda found: _statement(found[1], tables), text)


def page_verdict(text: str, tables: Mapping[str, TableRows]) -> str:
    """The verdict, or why the runs of a page do not carry it."""
    try:
        return verdict_text(text, tables)
    except ConfigError as error:
        return f"No verdict from the runs of this page: {error}."


def _statement(text: str, tables: Mapping[str, TableRows]) -> str:
    """One statement, written out."""
    words = [word.strip() for word in text.split(";")]
    refused: Callable[[str], ConfigError] = lambda why: ConfigError(f"not carried by the runs: {{{text}}}: {why}")  # noqa: E731
    if len(words) not in (4, 5):
        raise refused("a statement has a table, a column, a row, a relation and mostly another row")
    name, column, label, relation, *others = words
    if name not in tables:
        raise refused("the table is not on this page")
    bound = _BOUND.fullmatch(relation)
    relation = bound[1] if bound else relation
    if relation not in _RELATIONS:
        raise refused(f"relation must be one of {', '.join(_RELATIONS)}, not {relation!r}")
    make, with_other = _RELATIONS[relation]
    if with_other != bool(others):
        raise refused(f"{relation!r} needs {'another row' if with_other else 'no other row'}")
    rows = [_row(tables[name], column, one, relation == "failed", refused) for one in (label, *others)]
    try:
        number, phrase, details = make(relation, label, *rows, *others)
    except _NotSo as why:
        raise refused(str(why)) from why
    if bound and not (number >= float(bound[3]) if bound[2] == "least" else number <= float(bound[3])):
        raise refused(f"the number is {number:.2f}")
    named = zip((label, *others), rows, strict=True)
    failed = [] if relation == "failed" else [_failed(one, row) for one, row in named]
    notes = "; ".join(part for part in (details, *failed, f"{tables[name].title}, {column}") if part)
    return f"{phrase} ({notes})"


def _row(table: TableRows, column: str, label: str, any_runs: bool, refused: Callable[[str], ConfigError]) -> Row:
    """A row that can carry a statement; with `any_runs`, also one without results."""
    if (column, label) not in table.rows:
        raise refused(f"there is no row {label!r} in column {column!r}")
    row = table.rows[column, label]
    if any_runs:
        return row
    if len(row.values) < 2:
        raise refused(f"{label} has {len(row.values)} finished runs, and two are needed")
    if all(status in BROKEN for status in row.statuses):
        raise refused(f"all runs of {label} {_failed(label, row).split(f' of {label} ')[-1]}")
    return row


def _failed(label: str, row: Row) -> str:
    """How many runs of a row failed, in words; empty if none did."""
    verbs = {"collapsed": "collapsed", "at chance": "ended at chance", "diverged": "diverged"}
    counts = {status: row.statuses.count(status) for status in BROKEN}
    count = len(row.statuses)
    return ", ".join(f"{n} of {count} runs of {label} {verbs[status]}" for status, n in counts.items() if n)


# -- relations: (number, phrase, details), or _NotSo -------------------------------------------------------------------


class _NotSo(Exception):
    """The runs say something else."""


def _compared(relation: str, label: str, row: Row, other: Row, to: str) -> tuple[float, str, str]:
    gap, spread = row.mean - other.mean, math.hypot(row.std, other.std)
    found = "level with" if abs(gap) <= spread else "ahead of" if gap > 0 else "behind"
    if found != relation:
        far = "" if found == "level with" else f"{abs(gap):.2f} points "
        raise _NotSo(f"it is {far}{found.removesuffix(' of').removesuffix(' with')}")
    far = "" if found == "level with" else f"{abs(gap):.2f} points "
    return abs(gap), f"{label} is {far}{found} {to}", f"{row.text} against {other.text}"


def _against_paper(relation: str, label: str, row: Row) -> tuple[float, str, str]:
    if not row.published:
        raise _NotSo("the paper has no value")
    gap = row.mean - row.published
    level = abs(gap) <= row.std
    found = "as in the paper" if level else "above the paper" if gap > 0 else "below the paper"
    if found != relation:
        raise _NotSo(f"it is {'' if level else f'{abs(gap):.2f} points '}{found}")
    far = "" if level else f"{abs(gap):.2f} points "
    return abs(gap), f"{label} is {far}{found}", f"{row.text} against {row.published:g}"


def _bytes(relation: str, label: str, row: Row, other: Row, to: str) -> tuple[float, str, str]:
    if not row.sent or not other.sent:
        raise _NotSo("its bytes are not known")
    share = 100 * row.sent / other.sent
    return share, f"{label} sends {share:.3g} % of the bytes of {to}", ""


def _cost(relation: str, label: str, row: Row) -> tuple[float, str, str]:
    ours, theirs = row.cost
    if ours is None or not theirs:
        raise _NotSo("its cost, or the paper's, is not known")
    return ours, f"{label} costs {ours:.3g} {row.unit} as the paper counts", f"the paper has {theirs:g} {row.unit}"


def _failures(relation: str, label: str, row: Row) -> tuple[float, str, str]:
    count = sum(status in BROKEN for status in row.statuses)
    if not count:
        raise _NotSo("no run failed")
    return float(count), _failed(label, row), ""


def _reaches(relation: str, label: str, row: Row) -> tuple[float, str, str]:
    return row.mean, f"{label} reaches {row.text} %", ""


_RELATIONS: dict[str, tuple[Callable[..., tuple[float, str, str]], bool]] = {
    "ahead of": (_compared, True),
    "behind": (_compared, True),
    "level with": (_compared, True),
    "above the paper": (_against_paper, False),
    "below the paper": (_against_paper, False),
    "as in the paper": (_against_paper, False),
    "bytes of": (_bytes, True),
    "cost": (_cost, False),
    "reaches": (_reaches, False),
    "failed": (_failures, False),
}
