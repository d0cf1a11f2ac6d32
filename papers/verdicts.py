"""Claims of papers judged by the runs of the tables, in one word, by paired intervals.

A claim is a statement of a table, its column, a row, a relation, mostly another row, and which accuracy it is about:

    flasc-1; alpha 0.01; FLASC, density 1/4; ahead of; LoRA, rank 16; final

    ahead of                the row is better
    level with              the row is not worse
    behind by at most 2     the row is at most so many points worse
    bytes of at most 45 %   honest bytes, as a share of those of the other row
    cost of at most 45 %    cost as the paper counts it
    near the paper          the row is not below the published value
    learns                  no run diverged, collapsed or ended at chance

Rows are compared by the differences of runs with the same seed: `holds` and `fails` need the 95 % interval of their
mean on one side (Student's t), otherwise the verdict is `level`, which is enough for `level with`. `near the paper`
takes the interval of the row. Accuracies are `best`, `final` or `client`, the final one of clients. A row with fewer
than two runs, or with a run that is older than a fix that touches it, is `not run`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from papers.markdown import mean_std_text
from thinwire.errors import ConfigError
from thinwire.reports.rows import MeanInterval
from thinwire.runs.collapse import BROKEN

WORDS = ("holds", "level", "fails", "not run")
MEASURES = {"best": "best_accuracy", "final": "final_accuracy", "client": "final_client_accuracy"}
_BOUND = re.compile(r"(.*?)(?: by| of)? at most (\d+(?:\.\d+)?)(?: %)?")


class Row(NamedTuple):
    """A row of a table in one column.

    Args:
        values: by measure (`best`, `final`, `client`), of each finished run by its seed, in percent.
        statuses: of each run, diverged ones included; None where a run has none.
        sent: mean honest bytes; None if no run is finished.
        published: the paper's value; 0 if it has none.
        cost: cost as the paper counts, in percent; None where there is none.
        old: the fix that a run of the row is older than; empty if there is none.
    """

    values: Mapping[str, Mapping[int, float]]
    statuses: list[str | None]
    sent: float | None = None
    published: float = 0.0
    cost: float | None = None
    old: str = ""


class Verdict(NamedTuple):
    """What the runs say about a claim: one of `WORDS`, the numbers, and the seeds that they are of."""

    word: str
    text: str = "-"
    seeds: str = "-"


TableRows = Mapping[tuple[str, str], Row]


def verdict(statement: str, tables: Mapping[str, TableRows]) -> Verdict:
    """The verdict on a claim.

    Args:
        statement: the claim; without one it is `not run`.
        tables: the rows of each table by column and label.

    >>> a, b = (Row({"best": {0: at, 1: at + 2, 2: at + 4}}, ["finished"] * 3) for at in (60, 50))
    >>> verdict("t; IID; b; level with; a; best", {"t": {("IID", "a"): a, ("IID", "b"): b}}).word
    'fails'
    """
    if not statement:
        return Verdict("not run")
    name, column, label, relation, *rest = (word.strip() for word in statement.split(";"))
    measure = rest.pop() if rest and rest[-1] in MEASURES else ""
    bound = _BOUND.fullmatch(relation)
    relation, most = (bound[1], float(bound[2])) if bound else (relation, 0.0)
    needs = {"bytes": (1, False), "cost": (0, False), "learns": (0, False), "near the paper": (0, True)}
    others, accuracy = needs.get(relation, (1, True))
    known = (*needs, "ahead of", "level with", "behind")
    if relation not in known or len(rest) != others or accuracy != bool(measure):
        raise ConfigError(f"{statement!r}: a claim has a table, a column, a row, one of {', '.join(known)}, and so on")
    rows = [row for one in (label, *rest) if (row := tables.get(name, {}).get((column, one)))]
    if old := next((row.old for row in rows if row.old), ""):
        return Verdict("not run", f"older than a fix: {old}")
    if len(rows) <= len(rest) or any(len(row.statuses) < 2 for row in rows):
        return Verdict("not run")
    row, other = rows[0], rows[-1]
    counts = ((status, one.statuses.count(status), len(one.statuses)) for one in rows for status in BROKEN)
    failed = [f"{count} of {whole} {status}" for status, count, whole in counts if count]
    notes = f" ({', '.join(failed)})" if failed else ""
    seeds = " ".join(map(str, row.values.get("best", {}))) or "-"
    if relation == "learns":
        return Verdict("fails" if failed else "holds", notes.strip(" ()") or "all runs learn", seeds)
    if relation in ("bytes", "cost"):
        share = row.cost if relation == "cost" else 100 * row.sent / other.sent if row.sent and other.sent else None
        if share is None:
            return Verdict("not run")
        at = mean_std_text(list(row.values.get("best", {}).values()), 1.0)  # few bytes for little accuracy are no feat
        return Verdict("holds" if share <= most else "fails", f"{share:.3g} % at best {at}{notes}", seeds)
    mine, theirs = (one.values.get(measure, {}) for one in (row, other))
    shared = [seed for seed in mine if seed in theirs]
    gaps = [mine[seed] - (row.published if relation == "near the paper" else theirs[seed]) for seed in shared]
    if not (found := MeanInterval.of(gaps)) or found.half is None:
        return Verdict("not run")
    low, high = found.mean - found.half + most, found.mean + found.half + most
    word = "holds" if low > 0 else "fails" if high < 0 else "level"
    if word == "level" and relation in ("level with", "near the paper"):
        word = "holds"
    against = f"{row.published:g}" if relation == "near the paper" else f"{statistics.fmean(theirs.values()):.2f}"
    gap = f"{found.mean:+.2f} ({found.mean - found.half:+.2f} to {found.mean + found.half:+.2f})"
    return Verdict(
        word,
        f"{measure} {mean_std_text(list(mine.values()), 1.0)} against {against}: {gap}{notes}",
        " ".join(map(str, shared)),
    )
