"""Settings to a run: its task, what runs its rounds, and its directory; a finished run is used again.

The name of a task of the user does not define its data: the file or the data may change. A run is continued, and a
finished run is used again, only if model and data have the fingerprint (`data/fingerprint.py`) that they had at its
start, which is in its `config.toml`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, NamedTuple

from thinwire.core import plugins
from thinwire.core.reference import OWN
from thinwire.data.fingerprint import fingerprint
from thinwire.data.task import Task
from thinwire.errors import CheckpointError, ConfigError, Diverged, InUse
from thinwire.federation.federation import Federation
from thinwire.federation.job import Job
from thinwire.federation.settings import Cohort, Settings
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.config import digest, to_table
from thinwire.runs.files import locked
from thinwire.runs.loop import Loop
from thinwire.runs.probe import with_rate
from thinwire.runs.records import read_clients, rounds_in
from thinwire.runs.run_directory import RunFolder, Summary, other_task
from thinwire.runs.task_files import folder_name
from thinwire.runs.toml import Table


def default_folder(settings: Settings, parent: Path = Path("runs")) -> Path:
    """The default run directory: named after method, task, seed and a digest of all settings."""
    task = folder_name(settings.task.label)
    return parent / f"{settings.name}-{task}-s{settings.seed}-{digest(settings)[:6]}"


def execute(
    settings: Settings,
    path: Path,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    prepare: Callable[[], Federation] | None = None,
    **watch: Any,
) -> Summary:
    """Run settings into a directory and return the totals; a finished run is used again.

    Args:
        settings: the settings.
        path: the run directory.
        data_dir: the folder of datasets.
        resume: continue from the newest checkpoint, if there is one; a run that diverged is not run again.
        overwrite: delete the run in the directory and start again.
        prepare: makes what runs the rounds, if not the engine of the settings.
        **watch: functions of the caller, see `Loop.train`.
    """
    plan = RunPlan.of(settings, path, data_dir, prepare)
    if not overwrite and (done := plan.finished(resume)):
        return done
    return plan.train(resume, overwrite, **watch).summary


class RunPlan(NamedTuple):
    """A run before its rounds: its settings with fingerprint, its directory if it has one, and what runs its rounds."""

    settings: Settings
    table: Table
    folder: RunFolder | None
    prepare: Callable[[], Federation]

    @classmethod
    def of(
        cls,
        settings: Settings,
        path: Path | None,
        data_dir: Path | None = None,
        prepare: Callable[[], Federation] | None = None,
        rounds: Sequence[int] = (),
    ) -> RunPlan:
        """Check settings, and read the data of a task of the user; nothing is written.

        Args:
            settings: the settings.
            path: the run directory; None for a run in memory.
            data_dir: the folder of datasets.
            prepare: makes what runs the rounds, if not the engine of the settings.
            rounds: the numbers of rounds of a run that is extended: at its start, and after each extension.
        """
        plugins.load(settings.imports)  # in a worker process they are not imported yet
        job: Job | None = None
        if settings.task.is_own and prepare is None:  # a finished run is used again for the same data only
            settings, job = settled(settings, data_dir, stored=path is not None)
        if settings.auto_lr and prepare is None:
            settings, job = with_rate(settings, job or build_job(settings, data_dir))
        if rounds:
            settings = replace(settings, rounds=rounds[-1], extended=tuple(rounds[:-1]))
            job = job and replace(job, rounds=rounds[-1])
        table = to_table(settings)
        if settings.task.kind.startswith(OWN):  # of a script, which alone has the object
            table["task"]["kind"], table["script"] = settings.task.label, sys.argv[0] or "your script"
        folder = None if path is None else RunFolder(path, table)
        prepare = prepare or (lambda: make_simulation(settings.engine, job or build_job(settings, data_dir)))
        return cls(settings, table, folder, prepare)

    def finished(self, resume: bool) -> Summary | None:
        """The totals of the finished run in the directory; None if it is to be trained.

        Raises:
            CheckpointError: the directory holds another run, or this one, unfinished, and `resume` is false.
            Diverged: the run diverged, and would do so again.
        """
        folder = self.folder
        if folder is None or not folder.exists:
            return None
        done = folder.summary()
        if done is None:
            if not resume:
                raise CheckpointError(
                    f"{folder.path} holds an unfinished run; `thinwire resume {folder.path}`, or resume=True in "
                    "Python, continues it"
                )
            return None
        refuse_diverged(done)
        return None if folder.is_extended else done

    def train(self, resume: bool = False, overwrite: bool = False, **watch: Any) -> Loop:
        """Train the rounds that are left; nothing is written before the run has been checked.

        Args:
            resume: whether to continue from the newest checkpoint.
            overwrite: whether to delete the run in the directory.
            **watch: functions of the caller, see `Loop.train`.
        """
        federation, folder = self.prepare(), self.folder
        check_early(self.settings, federation.job.task)
        with locked(folder.path) if folder else nullcontext(), stopped_by_sigterm():
            if folder:
                if not overwrite and self.finished(resume):
                    raise InUse(f"another process has just finished {folder.path}; the same call reads it")
                again = overwrite or (folder.summary() is not None and not folder.is_extended)
                folder.clear_results()
                folder.create(overwrite=again)
            loop = Loop(self.settings, federation, folder, resume)
            loop.train(**watch)
        return loop

    def reopen(self, summary: Summary) -> Loop:
        """A finished run from the files of its directory; nothing is trained and nothing is written."""
        folder = self.folder
        assert folder is not None
        if rounds_in(folder.checkpoints)[-1:] != [summary["rounds"]]:
            raise CheckpointError(
                f"{folder.path} lacks the checkpoint of its last round, {summary['rounds']}; "
                f"tw.load_run({str(folder.path)!r}) reads its results"
            )
        loop = Loop(self.settings, self.prepare(), folder, resume=True)
        loop.summary, loop.clients = summary, read_clients(folder.path)
        return loop


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, by which schedulers of machines end a program, is like Ctrl-C, unless the program handles it."""
    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_early(settings: Settings, task: Task) -> None:
    """Refuse an early end that nothing could bring about."""
    if settings.eval.patience and task.test is None and task.client_tests is None:
        raise ConfigError(
            f"patience = {settings.eval.patience} counts evaluations, but there is nothing to evaluate on; "
            "give test=(inputs, targets) or validation_fraction=0.1"
        )
    if settings.eval.target_accuracy < 1 and task.test is None:
        raise ConfigError(
            f"target_accuracy = {settings.eval.target_accuracy} is an accuracy on the test set, but there is none; "
            "give test=(inputs, targets)"
        )


def refuse_diverged(summary: Summary) -> None:
    """Raise the error of a run that diverged before: it would diverge again."""
    if summary.get("status") == "diverged":
        raise Diverged(f"{summary['status_why']} (known from an earlier run; --overwrite runs it once more)")


def settled(settings: Settings, data_dir: Path | None = None, stored: bool = True) -> tuple[Settings, Job]:
    """Settings of a task of the user, with its fingerprint and the numbers of clients that they do not state.

    Args:
        settings: the settings.
        data_dir: the folder of datasets.
        stored: whether the run is written to a directory; otherwise no fingerprint is needed, which reads all data.

    Raises:
        CheckpointError: the settings, as those of a run directory, have a fingerprint and the task another one.
    """
    job = build_job(settings, data_dir)
    now, task = fingerprint(job.task) if stored else settings.fingerprint, settings.task
    if settings.fingerprint not in ("", now):
        raise other_task(f"the run on {task.label} began", settings.fingerprint, now)
    if not task.clients and not task.participating_clients and "clients" not in dict(task.options):
        task = replace(task, clients=len(job.task.clients))
    return replace(settings, task=task, cohort=Cohort(job.cohort), fingerprint=now), job
