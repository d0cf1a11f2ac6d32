"""Search over two settings that together decide how many bytes a method sends: FLASC-S, for any two ordered settings.

    stage 1   for d in shares:  stop when (r2, d) beats (r1, min(top, d r2 / r1))
    stage 2   (r, d) for all other sizes r
    result    the best of all runs

For FLASC r is the rank and d the density. The two runs of a comparison send about as many values of the adapter; their
actual bytes, a dense head included, are in `Found.compared`. Paper: FLASC, 2024 (as in its text; the printed algorithm
uses the index of the density as the index of a rank).

Runs are compared by accuracy on validation examples of the clients (`task.validation_fraction`); the accuracy on the
test set is only reported. Without validation examples, runs are compared by the test set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import ConfigError, Diverged
from thinwire.experiments.build import build_job
from thinwire.experiments.collapse import is_broken
from thinwire.experiments.execute import default_folder, execute
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.load import from_table
from thinwire.experiments.loop import Stop, rounds
from thinwire.experiments.overrides import put
from thinwire.experiments.run_directory import RunFolder
from thinwire.experiments.toml import Table
from thinwire.runtime.job import RoundRecord
from thinwire.training.batches import Local

Number = int | float
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})(e[+-]?\d{1,2})?(/\d{1,18})?", re.IGNORECASE)


class Knob(NamedTuple):
    """A setting, or several that get the same value, and the values to try, ascending."""

    paths: tuple[str, ...]
    values: tuple[Number, ...]

    @property
    def label(self) -> str:
        """Its name in tables: the last part of its path."""
        return self.paths[0].rpartition(".")[2]

    @classmethod
    def parse(cls, text: str) -> Knob:
        """A knob from the text of a command line.

        >>> Knob.parse("method.up.density+method.down.density=1/4,1")
        Knob(paths=('method.up.density', 'method.down.density'), values=(0.25, 1))
        """
        paths, sign, values = text.partition("=")
        if not sign or not all(paths.split("+")):
            raise ConfigError(f"--knob takes key=value,value,..., such as method.space.rank=1,4,16, not {text!r}")
        return cls(tuple(paths.split("+")), numbers(values, paths))


class Tried(NamedTuple):
    """One run of the search."""

    size: Number
    share: Number
    accuracy: float  # the criterion of the search; 0 for a run that failed (`collapse.py`)
    bytes: int
    test_accuracy: float | None = None  # only reported
    clipped: bool = False  # d r2 / r1 was no possible value


class Found(NamedTuple):
    """The best of all runs, and all runs."""

    size: Number
    share: Number
    tried: tuple[Tried, ...]
    lost: int = 0  # bytes of a run that the budget ended
    grid: int | None = None  # estimated bytes of a grid of all sizes and shares
    compared: tuple[tuple[Tried, Tried], ...] = ()  # the pairs of stage 1, the smaller size first
    chosen_by: str = "accuracy"

    @property
    def bytes(self) -> int:
        """The bytes of all runs of the search."""
        return self.lost + sum(one.bytes for one in self.tried)

    @property
    def stopped(self) -> bool:
        """Whether the budget ended the search."""
        return self.lost > 0


class Spent(Exception):
    """The byte budget is used up; `lost` is the bytes of the run that was ended."""

    def __init__(self, lost: int) -> None:
        super().__init__(lost)
        self.lost = lost


Measured = tuple[float, int] | tuple[float, int, float | None]  # criterion, bytes, accuracy on the test set
Measure = Callable[[Number, Number], Measured]  # of a size and a share


def numbers(text: str, what: str) -> tuple[Number, ...]:
    """Numbers separated by commas; fractions are allowed.

    >>> numbers("1,4", "ranks"), numbers("1/16,0.25,1", "densities")
    ((1, 4), (0.0625, 0.25, 1))
    """
    try:
        words = [one.strip() for one in text.split(",")]
        if not all(_NUMBER.fullmatch(word) for word in words):
            raise ValueError(text)
        exact = [Fraction(word) for word in words]
    except (ValueError, ZeroDivisionError) as error:
        given = visible(text, 80)
        raise ConfigError(
            f"{what} must be numbers separated by commas, such as 1,4 or 1/16,1/4, not {given!r}"
        ) from error
    return tuple(int(one) if one.denominator == 1 else float(one) for one in exact)


def search(measure: Measure, sizes: Sequence[Number], shares: Sequence[Number], top: Number = 1.0) -> Found:
    """The search over any measure; no pair of size and share is measured twice.

    Args:
        measure: returns the criterion and the bytes of a size and a share, and the accuracy on the test set if that
            is another; raises `Spent` when the budget is used up.
        sizes: two or more, ascending, such as ranks.
        shares: ascending, such as densities; `top` is added at the end where it is missing.
        top: the largest possible share.

    >>> found = search(lambda r, d: (min(r * d, 2.0) + r / 100, int(100 * r * d)), (1, 2, 4), (0.25, 0.5, 1.0))
    >>> found.size, found.share, found.bytes, len(found.tried)
    (4, 0.25, 200, 3)
    """
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
        raise ConfigError(f"sizes must be two or more, ascending, not {list(sizes)}; write for example 1, 4, 16")
    if not shares or list(shares) != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] <= top:
        raise ConfigError(f"shares must ascend from above 0 to at most {top:g}, not {list(shares)}")
    tried: dict[tuple[Number, Number], Tried] = {}
    pairs: list[tuple[tuple[Number, Number], tuple[Number, Number]]] = []
    whole, lost = isinstance(top, int), 0

    def run(size: Number, share: Number, clipped: bool = False) -> float:
        if (size, share) not in tried:
            tried[size, share] = Tried(size, share, *measure(size, share))
        if clipped:
            tried[size, share] = tried[size, share]._replace(clipped=True)
        return tried[size, share].accuracy

    small, large = sizes[:2]
    share = top
    try:
        for d in (*shares, *(() if shares[-1] == top else (top,))):
            equal = d * large / small
            nearest = min(top, math.floor(equal) if whole else equal)
            low, high = run(small, nearest, nearest != equal), run(large, d)
            pairs.append(((small, nearest), (large, d)))
            if high > low:
                share = d
                break
        for size in sizes[1:]:
            run(size, share)
    except Spent as error:
        if not tried:
            raise ConfigError(
                "the budget was spent before one run finished; raise it, or train fewer rounds"
            ) from error
        lost = error.lost
    best = max(tried.values(), key=lambda one: (one.accuracy, -one.bytes))
    compared = tuple((tried[one], tried[other]) for one, other in pairs)
    return Found(best.size, best.share, tuple(tried.values()), lost, compared=compared)


def flasc_knobs(ranks: Sequence[Number], densities: Sequence[Number]) -> tuple[Knob, Knob]:
    """The knobs of FLASC-S: the rank, and the density of uploads and downloads, whose last value is always 1."""
    both = ("method.up.density", "method.down.density")
    full = () if densities and densities[-1] >= 1 else (1.0,)
    return Knob(("method.space.rank",), tuple(ranks)), Knob(both, (*densities, *full))


def tune(
    experiment: Experiment,
    size: Knob,
    share: Knob,
    *,
    budget: int | None = None,
    out: Path | None = None,
    data_dir: Path | None = None,
    validation_fraction: float = 0.1,
) -> Found:
    """Run the search on an experiment such as `resolve("flasc", "digits")`; alpha / rank of an adapter stays constant.

    Args:
        experiment: an experiment with both settings.
        size: the first setting, such as the rank.
        share: the second, such as the density; its last value is the largest possible one.
        budget: the search ends when its runs have sent so many bytes; None for no limit.
        out: a folder for the directories of all runs. Finished runs in it are used again, so that a stopped search
            continues.
        data_dir: the folder of datasets.
        validation_fraction: fraction of each client's examples that is kept from training and used as the criterion,
            unless the experiment has a `task.validation_fraction`. With 0 the criterion is the test set.
    """
    if validation_fraction and not experiment.task.validation_fraction:
        experiment = replace(experiment, task=replace(experiment.task, validation_fraction=validation_fraction))
    by = "final_client_accuracy" if experiment.task.validation_fraction else "final_accuracy"
    with nullcontext(out) if out is not None else TemporaryDirectory() as folder:
        runs = Runs(experiment, size, share, by, Path(folder), data_dir, budget)
        for knob in (size, share):
            for value in knob.values:
                set_knob(experiment, knob, value)  # raises for impossible values before the first run
        top = _as(share, to_table(experiment), share.values[-1])
        found = search(runs, size.values, share.values, top)
    known = {(one.size, one.share): one.bytes for one in found.tried}
    pairs = [(one, two) for one in size.values for two in share.values]
    untried = [set_knob(set_knob(experiment, size, one), share, two) for one, two in pairs if (one, two) not in known]
    cost = sum(known.get(pair, 0) for pair in pairs) + sum(_about(other, data_dir) for other in untried)
    fraction = experiment.task.validation_fraction
    by_clients = f"accuracy on the {100 * fraction:g} % of each client's examples that are held out"
    return found._replace(grid=cost, chosen_by=by_clients if fraction else "accuracy on the test set")


class Runs:
    """The measure of a search: the criterion and the bytes of a run.

    Args:
        experiment: the experiment whose settings are changed.
        size, share: the two settings.
        by: the key of a summary that is the criterion.
        out: the folder of the run directories.
        data_dir: the folder of datasets.
        budget: bytes that the runs may send; None for no limit.
    """

    def __init__(
        self,
        experiment: Experiment,
        size: Knob,
        share: Knob,
        by: str,
        out: Path,
        data_dir: Path | None,
        budget: int | None,
    ) -> None:
        self.experiment, self.knobs, self.by = experiment, (size, share), by
        self.out, self.data_dir, self.budget, self.spent = out, data_dir, budget, 0

    def __call__(self, size: Number, share: Number) -> Measured:
        """Run one setting; a run that diverges, collapses or stays at chance has an accuracy of 0."""
        chosen, sent = self.experiment, 0
        for knob, value in zip(self.knobs, (size, share), strict=True):
            chosen = set_knob(chosen, knob, value)

        def watch(record: RoundRecord) -> None:
            nonlocal sent
            sent += record.bytes_up + record.bytes_down + record.bytes_catchup
            self._within(sent)

        path = default_folder(chosen, self.out)
        try:
            summary = execute(chosen, path, data_dir=self.data_dir, resume=True, on_round=watch)
        except Diverged:
            summary = RunFolder(path, chosen).summary() or {}
        sent = summary["bytes_total_honest"]
        self._within(sent)
        accuracy = 0.0 if is_broken(summary) else summary[self.by]
        if accuracy is None:
            raise ConfigError("the search compares accuracies, but this task has no test examples")
        self.spent += sent
        return accuracy, sent, summary["final_accuracy"]

    def _within(self, sent: int) -> None:
        if self.budget is not None and self.spent + sent > self.budget:
            raise Spent(sent)


def _about(experiment: Experiment, data_dir: Path | None) -> int:
    """Estimated bytes of a run: those of its second round, after minimal training, times the number of rounds."""
    quick = replace(experiment, rounds=max(2, experiment.rounds), local=Local(steps=1, batch=1))
    if stage := quick.method.next_stage:
        quick = replace(quick, method=replace(quick.method, next_stage=replace(stage, at=1)))
    simulation = quick.engine.prepare(build_job(quick, data_dir))
    *_, (_, last) = rounds(simulation, simulation.start(), Stop(2))
    return (last.bytes_up + last.bytes_down + last.bytes_catchup) * experiment.rounds


def set_knob(experiment: Experiment, knob: Knob, value: Number) -> Experiment:
    """The experiment with a knob set to a value."""
    table = to_table(experiment)
    for path in knob.paths:
        before = _get(table, path)
        now = _as(knob, table, value)
        parent = path.rpartition(".")[0]
        if path.endswith(".rank") and isinstance(_get(table, parent).get("alpha"), float):
            put(table, f"{parent}.alpha", _get(table, f"{parent}.alpha") * now / before)
        put(table, path, now)
    return from_table(table)


def _as(knob: Knob, table: Table, value: Number) -> Number:
    """The value converted to the type of the setting."""
    if isinstance(_get(table, knob.paths[0]), int):
        if value != int(value):
            raise ConfigError(f"{knob.paths[0]} is a whole number, so {value} cannot be tried; write whole numbers")
        return int(value)
    return float(value)


def _get(table: Table, path: str) -> Any:
    here: Any = table
    for part in path.split("."):
        if not isinstance(here, dict) or part not in here:
            raise ConfigError(
                f"this experiment has no setting {path!r} to search over; `thinwire show` prints them all"
            )
        here = here[part]
    return here
