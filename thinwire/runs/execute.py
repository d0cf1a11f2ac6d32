"""Run an experiment into its directory: from round 1, or from the newest checkpoint.

The one way in which a run is executed: from round 1 or its newest checkpoint, into a directory or in memory.

`execute` (command line, grids, deployments), `tw.simulate` and `tw.run_task` all come here with a `Plan`.

A run before it is executed: what decides its results, and what its directory is called.

`Plan.of` makes one from an experiment (command line, `tw.run_task`), `simulate.py` from a model and data of one's own.

The record of a task of one's own in a run directory: its fingerprint and its number of clients, in `config.toml`.

The name of such a task does not define its data: the file or the data may change. A run is continued, and a finished
run is used again, only if model and data have the fingerprint (`data/fingerprint.py`) that they had at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core import plugins
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.data.fingerprint import fingerprint
from thinwire.errors import CheckpointError, ConfigError, Diverged
from thinwire.federation.federation import OnMessage
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.local_engine import LocalEngine
from thinwire.federation.runner import Runner
from thinwire.protocol.method import Method
from thinwire.runs.best import BestModel, Lead, selected_by
from thinwire.runs.build import build_job
from thinwire.runs.collapse import chance_of, is_broken
from thinwire.runs.experiment import Checkpointing, Cohort, Evaluation, Experiment, to_table
from thinwire.runs.loop import (
    CallbackFailed,
    Checkpoints,
    EndedBy,
    OnRound as OnRound,
    Stop,
    StopFunction,
    Training,
    Watchers,
)
from thinwire.runs.records import ROLLED_BACK, Accounting, byte_totals
from thinwire.runs.retry import Rescue, Retry, check_retry
from thinwire.runs.run_directory import RunFolder, Summary
from thinwire.runs.samples import make_samples, write_samples
from thinwire.runs.summary import diverged_summary, summarize_run
from thinwire.runs.task_files import folder_name
from thinwire.runs.toml import Table, read_toml


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
        folder: its directory.
        done: the totals of the finished run.
        remedy: what to write if the run went back and now may not.
    """
    then = RunFolder.open(folder.path).table.get("checkpoint", {}).get("on_divergence", "stop")
    halved = [one for one in done.get("retries", ()) if one.get("status") != ROLLED_BACK]
    if halved and not plan.retries:
        raise CheckpointError(f"{folder.path} holds a run that went back {len(halved)} times; {remedy}")
    return plan.retries and then == "stop" and is_broken(done)


def refuse_diverged(summary: Summary, again: str = "--again") -> None:
    """Raise the error of a run that diverged before: it would diverge again."""
    if summary.get("status") == "diverged":
        raise Diverged(f"{summary['status_why']} (known from an earlier run; {again} runs it once more)")


class Finished(NamedTuple):
    """A run that has ended: what ran it, its last state, its records, its totals, and the best model if it is kept."""

    simulation: Runner
    state: RunState
    records: list[RoundRecord]
    retries: list[Retry]
    summary: Summary
    best: BestModel | None


def run_plan(
    plan: Plan,
    folder: RunFolder | None,
    watchers: Watchers,
    *,
    resume: bool = False,
    again: bool = False,
) -> Finished:
    """Train the rounds of a plan that are left. Nothing is written before the plan has been checked.

    Args:
        plan: the run.
        folder: its directory; None to write nothing.
        watchers: functions that see the records.
        resume: continue from the newest checkpoint, if there is one.
        again: delete the results in the directory first.
    """
    simulation = plan.prepare()
    with folder.locked() if folder else nullcontext():
        if folder:
            if again:
                folder.clear()
            folder.create()
        rescue = _rescue(plan, simulation, folder)
        simulation = rescue.runner(simulation)
        state = folder.load(plan.engine.device) if folder and resume else None
        if state is not None:
            check_blocks(simulation, state)
        state = state or simulation.start()
        records = folder.rewind(state.round) if folder else []
        best = _best(plan, simulation, folder, records)
        return _Execution(plan, folder, rescue, best, records).run(simulation, state, watchers)


def reopen(plan: Plan, folder: RunFolder, summary: Summary) -> Finished:
    """A finished run from the files of its directory; nothing is trained and nothing is written."""
    simulation = plan.prepare()
    rescue = _rescue(plan, simulation, folder)
    simulation = rescue.runner(simulation)
    state = folder.load(plan.engine.device)
    if state is None or state.round != summary["rounds"]:
        raise CheckpointError(
            f"{folder.path} lacks the checkpoint of its last round, {summary['rounds']}; "
            f"tw.load_run({str(folder.path)!r}) reads its results"
        )
    check_blocks(simulation, state)
    records = folder.history()
    best = _best(plan, simulation, folder, records)
    return Finished(simulation, state, records, rescue.retries, summary, best)


def check_blocks(simulation: Runner, state: RunState) -> None:
    """Refuse a checkpoint whose blocks are not those of this model and method."""
    public, contract = state.server.public, simulation.contract.at(state.server.public.version)
    wanted = (Spec.of(simulation.federation.first.base), contract.coords, contract.shared, contract.buffers)
    model = (*contract.weights, *contract.buffers) if simulation.federation.averages and state.round else ()
    same = {one.name: one.shape for one in model} == {name: tuple(one.shape) for name, one in state.average.items()}
    if not same or any(Spec.of(tree) != spec for tree, spec in zip(public[1:], wanted, strict=True)):
        raise CheckpointError(
            f"the checkpoint of round {state.round} holds other blocks than this model and method; remove it"
        )


def final_model(simulation: Runner, state: RunState) -> tuple[Tree, Tree]:
    """The weights and the buffers of a state, on the CPU."""
    weights, buffers = simulation.federation.final(state)
    return tuple({name: one.detach().cpu() for name, one in tree.items()} for tree in (weights, buffers))  # type: ignore[return-value]


def _best(plan: Plan, simulation: Runner, folder: RunFolder | None, records: list[RoundRecord]) -> BestModel | None:
    if not plan.checkpoint.best:
        return None
    best = BestModel(selected_by(simulation.job), folder.checkpoints if folder else None)
    best.go_back(records)
    return best


def _rescue(plan: Plan, simulation: Runner, folder: RunFolder | None) -> Rescue:
    settings = plan.engine.device, plan.checkpoint.every, plan.retries
    return Rescue(plan.engine.prepare, simulation.job, folder, *settings)


@dataclass(eq=False)
class _Execution:
    """A run while it is executed.

    Args:
        plan: the run.
        folder: its directory, or None.
        rescue: trains the rounds, and goes back if that is wanted.
        best: the best model, if it is kept.
        records: the records so far; rounds are appended.
        done: the state whose record was written last.
        saved: the round of the newest checkpoint that was written here.
    """

    plan: Plan
    folder: RunFolder | None
    rescue: Rescue
    best: BestModel | None
    records: list[RoundRecord]
    done: RunState | None = None
    saved: int = -1

    def run(self, simulation: Runner, state: RunState, watchers: Watchers) -> Finished:
        """Train the rounds that are left, and write the results."""
        if watchers.on_continue:
            watchers.on_continue(state.round)
        for record in list(self.records):
            watchers.show(record)
        try:
            simulation, state = self._train(simulation, state, watchers)
            watchers.end(self.records)
        except (KeyboardInterrupt, CallbackFailed):
            self._save_done()
            raise
        lead = Lead(selected_by(simulation.job)).along(record._asdict() for record in self.records)
        ended_by = self.plan.stop().limit(self.records, lead) or "stop function"
        summary = self._summary(simulation, state, ended_by)
        if self.folder:
            weights, buffers = simulation.federation.final(state)
            model = self.best.as_bytes() if self.best and self.best.weights is not None else None
            write_samples(self.folder.path, make_samples(simulation.federation, state))
            self.folder.finish(summary, {**weights, **buffers}, model)
        return Finished(simulation, state, self.records, self.rescue.retries, summary, self.best)

    def _train(self, simulation: Runner, state: RunState, watchers: Watchers) -> tuple[Runner, RunState]:
        written = None
        checkpoints = Checkpoints(self.plan.checkpoint.every, self._save) if self.folder else None
        self.rescue.begin = self._with_backend
        stop = self.plan.stop(watchers.stop)
        loop = self.rescue.rounds(simulation, state, stop, self.records, checkpoints, watchers.on_message)
        try:
            for simulation, state, record in loop:
                self._add(simulation, state, record)
                if self.folder and written != (written := (state.backend, state.backend_reason)):
                    self.folder.write_environment(environment_facts(self.plan, simulation, state))
                watchers.show(record)
        except Diverged as error:
            if self.folder:
                found = diverged_summary(self._summary(simulation, state, "divergence"), error)
                self.folder.write_totals(found)
            raise
        return simulation, state

    def _add(self, simulation: Runner, state: RunState, record: RoundRecord) -> None:
        """Write a record, and keep the model if it is the best."""
        if self.best and self.done is not None and record.round <= self.done.round:
            self.best.go_back(self.records)  # the run went back
        if self.folder:
            self.folder.record(record)
        self.records.append(record)
        if self.best:
            good = self.rescue.round if self.rescue.active else 0
            self.best.after(record, lambda: {**(model := final_model(simulation, state))[0], **model[1]}, good)
        self.done = state

    def _save(self, state: RunState) -> None:
        """Write a checkpoint, with the best model until then."""
        assert self.folder is not None
        self.folder.save(state, self.best.weights if self.best else None)
        self.saved = state.round

    def _save_done(self) -> None:
        """Write the last complete round, unless it is on disk or was abandoned."""
        done = self.done
        if self.rescue.active:  # whose checkpoints are healthy states only
            return
        if self.folder and done is not None and done.round == len(self.records) != self.saved:
            self._save(done)

    def _summary(self, simulation: Runner, state: RunState, ended_by: EndedBy) -> Summary:
        """The totals of the rounds so far."""
        names = self.plan.name, self.plan.task, self.plan.accounting
        summary = summarize_run(*names, simulation, state, self.records, self.rescue.retries)
        summary["ended_by"] = ended_by
        if self.best and self.best.lead.round:
            lead = self.best.lead
            summary["best"] = {"round": lead.round, "value": lead.value, "chosen_by": lead.objective.label}
        return summary

    def _with_backend(self, simulation: Runner, state: RunState) -> RunState:
        """The state with a backend; before round 1 it is chosen and written to disk.

        A run that is resumed before its first checkpoint uses the backend that was chosen then.
        """
        if state.round or self.folder is None:
            return state
        if chosen := self.folder.training():
            return state._replace(**chosen._asdict())
        state = simulation.choose_backend(state)
        self.folder.keep_training(Training.of(state))
        return state


def environment_facts(plan: Plan, simulation: Runner, state: RunState) -> dict[str, Any]:
    """How clients are trained on this machine, for `environment.json`."""
    engine, chance = plan.engine, chance_of(simulation)
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


@dataclass(frozen=True, eq=False)
class Plan:
    """A run that is to be executed.

    Args:
        name: the label of its method.
        task: the label of its task.
        table: its configuration, the contents of `config.toml`.
        method: the federated method.
        engine: the simulation: device, backend, precision.
        eval: when the model is evaluated, and when the run ends early.
        checkpoint: when the state is saved, what happens when training fails, whether the best model is kept.
        rounds: number of rounds.
        prepare: reads the data and makes what runs the rounds; raises if something does not fit.
        accounting: which bytes count in totals.
    """

    name: str
    task: str
    table: Table
    method: Method
    engine: LocalEngine
    eval: Evaluation
    checkpoint: Checkpointing
    rounds: int
    prepare: Callable[[], Runner]
    accounting: Accounting = "honest"

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        data_dir: Path | None = None,
        prepare: Callable[[], Runner] | None = None,
    ) -> Plan:
        """The plan of an experiment.

        Args:
            experiment: the experiment.
            data_dir: the folder of datasets.
            prepare: makes what runs the rounds, if not the experiment's engine.
        """
        plugins.load(experiment.imports)  # in a worker process they are not imported yet
        if prepare and experiment.checkpoint.on_divergence == "retry":
            raise ConfigError("on_divergence = 'retry' is for simulations; write on_divergence = 'stop'")
        job: Job | None = None
        if experiment.task.is_own and prepare is None:  # a finished run is used again for the same data only
            experiment, job = settled(experiment, data_dir)
        return cls(
            experiment.name,
            experiment.task.label,
            to_table(experiment),
            experiment.method,
            experiment.engine,
            experiment.eval,
            experiment.checkpoint,
            experiment.rounds,
            prepare or (lambda: experiment.engine.prepare(job or build_job(experiment, data_dir))),
            experiment.accounting,
        )

    def __post_init__(self) -> None:
        if self.retries:
            check_retry(self.method, self.engine)

    @property
    def retries(self) -> bool:
        """Whether the run goes back when training fails."""
        return self.checkpoint.on_divergence == "retry"

    def stop(self, when: StopFunction | None = None) -> Stop:
        """When the run ends, with a function of the caller."""
        return Stop(self.rounds, self.eval.target_accuracy, self.eval.patience, when)


def settled(experiment: Experiment, data_dir: Path | None = None) -> tuple[Experiment, Job]:
    """An experiment with a task of one's own, with its fingerprint and the numbers of clients that it does not state.

    Raises:
        CheckpointError: if the experiment, as that of a run directory, has a fingerprint and the task another one.
    """
    job = build_job(experiment, data_dir)
    now, task = fingerprint(job.task), experiment.task
    if experiment.fingerprint not in ("", now):
        raise CheckpointError(_other(f"the run on {task.label} began", experiment.fingerprint, now))
    if not task.clients and not task.participating_clients and "clients" not in dict(task.options):
        task = replace(task, clients=len(job.task.clients))
    return replace(experiment, task=task, cohort=Cohort(job.cohort), fingerprint=now), job


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
        f"{what} with another model or other data (fingerprint {known[:40]}, now {now}); restore them, or name another "
        "directory with --out"
    )
