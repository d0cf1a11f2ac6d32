"""Run one experiment with progress on the terminal, print its totals, and choose the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.text import visible

if TYPE_CHECKING:
    from thinwire.experiments.config import Experiment
    from thinwire.experiments.run_directory import Summary
    from thinwire.runtime.job import RoundRecord

TRAINING_FAILED = 3  # exit code of training that diverged, collapsed or ended at chance


def execute_and_show(
    experiment: Experiment,
    path: Path,
    *,
    data_dir: Path | None = None,
    log: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
    runner: Callable[..., Summary] | None = None,
    **options: Any,
) -> None:
    """Run an experiment and print its summary.

    Args:
        experiment: the experiment.
        path: the run directory.
        data_dir: folder that holds the datasets.
        log: name of a tracker.
        as_json: print the summary as JSON.
        quiet: do not show progress.
        runner: function that runs it; the simulation by default.
        **options: passed to the runner.
    """
    from thinwire.cli.tables import print_json, show_facts
    from thinwire.cli.terminal import err, progress
    from thinwire.experiments.execute import execute
    from thinwire.experiments.trackers import tracker

    run = runner or execute
    try:
        with (
            progress(experiment.name, experiment.rounds, quiet, experiment.accounting) as show_round,
            tracker(log, path) as log_round,
        ):

            def on_round(record: RoundRecord) -> None:
                show_round(record)
                log_round(record)

            summary = run(experiment, path, data_dir=data_dir, on_round=on_round, **options)
    except KeyboardInterrupt:
        err.print(visible(f"stopped; `thinwire resume {path}` continues it"), soft_wrap=True)
        sys.exit(130)
    print_json(summary) if as_json else show_facts(summary, str(path))
    exit_if_failed({str(path): summary})


def exit_if_failed(summaries: Mapping[str, Summary]) -> None:
    """Print one line for each run that diverged, collapsed or ended at chance; exit with 3 if there is one."""
    from thinwire.experiments.collapse import is_broken

    for path, summary in summaries.items():
        if dead := summary.get("dead_adapters"):
            message = f"{len(dead)} adapters are fully masked and can no longer change, for example {dead[0]}"
            print(visible(f"thinwire: {path}: {message}"), file=sys.stderr)
    failed = {path: summary for path, summary in summaries.items() if is_broken(summary)}
    for path, summary in failed.items():
        print(visible(f"thinwire: {path} {summary['status']}: {summary['status_why']}"), file=sys.stderr)
    if failed:
        sys.exit(TRAINING_FAILED)
