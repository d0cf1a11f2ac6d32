"""The one way in which a run is executed: from round 1 or its newest checkpoint, into a directory or in memory.

    thinwire run, deploy, tw.compare, ...  ->  execute  ->  train  ->  Rescue.rounds  ->  rounds (`loop.py`)
    tw.run, tw.simulate                    ->  train

The name of a task of the user does not define its data: the file or the data may change. A run is continued, and a
finished run is used again, only if model and data have the fingerprint (`data/fingerprint.py`) that they had at its
start, which is in its `config.toml`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core import plugins
from thinwire.core.reference import OWN
from thinwire.core.spec import Spec
from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.data.fingerprint import fingerprint
from thinwire.data.task import Task
from thinwire.errors import CheckpointError, ConfigError, Diverged
from thinwire.federation.federation import Federation, OnMessage
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.settings import Cohort, Settings
from thinwire.runs.best import BestModel, Lead, selected_by
from thinwire.runs.build import build_job
from thinwire.runs.collapse import chance_of, is_broken
from thinwire.runs.config import digest, to_table
from thinwire.runs.loop import Checkpoints, EndedBy, OnRound as OnRound, Stop, Training
from thinwire.runs.records import ROLLED_BACK, byte_totals
from thinwire.runs.retry import Rescue, Retry, check_retry
from thinwire.runs.run_directory import RunFolder, Summary, identity
from thinwire.runs.samples import make_samples, write_samples
from thinwire.runs.summary import diverged_summary, summarize_run
from thinwire.runs.task_files import folder_name
from thinwire.runs.toml import Table, flat, read_toml

RESUME = "`thinwire resume {path}`, or resume=True in Python, continues it"
OTHER = "name another directory, or delete it with --overwrite"


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
    on_round: OnRound | None = None,
    on_message: OnMessage | None = None,
    on_continue: Callable[[int], None] | None = None,
    prepare: Callable[[], Federation] | None = None,
) -> Summary:
    """Run settings into a directory and return the totals; a finished run is used again.

    Args:
        settings: the settings.
        path: the run directory.
        data_dir: the folder of datasets.
        resume: continue from the newest checkpoint, if there is one; a run that diverged is not run again.
        overwrite: delete the run in the directory and start again.
        on_round: is called after every round, first with the records of earlier rounds; after a retry, again with the
            round that the run went back to and those after it.
        on_message: is called with every message, as it is sent.
        on_continue: is called with the number of rounds that are done, before the others are trained.
        prepare: makes what runs the rounds, if not the engine of the settings.
    """
    plan = RunPlan.of(settings, path, data_dir, prepare)
    if not overwrite and (done := plan.finished(resume)):
        sizes = (done["bytes_up"], done["bytes_down"], done["bytes_catchup"])
        return {**done, **byte_totals(*sizes, settings.accounting, done.get("bytes_abandoned", 0))}
    watch = {"on_round": on_round, "on_message": on_message, "on_continue": on_continue}
    return train(plan, resume=resume, overwrite=overwrite, **watch).summary  # type: ignore[arg-type]


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
    ) -> RunPlan:
        """Check settings, and read the data of a task of the user; nothing is written."""
        plugins.load(settings.imports)  # in a worker process they are not imported yet
        if settings.checkpoint.on_divergence == "retry":
            if prepare:
                raise ConfigError("on_divergence = 'retry' is for simulations; write on_divergence = 'stop'")
            check_retry(settings.method, settings.engine)
        job: Job | None = None
        if settings.task.is_own and prepare is None:  # a finished run is used again for the same data only
            settings, job = settled(settings, data_dir, stored=path is not None)
        table = to_table(settings)
        if settings.task.kind.startswith(OWN):  # of a script, which alone has the object
            table["task"]["kind"], table["script"] = settings.task.label, sys.argv[0] or "your script"
        folder = None if path is None else RunFolder(path, table)
        simulated = lambda: settings.engine.prepare(job or build_job(settings, data_dir))  # noqa: E731
        return cls(settings, table, folder, prepare or simulated)

    def finished(self, resume: bool) -> Summary | None:
        """The totals of the finished run in the directory; None if it is to be trained.

        Raises:
            CheckpointError: the directory holds another run, or this one, unfinished, and `resume` is false.
            Diverged: the run diverged, and would do so again.
        """
        folder = self.folder
        if folder is None or not _holds_run(folder.path):
            return None
        refuse_other_task(folder.path, self.settings.fingerprint)
        theirs = RunFolder.open(folder.path)
        if theirs.config != folder.config:
            what = _difference(identity(theirs.table), identity(folder.table))
            raise CheckpointError(f"{folder.path} holds a run of another configuration: {what}; {OTHER}")
        done = folder.summary()
        if done is None:
            if not resume:
                raise CheckpointError(f"{folder.path} holds an unfinished run; {RESUME.format(path=folder.path)}")
            return None
        retries = self.settings.checkpoint.on_divergence == "retry"
        halved = [one for one in done.get("retries", ()) if one.get("status") != ROLLED_BACK]
        if halved and not retries:
            raise CheckpointError(
                f"{folder.path} holds a run that went back {len(halved)} times; write on_divergence retry, or "
                "--overwrite to run it without"
            )
        then = theirs.table.get("checkpoint", {}).get("on_divergence", "stop")
        if retries and then == "stop" and is_broken(done):  # it failed without going back, and now may
            return None
        refuse_diverged(done)
        return done


class Finished(NamedTuple):
    """A run that has ended: what ran it, its last state, its records, its totals, and the best model if it is kept."""

    simulation: Federation
    state: RunState
    records: list[RoundRecord]
    retries: list[Retry]
    summary: Summary
    best: BestModel | None


def train(
    plan: RunPlan,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    on_message: OnMessage | None = None,
    on_continue: Callable[[int], None] | None = None,
    stop: Callable[[RoundRecord], Any] | None = None,
) -> Finished:
    """Train the rounds of a run that are left, and write its results. Nothing is written before it has been checked.

    After every round, in this order: the record is written to `metrics.jsonl`, `on_round` is called, then `stop`; last,
    a checkpoint is written if one is due. A run that continues shows the records of its earlier rounds first.

    Args:
        plan: the run.
        resume: as for `execute`.
        overwrite: as for `execute`.
        on_round: as for `execute`.
        on_message: as for `execute`.
        on_continue: as for `execute`.
        stop: the run ends after a record for which it is true.
    """
    settings, folder = plan.settings, plan.folder
    simulation = plan.prepare()
    check_early(settings, simulation.job.task)
    ends = Stop(settings.rounds, settings.eval.target_accuracy, settings.eval.patience, stop)
    with folder.locked() if folder else nullcontext():
        if folder:
            if overwrite or folder.summary():  # a finished run that is trained again
                folder.clear()
            folder.create()
        rescue = _rescue(plan, simulation)
        simulation = rescue.runner(simulation)
        loaded = folder.load(settings.engine.device) if folder and resume else None
        if loaded is not None:
            check_blocks(simulation, loaded)
        state = loaded or simulation.start()
        records = folder.rewind(state.round) if folder else []
        best = _best(plan, simulation, records)
        done: RunState | None = None  # the state whose record was written last
        saved = -1  # the round of the newest checkpoint that was written here

        def save(state: RunState) -> None:
            nonlocal saved
            assert folder is not None
            folder.save(state, best.weights if best else None)
            saved = state.round

        def totals(ended_by: EndedBy) -> Summary:
            names = settings.name, settings.task.label, settings.accounting
            summary = summarize_run(*names, simulation, state, records, rescue.retries)
            summary["ended_by"] = ended_by
            if best and best.lead.round:
                lead = best.lead
                summary["best"] = {"round": lead.round, "value": lead.value, "chosen_by": lead.objective.label}
            return summary

        def with_backend(simulation: Federation, state: RunState) -> RunState:
            """Before round 1 the backend is chosen and written, so that a run that is resumed before its first
            checkpoint uses the same one.
            """
            if state.round or folder is None:
                return state
            if chosen := folder.training():
                return state._replace(**chosen._asdict())
            state = simulation.choose_backend(state)
            folder.keep_training(Training.of(state))
            return state

        if on_continue:
            on_continue(state.round)
        for record in records if on_round else ():
            on_round(record)  # type: ignore[misc]
        rescue.begin = with_backend
        checkpoints = Checkpoints(settings.checkpoint.every, save) if folder else None
        loop, written = rescue.rounds(simulation, state, ends, records, checkpoints, on_message), None
        try:
            for simulation, state, record in loop:
                if best and done is not None and record.round <= done.round:
                    best.go_back(records)  # the run went back
                if folder:
                    folder.record(record)
                records.append(record)
                if best:
                    good = rescue.round if rescue.active else 0
                    best.after(record, partial(_all_weights, simulation, state), good)
                done = state
                if folder and written != (written := (state.backend, state.backend_reason)):
                    folder.write_environment(environment_facts(settings, simulation, state))
                if on_round:
                    on_round(record)
        except Diverged as error:
            if folder:
                folder.write_totals(diverged_summary(totals("divergence"), error))
            raise
        except KeyboardInterrupt:
            # the last complete round, unless it is on disk or was abandoned; a rescue saves healthy states only
            if folder and done is not None and done.round == len(records) != saved and not rescue.active:
                save(done)
            raise
        lead = Lead(selected_by(simulation.job)).along(record._asdict() for record in records)
        summary = totals(ends._replace(when=None).ended_by(records, lead) or "stop function")
        if folder:
            write_samples(folder.path, make_samples(simulation.federation, state))
            model = best.as_bytes() if best and best.weights is not None else None
            folder.finish(summary, _all_weights(simulation, state), model)
        return Finished(simulation, state, records, rescue.retries, summary, best)


def reopen(plan: RunPlan, summary: Summary) -> Finished:
    """A finished run from the files of its directory; nothing is trained and nothing is written."""
    folder = plan.folder
    assert folder is not None
    simulation = plan.prepare()
    rescue = _rescue(plan, simulation)
    simulation = rescue.runner(simulation)
    state = folder.load(plan.settings.engine.device)
    if state is None or state.round != summary["rounds"]:
        raise CheckpointError(
            f"{folder.path} lacks the checkpoint of its last round, {summary['rounds']}; "
            f"tw.load_run({str(folder.path)!r}) reads its results"
        )
    check_blocks(simulation, state)
    records = folder.history()
    return Finished(simulation, state, records, rescue.retries, summary, _best(plan, simulation, records))


def _rescue(plan: RunPlan, simulation: Federation) -> Rescue:
    engine, saving = plan.settings.engine, plan.settings.checkpoint
    retries = saving.on_divergence == "retry"
    return Rescue(engine.prepare, simulation.job, plan.folder, engine.device, saving.every, retries)


def _best(plan: RunPlan, simulation: Federation, records: list[RoundRecord]) -> BestModel | None:
    if not plan.settings.checkpoint.best:
        return None
    best = BestModel(selected_by(simulation.job), plan.folder.checkpoints if plan.folder else None)
    best.go_back(records)
    return best


def _all_weights(simulation: Federation, state: RunState) -> Tree:
    weights, buffers = final_model(simulation, state)
    return {**weights, **buffers}


def final_model(simulation: Federation, state: RunState) -> tuple[Tree, Tree]:
    """The weights and the buffers of a state, on the CPU."""
    weights, buffers = simulation.federation.final(state)
    return tuple({name: one.detach().cpu() for name, one in tree.items()} for tree in (weights, buffers))  # type: ignore[return-value]


def environment_facts(settings: Settings, simulation: Federation, state: RunState) -> dict[str, Any]:
    """How clients are trained on this machine, for `environment.json`."""
    engine, chance = settings.engine, chance_of(simulation)
    return {
        "device": engine.device,
        "precision": engine.precision,
        "clients_trained_by": state.backend,
        "because": state.backend_reason,
        "note": simulation.job.task.note,
        "convolutions": simulation.convolutions(state),
        "clients_at_a_time": str(state.chunk or engine.chunk or "all"),
        "onednn": "by machine" if state.onednn is None else str(state.onednn).lower(),
        "chance": chance._asdict() if chance else None,
    }


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


def check_blocks(simulation: Federation, state: RunState) -> None:
    """Refuse a checkpoint whose blocks are not those of this model and method."""
    public, contract = state.server.public, simulation.contract.at(state.server.public.version)
    wanted = (Spec.of(simulation.federation.first.base), contract.coords, contract.shared, contract.buffers)
    model = (*contract.weights, *contract.buffers) if simulation.federation.averages and state.round else ()
    same = {one.name: one.shape for one in model} == {name: tuple(one.shape) for name, one in state.average.items()}
    if not same or any(Spec.of(tree) != spec for tree, spec in zip(public[1:], wanted, strict=True)):
        raise CheckpointError(
            f"the checkpoint of round {state.round} holds other blocks than this model and method; remove it"
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
        raise CheckpointError(_other(f"the run on {task.label} began", settings.fingerprint, now))
    if not task.clients and not task.participating_clients and "clients" not in dict(task.options):
        task = replace(task, clients=len(job.task.clients))
    return replace(settings, task=task, cohort=Cohort(job.cohort), fingerprint=now), job


def refuse_other_task(path: Path, now: str) -> None:
    """Refuse a run directory whose run began with another model or other data.

    Args:
        path: the run directory.
        now: the fingerprint of the task; "" for a task by name, which has none.
    """
    file = path / "config.toml"
    known = str(read_toml(file).get("fingerprint", "")) if file.is_file() else ""
    if now and known not in ("", now):
        raise CheckpointError(_other(f"{path} holds a run that began", known, now))


def _other(what: str, known: str, now: str) -> str:
    return (
        f"{what} with other data, or other initial weights of the model (fingerprint {known[:40]}, now {now}); restore "
        "them (call torch.manual_seed before the model is made), or name another directory"
    )


def _holds_run(path: Path) -> bool:
    """Whether there is a run in a folder; anything else in it is an error."""
    if (path / "config.toml").is_file():
        return True
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "and is not a run directory" if path.is_dir() else "and is a file, not a run directory"
        raise CheckpointError(f"{path} exists {what}; name another directory")
    return False


def _difference(theirs: Table, ours: Table) -> str:
    """The first settings in which two runs differ.

    >>> _difference({"rounds": 5, "eval": {"every": 1}}, {"rounds": 9, "eval": {"every": 1}})
    'rounds = 5 there, 9 here'
    """
    one, two = flat(theirs), flat(ours)
    differ = [key for key in dict.fromkeys((*one, *two)) if one.get(key) != two.get(key)]
    named = [f"{key} = {one.get(key, 'unset')} there, {two.get(key, 'unset')} here" for key in differ]
    more = f" (and {len(named) - 2} more)" if len(named) > 2 else ""
    return visible("; ".join(named[:2]), 300) + more
