"""Runs of a sweep: every combination of some values, over the same seeds, in the directories of `thinwire run`.

All settings have the same seeds, and so the same clients, initial weights and batches: differences between settings are
paired by seed. `reports/sweep.py` makes the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.experiments.build import build_job
from thinwire.experiments.compare import Watch, run_all
from thinwire.experiments.execute import default_folder
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.knobs import changes, knobs_of, points
from thinwire.experiments.records import Recorded, read_run, read_totals
from thinwire.experiments.request import Make
from thinwire.experiments.toml import Table


class Swept(NamedTuple):
    """One combination of values and its runs, one for each seed.

    Args:
        values: by name, as in the table.
        settings: by dotted path, as overrides.
        runs: in the order of the seeds.
    """

    values: dict[str, Any]
    settings: Table
    runs: list[Recorded]


def run_sweep(
    make: Make,
    over: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    out: Path,
    watch: Watch,
    *,
    data_dir: Path | None = None,
    again: bool = False,
) -> list[Swept]:
    """Run all combinations; impossible values are refused before the first run.

    Args:
        make: the experiment with further settings.
        over: values by short key or dotted path.
        seeds: of every combination.
        out: the folder of the run directories; finished runs are used again, killed ones go on.
        watch: shows the progress of a run.
        data_dir: the folder of datasets.
        again: run even if a directory holds the finished run.
    """
    own = make({})
    knobs = knobs_of(own, over)
    settings = [changes(own, knobs, point) for point in points(knobs)]
    experiments = [[make({**one, "seed": seed}) for seed in seeds] for one in settings]
    for same in experiments:
        if read_totals(default_folder(same[0], out)) is None:
            build_job(same[0], data_dir)
    # seed by seed: an interrupted sweep has all settings on its first seeds
    ordered: list[Experiment] = [same[i] for i in range(len(seeds)) for same in experiments]
    run_all(ordered, out, watch, data_dir=data_dir, again=again)
    names = [knob.label for knob in knobs]
    return [
        Swept(dict(zip(names, point, strict=True)), one, [read_run(default_folder(run, out)) for run in same])
        for point, one, same in zip(points(knobs), settings, experiments, strict=True)
    ]
