"""Grids of experiments: methods with settings, values to try, and seeds. `runs.py` runs them.

A grid is a table: a task (`on`), `rounds`, `seeds`, settings for all (`set`), and `rows`. A row is a `method` with
settings (`set`), and lists of values to try in every combination (`over`). With `tune = { seeds = [100], share = 0.5 }`
the values are tried on those seeds only, for a share of the rounds. The best combination of each row, by the mean of
`tune.by` (an accuracy, `mean of the last 5` evaluations, or for example `bytes to 0.8`), is run on the seeds of the
grid, which are not used in the search. If a run fails on one of them (diverges, collapses or stays at chance,
`collapse.py`), the next best combination replaces it.

With `tune.extend = 8` a search does not end at an edge: while the best of a row is the smallest or the largest number
that was tried, the next one beyond it, by the ratio of the last two, is tried as well, up to eight of them.

The criterion is the accuracy on the test set. With `tune.validation_fraction = 0.1`, a tenth of every client's examples
is kept from training on the seeds for tuning, and the criterion is the accuracy on those, averaged over clients.
`tune.set` has settings of the search alone.

A row may have its own `rounds`, `seeds` and `by`, or a `share` of the grid's rounds. In settings `{ of_rounds = 0.1 }`
is a tenth of the rounds of the run, also of a shorter run in a search: for evaluation intervals and learning-rate
schedules. `recipe` names a recipe (`recipe.py`) for the grid or a row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.archive import Runs
from thinwire.federation.settings import Settings
from thinwire.runs.config import resolve
from thinwire.runs.records import honest_bytes
from thinwire.runs.toml import Table, parse_overrides

OPTIONS = "option-accuracy"  # where a run has it, this is its accuracy: not the share of tokens
LAST = "mean of the last "  # evaluations: `tune.by = "mean of the last 5"`


class Line(NamedTuple):
    """A line of a table: a method with settings, over seeds."""

    row: int
    label: str
    settings: str
    chosen: Table  # the values of `over`
    runs: list[Settings]


class Grid:
    """A grid of runs.

    Args:
        content: the table.
        device: `cpu` or `cuda`, for all its runs.
        changes: settings for all its runs, as in `--set`.
    """

    def __init__(self, content: Table, device: str = "cpu", changes: Sequence[str] = ()) -> None:
        self.content, self.device, self.changes = content, device, list(changes)
        self.tune: Table = content.get("tune", {})
        self._known: dict[str, Line] = {}  # lines are asked for several times, and resolving one takes a while

    def lines(self, seeds: list[int] | None = None, share: float = 1.0) -> list[Line]:
        """One line for each row and combination of values."""
        out = []
        for number, row in enumerate(self.content["rows"]):
            over = row.get("over", {})
            for values in itertools.product(*over.values()):
                out.append(self.line(number, dict(zip(over, values, strict=True)), seeds, share))
        return out

    def line(self, number: int, chosen: Table, seeds: list[int] | None = None, share: float = 1.0) -> Line:
        """A row with these values, over a share of its rounds."""
        known = f"{number} {chosen} {seeds} {share}"
        if known not in self._known:
            self._known[known] = self._line(number, chosen, seeds, share)
        return self._known[known]

    def _line(self, number: int, chosen: Table, seeds: list[int] | None, share: float) -> Line:
        row = self.content["rows"][number]
        changes = parse_overrides(self.changes)
        wanted = changes.pop("rounds", row.get("rounds", self.content["rounds"]))
        rounds = max(1, round(share * row.get("share", 1.0) * wanted))
        given = _in_rounds({**row.get("set", {}), **chosen}, rounds)
        settings = {key: value for key, value in given.items() if key not in changes}
        stated = row.get("seeds", self.content.get("seeds", 1))
        own = list(range(stated)) if isinstance(stated, int) else stated
        common = {
            "rounds": rounds,
            "engine.device": self.device,
            **_in_rounds({**self.content.get("set", {}), **(self.tune.get("set", {}) if seeds else {})}, rounds),
            **(
                {"task.validation_fraction": fraction}
                if seeds is not None and (fraction := self.tune.get("validation_fraction"))
                else {}
            ),
        }
        wanted_seeds = own if seeds is None else seeds
        values = {**common, **settings, **changes, "seed": wanted_seeds[0]}
        first = resolve(row["method"], self._of(row, "on"), values, self._of(row, "recipe"))
        runs = [dataclasses.replace(first, seed=s) for s in wanted_seeds]
        words = ", ".join(f"{_name(key)} {_short(value)}" for key, value in settings.items() if key != "name")
        return Line(number, row.get("label", row["method"]), words, chosen, runs)

    def _of(self, row: Table, key: str) -> str | None:
        """A setting of the row, or else of the grid."""
        return row.get(key, self.content.get(key))

    def trials(self, out: Path | Runs | None = None) -> list[Line]:
        """The search: every combination on the seeds for tuning; empty if there is nothing to tune.

        With `out`, also those beyond an edge, as far as the runs there say that they are needed.
        """
        how = (self.tune["seeds"], self.tune.get("share", 1.0)) if self.tune else None
        lines = self.lines(*how) if how else []
        choices = Counter(line.row for line in lines)
        lines = [line for line in lines if choices[line.row] > 1]
        if how and out is not None:
            for number in dict.fromkeys(line.row for line in lines):
                mine = [line for line in lines if line.row == number]
                while len(mine) < choices[number] + self.tune.get("extend", 0) and (beyond := self._beyond(mine, out)):
                    mine.append(self.line(number, beyond, *how))
                    lines.append(mine[-1])
        return lines

    def _beyond(self, tried: list[Line], out: Path | Runs) -> Table | None:
        """The next value beyond the edge at which the best of a search is; None if it is not, or a trial is missing."""
        (key, *others) = tried[0].chosen
        if others or not all(summary(e, out) or training_failed(e, out) for line in tried for e in line.runs):
            return None
        found = sorted((line.chosen[key], score(line, out, self.by(line.row))) for line in tried)
        values, scores = zip(*found, strict=True)
        place = scores.index(max(scores))  # of equals the smallest: where all failed, downward
        if 0 < place < len(found) - 1:
            return None
        return {key: float(f"{values[place] ** 2 / values[1 if place == 0 else -2]:.3g}")}

    def final(self, out: Path | Runs) -> list[Line]:
        """The lines of the table: all combinations, or after a search the best of each row that does not fail."""
        if not self.tune:
            return self.lines()
        tried = [self.tried(number, out) for number in range(len(self.content["rows"]))]
        return [lines[0] if broken(lines[-1], out) else lines[-1] for lines in tried]

    def shown(self, out: Path | Runs) -> list[Line]:
        """The lines of a page: `final`, or if none of its runs is finished, the best combination that has some.

        So a row whose combination failed is shown as it is, until the next best has been run.
        """
        lines = []
        for line in self.final(out):
            finished = (one for one in self._ranked(line.row, out) if any(summary(e, out) for e in one.runs))
            started = not self.tune or any(summary(e, out) for e in line.runs)
            lines.append(line if started else next(finished, line))
        return lines

    def tried(self, number: int, out: Path | Runs) -> list[Line]:
        """The best combinations of a row's search on the seeds of the table, up to the first that does not fail."""
        lines: list[Line] = []
        for line in self._ranked(number, out):
            lines.append(line)
            if not broken(line, out):
                break
        return lines

    def _ranked(self, number: int, out: Path | Runs) -> Iterator[Line]:
        """The combinations of a row on the seeds of the table, the best of its search first."""
        row = self.content["rows"][number]
        mine = [line for line in self.trials(out) if line.row == number]
        mine.sort(key=lambda line: score(line, out, self.by(number)), reverse=True)
        only = {key: values[0] for key, values in row.get("over", {}).items()}
        return (self.line(number, chosen) for chosen in ([line.chosen for line in mine] or [only]))

    def by(self, number: int) -> str:
        """The criterion of a row's search."""
        usual = "best_client_accuracy" if self.tune.get("validation_fraction") else "best_accuracy"
        return str(self.content["rows"][number].get("by", self.tune.get("by", usual)))


def _in_rounds(value: Any, rounds: int) -> Any:
    """The value with every `of_rounds` replaced by a number of rounds.

    >>> _in_rounds({"kind": "multistep", "at": [{"of_rounds": 0.5}, {"of_rounds": 0.75}]}, 84)
    {'kind': 'multistep', 'at': [42, 63]}
    """
    if isinstance(value, dict):
        if value.keys() == {"of_rounds"}:
            return max(1, round(value["of_rounds"] * rounds))
        return {key: _in_rounds(inner, rounds) for key, inner in value.items()}
    return [_in_rounds(inner, rounds) for inner in value] if isinstance(value, list) else value


def _name(key: str) -> str:
    """The name of a setting in tables: the last part of its path, or a longer name where that is ambiguous."""
    return {"eval.every": "evaluated every", "method.server_opt.lr": "server lr"}.get(key) or key.rsplit(".", 1)[-1]


def _short(value: Any) -> Any:
    if isinstance(value, dict) and "tiers" in value:
        return f"of {len(value['tiers'])} tiers"
    return value.get("kind", value) if isinstance(value, dict) else value


# -- results of runs -------------------------------------------------------------------------------------------------


def summary(experiment: Settings, out: Path | Runs) -> dict[str, Any] | None:
    """The summary of a run; None if it did not finish, or diverged. Of questions with options, by `OPTIONS`."""
    found = Runs.at(out).summary(experiment)
    if found is None or (found.get("objective") or {}).get("name") != OPTIONS:
        return found
    objective = found["objective"]
    return {**found, "best_accuracy": objective["best"], "final_accuracy": objective["final"]}


def training_failed(experiment: Settings, out: Path | Runs) -> bool:
    """Whether a run is known to fail: it diverged, collapsed, or ended at chance (`collapse.py`)."""
    return Runs.at(out).failed(experiment)


def status(experiment: Settings, out: Path | Runs) -> str | None:
    """The status of a finished run; None if it did not finish."""
    if found := summary(experiment, out):
        return found.get("status")
    return "diverged" if training_failed(experiment, out) else None


def broken(line: Line, out: Path | Runs) -> list[int]:
    """The seeds of a line on which training fails."""
    return [e.seed for e in line.runs if training_failed(e, out)]


def metrics(experiment: Settings, out: Path | Runs) -> list[dict[str, Any]]:
    """The records of a run; of an archived one, those of evaluated rounds."""
    records = Runs.at(out).recorded(experiment).records
    return [
        {**one, "accuracy": one["metrics"][OPTIONS]} if OPTIONS in one.get("metrics", ()) else one for one in records
    ]


def score(line: Line, out: Path | Runs, by: str) -> float:
    """The mean criterion over seeds; 0 for a run that failed or did not finish. Bytes are negated: fewer are better."""
    found = [None if training_failed(e, out) else summary(e, out) for e in line.runs]
    if by.startswith("bytes to "):
        reached = [
            to_target(e, out, float(by.split()[-1])) if s else None for e, s in zip(line.runs, found, strict=True)
        ]
        return -statistics.fmean(r[1] if r else math.inf for r in reached)
    if by.startswith(LAST):
        both = zip(line.runs, found, strict=True)
        return statistics.fmean(last_accuracy(e, out, int(by.removeprefix(LAST))) if s else 0.0 for e, s in both)
    return statistics.fmean((s[by] or 0.0) if s else 0.0 for s in found)


def last_accuracy(experiment: Settings, out: Path | Runs, count: int) -> float:
    """The mean accuracy of the last evaluations of a run."""
    known = [record["accuracy"] for record in metrics(experiment, out) if record["accuracy"] is not None]
    return statistics.fmean(known[-count:])


def to_target(
    experiment: Settings, out: Path | Runs, target: float, metric: str = "accuracy"
) -> tuple[int, int, int] | None:
    """Rounds, all bytes, and bytes without catch-up until an accuracy first reached a target; None if never.

    Args:
        experiment: the experiment of the run.
        out: folder of the run directories, or runs with an archive.
        target: the accuracy to reach.
        metric: the accuracy in the records: `accuracy`, or `client_accuracy` where clients have private parts.
    """
    honest = ideal = 0
    for record in metrics(experiment, out):
        ideal += record["bytes_up"] + record["bytes_down"]
        honest += honest_bytes(record)
        if (value := record.get(metric)) is not None and value >= target:
            return record["round"], honest, ideal
    return None
