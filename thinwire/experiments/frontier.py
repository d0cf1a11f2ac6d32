"""The frontier of a task: a set of methods and densities, each with the same search, as one grid.

    rates of a row = its center times 2^-1, 2^0, 2^1, ...        the same number for every row

The set is a preset (`presets/frontiers`): rows with a `label`, a `method`, settings (`set`), and where the size of a
subspace matters `k`, a multiple of the k that the space derives from the number of weights. The center of the rates is
that of the row for the task (`center`), else that of the set for rates of clients, else the rate of the method on the
task. The rates are tried on another seed than those of the result, over a share of the rounds, and judged by examples
that clients hold out; the test set chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.experiment import Experiment, to_table
from thinwire.experiments.grid import Grid, Line
from thinwire.experiments.overrides import parse_overrides
from thinwire.experiments.presets import preset
from thinwire.experiments.resolve import resolve
from thinwire.experiments.toml import Table
from thinwire.search.candidates import rate_key, setting
from thinwire.search.tune import SEARCH_SEED, VALIDATION_FRACTION
from thinwire.spaces import MAPO

DEFAULT_SET = "default"
CRITERION = "final_client_accuracy"  # of the search: clients' accuracy on held-out examples after the last round
REFERENCE = "fedavg"  # the row whose bytes are the unit
CLIENT_RATE = "method.client_opt.lr"
EVALUATIONS = 0.02  # rounds between two evaluations, as a share of the run


class Work(NamedTuple):
    """How much is run for each row of a frontier.

    Args:
        seeds: number of seeds, from 0.
        rates: learning rates that each row tries; 1 for its own, without a search.
        share: rounds of the search, as a share of those of the run.
        rounds: rounds of the runs; None for those of the task.
    """

    seeds: int = 3
    rates: int = 3
    share: float = 0.5
    rounds: int | None = None

    def check(self) -> None:
        """Raise a ConfigError for numbers that make no sense."""
        if self.seeds < 1 or self.rates < 1 or (self.rounds is not None and self.rounds < 1):
            raise ConfigError("seeds, rates and rounds must be 1 or more; write for example --seeds 3 --rates 3")
        if self.seeds > SEARCH_SEED:
            raise ConfigError(f"seeds must be at most {SEARCH_SEED}: the search uses seed {SEARCH_SEED}")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, a part of the rounds, not {self.share}")


class Where(NamedTuple):
    """On what a frontier is measured: the task, the recipe, the device, settings for all rows, the data folder."""

    on: str | None = None
    recipe: str | None = None
    device: str = "cpu"
    changes: tuple[str, ...] = ()
    data_dir: Path | None = None

    def experiment(self, method: str = REFERENCE, settings: Table | None = None) -> Experiment:
        """A method on the task."""
        return resolve(method, self.on, {**(settings or {}), **parse_overrides(list(self.changes))}, self.recipe)


class FrontierGrid(Grid):
    """The grid of a frontier; a line is resolved once, since it is asked for often."""

    def __init__(self, content: Table, device: str, changes: Sequence[str]) -> None:
        super().__init__(content, device, changes)
        self._lines: dict[tuple[object, ...], Line] = {}

    def line(self, number: int, chosen: Table, seeds: list[int] | None = None, share: float = 1.0) -> Line:
        """A row with these values, over a share of its rounds."""
        key = (number, tuple(chosen.items()), None if seeds is None else tuple(seeds), share)
        if key not in self._lines:
            self._lines[key] = super().line(number, chosen, seeds, share)
        return self._lines[key]


def rows_of(names: Sequence[str] = ()) -> list[Table]:
    """Rows of the documented set by label; a name that is none is a method. Without names, the whole set.

    >>> [row["label"] for row in rows_of(["fedavg", "thin, k/4", "mapo+int8"])]
    ['fedavg', 'thin, k/4', 'mapo+int8']
    """
    known: list[Table] = preset("frontiers", DEFAULT_SET).table["rows"]
    by_label = {row["label"]: row for row in known}
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"{twice[0]} is given twice; write it once")
    return [by_label.get(name, {"label": name, "method": name}) for name in names] or known


def frontier_grid(rows: Sequence[Table], where: Where, work: Work) -> FrontierGrid:
    """The grid of a frontier; reads the dataset once, for the number of weights.

    Args:
        rows: methods and densities; of the whole set those whose k would be above the number of weights are left out.
        where: the task, and settings for all rows.
        work: seeds, and the search of each row.
    """
    work.check()
    rounds = where.experiment().rounds if work.rounds is None else work.rounds
    weights = _weights(where)
    fitting = _fitting(rows, weights)
    common: Table = {
        "eval.every": {"of_rounds": EVALUATIONS},
        "checkpoint.every": {"of_rounds": 1.0},  # of a method with client states it is large; runs are short
    }
    content: Table = {
        "on": where.on,
        "recipe": where.recipe,
        "rounds": rounds,
        "seeds": list(range(work.seeds)),
        "set": common,
        "rows": [_searched(row, where, work.rates, weights) for row in fitting],
        "tune": {
            "seeds": [SEARCH_SEED],
            "share": work.share,
            "validation_fraction": where.experiment().task.validation_fraction or VALIDATION_FRACTION,
            "by": CRITERION,
            "set": {"eval.every": {"of_rounds": 1.0}},  # evaluating all clients takes longer than a round
        },
    }
    return FrontierGrid(content, where.device, where.changes)


def factors(count: int) -> tuple[float, ...]:
    """Factors of a learning rate, 2 apart and around 1.

    >>> factors(1), factors(3), factors(4)
    ((1.0,), (0.5, 1.0, 2.0), (0.5, 1.0, 2.0, 4.0))
    """
    low = (count - 1) // 2
    return tuple(2.0**i for i in range(-low, count - low))


def _searched(row: Table, where: Where, rates: int, weights: int) -> Table:
    """A row of the grid: the settings of the row, with k as a number, and the rates to try."""
    settings = dict(row.get("set", {}))
    experiment = where.experiment(row["method"], settings)
    if "k" in row:
        settings["method.space.k"] = max(1, round(row["k"] * MAPO(k=0).sizes(weights).k))
    key = rate_key(experiment)
    own = _center(row, experiment, key)
    over = {key: [float(f"{own * factor:.6g}") for factor in factors(rates)]}
    return {"label": row["label"], "method": row["method"], "set": settings, "over": over}


def _fitting(rows: Sequence[Table], weights: int) -> list[Table]:
    """The rows whose k is at most the number of weights; raises a ConfigError for another that was named."""
    usual = MAPO(k=0).sizes(weights).k
    left_out = [row["label"] for row in rows if row.get("k", 0) * usual > weights]
    if left_out and list(rows) != rows_of():
        raise ConfigError(f"{left_out[0]}: k would be above the {weights:,} weights of the model; name a smaller one")
    return [row for row in rows if row["label"] not in left_out]


def _center(row: Table, experiment: Experiment, key: str) -> float:
    """The middle of a row's rates: placed for this task in the row, or in the set for rates of clients, or its own."""
    task = experiment.task.label
    of_set = preset("frontiers", DEFAULT_SET).table.get("center", {}) if key == CLIENT_RATE else {}
    return float(row.get("center", {}).get(task) or of_set.get(task) or setting(to_table(experiment), key))


def _weights(where: Where) -> int:
    """The number of weights of the model; raises a ConfigError for a task without accuracy or test set."""
    experiment = where.experiment()
    job = build_job(experiment, where.data_dir)
    if job.ranked_by.name != "accuracy" or job.task.test is None:
        raise ConfigError(
            f"a frontier compares accuracies on a test set, which {experiment.task.label} does not have; use "
            "`thinwire compare` for it"
        )
    return int(replace(experiment.engine, device="cpu", workers=0).prepare(job).contract.weights.size)
