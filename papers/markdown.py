"""Tables and sentences of pages: Markdown, means over seeds, where runs come from and what they cost.

A table that shows an accuracy also has the final one beside the best, and a count of failed runs (`widened`):

    | method | best accuracy % | runs |
 ->
    | method | best accuracy % | final accuracy % | diverged or collapsed | runs |

Columns are added to a finished table, from the values of the runs of each row. So a page that is written from run
directories and one that is written from published values have the same columns.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thinwire.core.text import human_bytes, human_seconds, markdown_text
from thinwire.runs.collapse import BROKEN, FAILED_RUNS, count_broken

B_LEFT = "% of B left"  # of the B of all adapters: not zero in what clients receive at the end
_ACCURACY = re.compile(r"(our )?(best|final) (client )?accuracy %")
Run = Mapping[str, Any]


def mean_std_text(values: Sequence[float | None], scale: float = 100.0) -> str:
    """Mean and standard deviation as text.

    >>> mean_std_text([0.5, 0.7]), mean_std_text([None])
    ('60.00 ± 14.14', '-')
    """
    known = [scale * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.2f}" + (f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else "")


def widened(
    head: Sequence[str], rows: Sequence[Sequence[str]], runs: Sequence[Sequence[Run]]
) -> tuple[list[str], list[list[str]]]:
    """Add final next to best accuracy, and after the last accuracy how many runs failed and what is left of adapters.

    Args:
        head: the names of the columns.
        rows: the cells; rows of unfinished runs may be short.
        runs: the runs of each row, with `best_accuracy`, `final_accuracy`, `status`, `nonzero_b`.

    >>> run = {"best_accuracy": 0.5, "final_accuracy": 0.1, "status": "collapsed"}
    >>> head, rows = widened(["method", "best accuracy %", "runs"], [["x", "50.00", "a1"]], [[run]])
    >>> head
    ['method', 'best accuracy %', 'final accuracy %', 'diverged or collapsed', 'runs']
    >>> rows
    [['x', '50.00', '10.00', '1 of 1 collapsed', 'a1']]
    """
    heads = [name for name in head if name != FAILED_RUNS]
    columns = [i for i, name in enumerate(head) if name != FAILED_RUNS]
    table = [[row[i] if i < len(row) else "-" for i in columns] for row in rows]
    for name in [name for name in heads if _ACCURACY.fullmatch(name)]:
        other = name.replace("best", "final") if "best" in name else name.replace("final", "best")
        key = other.removeprefix("our ").removesuffix(" %").replace(" ", "_")
        if other in heads or not any(run.get(key) is not None for row_runs in runs for run in row_runs):
            continue
        at = heads.index(name)
        place = at + 1 if "best" in name or name.startswith("our ") else at  # the measure of the table stays first
        heads.insert(place, other)
        for cells, row_runs in zip(table, runs, strict=True):
            cells.insert(place, "-" if cells[at] == "-" else mean_std_text([run.get(key) for run in row_runs]))
    last = max((i for i, name in enumerate(heads) if _ACCURACY.fullmatch(name)), default=-1)
    if last >= 0 and any(run.get("nonzero_b") is not None for row_runs in runs for run in row_runs):
        heads.insert(last + 1, B_LEFT)
        for cells, row_runs in zip(table, runs, strict=True):
            cells.insert(last + 1, mean_std_text([run.get("nonzero_b") for run in row_runs]))
    if last >= 0:
        heads.insert(last + 1, FAILED_RUNS)
        for cells, row_runs in zip(table, runs, strict=True):
            cells.insert(last + 1, count_broken(run.get("status") for run in row_runs))
    return heads, table


def trial_text(by: str, runs: Sequence[Run]) -> str:
    """The result of one trial of a search: its score, the final accuracy if different, and how its runs failed.

    >>> trial_text("best_accuracy", [{"best_accuracy": 0.5528, "final_accuracy": 0.1, "status": "collapsed"}])
    '55.28, final 10.00, collapsed'
    """
    value, final = (statistics.fmean(100 * (run.get(key) or 0.0) for run in runs) for key in (by, "final_accuracy"))
    other = by == "best_accuracy" and f"{final:.2f}" != f"{value:.2f}"
    failed = [status for status in dict.fromkeys(run.get("status") for run in runs) if status in BROKEN]
    return f"{value:.2f}" + (f", final {final:.2f}" if other else "") + "".join(f", {status}" for status in failed)


def selection_set(by: str) -> str:
    """The examples on which a search selects.

    >>> selection_set("best_accuracy"), selection_set("final client accuracy %")
    ('on the test set', 'on validation examples of the clients')
    """
    return "on validation examples of the clients" if "client" in by else "on the test set"


def failures_text(runs: Sequence[Run]) -> str:
    """How many runs collapsed or ended at chance, as the end of a sentence; empty if none did.

    >>> failures_text([{"status": "collapsed"}, {"status": "at chance"}, {"status": "at chance"}])
    '; 1 run collapsed; 2 runs ended at chance'
    """
    statuses = [run.get("status") for run in runs]
    text = ""
    for status, verb in (("collapsed", "collapsed"), ("at chance", "ended at chance")):
        if count := statuses.count(status):
            text += f"; {count} run{'s' if count > 1 else ''} {verb}"
    return text


def at_edge(value: Any, tried: Sequence[Any]) -> bool:
    """Whether a number is the smallest or the largest of those that were tried.

    >>> at_edge(0.1, [0.05, 0.1, 0.2]), at_edge(0.2, [0.05, 0.1, 0.2]), at_edge("a", ["a", "b"])
    (False, True, False)
    """
    numbers = [v for v in tried if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(numbers) == len(tried) > 1 and value in (min(numbers), max(numbers))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], plain: bool = True) -> str:
    """A Markdown table; short rows are padded. Cells are escaped, unless they are Markdown already (`plain=False`).

    >>> print(markdown(["a", "b"], [["1"]]), end="")
    | a | b |
    |---|---|
    | 1 | - |
    """
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    shown = markdown_text if plain else str
    lines += ["| " + " | ".join([*map(shown, row), *["-"] * (len(head) - len(row))]) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def made_text(run: Mapping[str, Any]) -> str:
    """The day and the commit that made a run.

    >>> made_text({"commit": "4e48f0d6c1aa", "date": "2026-11-15T19:19:36Z"}), made_text({})
    ('2026-11-15, 4e48f0d', 'unknown')
    """
    commit = str(run.get("commit") or "")
    short = commit[:7] + ("+" if commit.endswith("+") else "")
    return ", ".join(word for word in (str(run.get("date") or "")[:10], short) if word) or "unknown"


def provenance_text(runs: Iterable[Mapping[str, Any]]) -> str:
    """When and at which commits the runs of a table were made, as a sentence; empty if nothing is known.

    >>> provenance_text([{"commit": "4e48f0d", "date": "2026-11-15"}] * 2 + [{}])
    'Made on 2026-11-15, 4e48f0d (2 runs); unknown (1 run). '
    """
    counts = Counter(map(made_text, runs))
    if not counts or set(counts) == {"unknown"}:
        return ""
    parts = [f"{made} ({run_count(counts[made])})" for made in sorted(counts)]
    return f"Made on {'; '.join(parts)}. "


def cost_text(runs: Sequence[Mapping[str, Any]], device: str) -> str:
    """What the runs of a table cost, as a sentence; empty without runs.

    >>> cost_text([{"seconds": 1800.0, "bytes_total": 5_000_000}] * 3, "cuda")
    'Cost: 3 runs, 1.5 h of training on cuda (the sum over runs; some shared the device), 15 MB of messages. '
    """
    if not runs:
        return ""
    seconds, sent = (sum(run.get(key) or 0 for run in runs) for key in ("seconds", "bytes_total"))
    unknown = sum(run.get("seconds") is None for run in runs)
    beyond = f"; that of {run_count(unknown)} is not known" if unknown else ""
    return (
        f"Cost: {run_count(len(runs))}, {human_seconds(seconds)} of training on {device} (the sum over runs; some "
        f"shared the device{beyond}), {human_bytes(sent)} of messages. "
    )


def run_count(count: int) -> str:
    """A number of runs in words.

    >>> run_count(1), run_count(1200)
    ('1 run', '1,200 runs')
    """
    return "1 run" if count == 1 else f"{count:,} runs"
