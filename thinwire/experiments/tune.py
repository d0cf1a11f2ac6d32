"""Search over two settings that together decide how many bytes a method sends: FLASC-S, for any two ordered settings.

    stage 1   for d in shares:  stop when (r2, d) beats (r1, min(top, d r2 / r1))
    stage 2   (r, d) for all other sizes r
    result    the best of all runs

For FLASC r is the rank and d the density. The two runs of a comparison send about as many values of the adapter; their
actual bytes, a dense head included, are in `Found.compared`. Paper: FLASC, 2024 (as in its text; the printed algorithm
uses the index of the density as the index of a rank).

Runs are compared by accuracy on validation examples of the clients (`task.validation_fraction`); the accuracy on the
test set is only reported. Without validation examples, runs are compared by the test set. `tune_rate.py` searches a
learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.collapse import is_broken
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.knobs import Knob as Knob
from thinwire.experiments.knobs import Number, set_knob, setting
from thinwire.experiments.knobs import numbers as numbers
from thinwire.experiments.loop import Stop, rounds
from thinwire.experiments.trials import Spent as Spent
from thinwire.experiments.trials import Trials
from thinwire.training.batches import Local


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


Measured = tuple[float, int] | tuple[float, int, float | None]  # criterion, bytes, accuracy on the test set
Measure = Callable[[Number, Number], Measured]  # of a size and a share


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
        trials = Trials(Path(folder), data_dir, budget)

        def measure(one: Number, two: Number) -> Measured:
            """The criterion and the bytes of a run; one that diverges, collapses or stays at chance has accuracy 0."""
            ran = trials.run(set_knob(set_knob(experiment, size, one), share, two))
            accuracy = 0.0 if is_broken(ran.summary) else ran.summary[by]
            if accuracy is None:
                raise ConfigError("the search compares accuracies, but this task has no test examples")
            return accuracy, ran.bytes, ran.summary["final_accuracy"]

        for knob in (size, share):
            for value in knob.values:
                set_knob(experiment, knob, value)  # raises for impossible values before the first run
        top = setting(to_table(set_knob(experiment, share, share.values[-1])), share.paths[0])
        found = search(measure, size.values, share.values, top)
    known = {(one.size, one.share): one.bytes for one in found.tried}
    pairs = [(one, two) for one in size.values for two in share.values]
    untried = [set_knob(set_knob(experiment, size, one), share, two) for one, two in pairs if (one, two) not in known]
    cost = sum(known.get(pair, 0) for pair in pairs) + sum(_about(other, data_dir) for other in untried)
    fraction = experiment.task.validation_fraction
    by_clients = f"accuracy on the {100 * fraction:g} % of each client's examples that are held out"
    return found._replace(grid=cost, chosen_by=by_clients if fraction else "accuracy on the test set")


def _about(experiment: Experiment, data_dir: Path | None) -> int:
    """Estimated bytes of a run: those of its second round, after minimal training, times the number of rounds."""
    quick = replace(experiment, rounds=max(2, experiment.rounds), local=Local(steps=1, batch=1))
    if stage := quick.method.next_stage:
        quick = replace(quick, method=replace(quick.method, next_stage=replace(stage, at=1)))
    simulation = quick.engine.prepare(build_job(quick, data_dir))
    *_, (_, last) = rounds(simulation, simulation.start(), Stop(2))
    return (last.bytes_up + last.bytes_down + last.bytes_catchup) * experiment.rounds
