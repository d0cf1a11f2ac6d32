"""Run an experiment into its directory: from round 1, or from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from thinwire.errors import CheckpointError, Diverged
from thinwire.experiments.collapse import is_broken
from thinwire.experiments.execution import check_blocks as check_blocks, run_plan
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.plan import Plan
from thinwire.experiments.records import ROLLED_BACK, byte_totals
from thinwire.experiments.run_directory import RunFolder, Summary
from thinwire.experiments.task_files import folder_name
from thinwire.experiments.task_record import refuse_other_task
from thinwire.experiments.watchers import OnRound as OnRound, Watchers
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.runner import Runner


def default_folder(experiment: Experiment, parent: Path = Path("runs")) -> Path:
    """The default run directory: named after method, task, seed and a digest of the whole configuration."""
    task = folder_name(experiment.task.label)
    return parent / f"{experiment.name}-{task}-s{experiment.seed}-{experiment.digest()[:6]}"


def execute(
    experiment: Experiment,
    path: Path,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    again: bool = False,
    on_round: OnRound | None = None,
    prepare: Callable[[], Runner] | None = None,
    on_message: OnMessage | None = None,
    on_continue: Callable[[int], None] | None = None,
) -> Summary:
    """Run an experiment and return its totals. Nothing is written before the experiment has been checked.

    Args:
        experiment: the experiment.
        path: the run directory.
        data_dir: the folder of datasets.
        resume: continue from the newest checkpoint, if there is one; a run that diverged is not run again.
        again: run even if the directory holds this finished run.
        on_round: is called after every round, first with the records of earlier rounds; after a retry, again with the
            round that the run went back to and those after it.
        prepare: makes the simulation, if not the experiment's engine.
        on_message: is called with every message, as it is sent.
        on_continue: is called with the number of rounds that are done, before the others are trained.
    """
    plan = Plan.of(experiment, data_dir, prepare)
    if not again:
        refuse_other_task(path, plan.table.get("fingerprint", ""))
    folder = RunFolder(path, plan.table)
    if folder.exists and not again:
        if done := folder.summary():
            again = must_repeat(plan, folder, done, "write --on-divergence retry, or --again to run it without")
            if not again:
                refuse_diverged(done)
                sizes = (done["bytes_up"], done["bytes_down"], done["bytes_catchup"])
                return {**done, **byte_totals(*sizes, experiment.accounting, done.get("bytes_abandoned", 0))}
        elif not resume:
            raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` continues it")
    watchers = Watchers(on_round, on_message, on_continue=on_continue)
    return run_plan(plan, folder, watchers, resume=resume, again=again).summary


def must_repeat(plan: Plan, folder: RunFolder, done: Summary, remedy: str) -> bool:
    """Whether a finished run must be run again, because it failed without going back and now may.

    Args:
        plan: the run that is wanted.
        folder: its directory, whose files are verified.
        done: the totals of the finished run.
        remedy: what to write if the run went back and now may not.
    """
    folder.verify()
    then = RunFolder.open(folder.path).table.get("checkpoint", {}).get("on_divergence", "stop")
    halved = [one for one in done.get("retries", ()) if one.get("status") != ROLLED_BACK]
    if halved and not plan.retries:
        raise CheckpointError(f"{folder.path} holds a run that went back {len(halved)} times; {remedy}")
    return plan.retries and then == "stop" and is_broken(done)


def refuse_diverged(summary: Summary, again: str = "--again") -> None:
    """Raise the error of a run that diverged before: it would diverge again."""
    if summary.get("status") == "diverged":
        raise Diverged(f"{summary['status_why']} (known from an earlier run; {again} runs it once more)")
