"""Run an experiment into its directory: from round 1, or from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.core import plugins
from thinwire.core.spec import Spec
from thinwire.errors import CheckpointError, ConfigError, Diverged
from thinwire.experiments.build import build_job
from thinwire.experiments.chance import chance_of
from thinwire.experiments.collapse import is_broken
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.loop import Checkpoints, Stop, Training
from thinwire.experiments.records import byte_totals
from thinwire.experiments.retry import Rescue, check_retry
from thinwire.experiments.retry_store import FolderStore
from thinwire.experiments.run_directory import RunFolder, Summary
from thinwire.experiments.summary import diverged_summary, summary_of_experiment
from thinwire.experiments.task_files import folder_name
from thinwire.experiments.task_record import refuse_other_task, settled
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.runtime.runner import Runner

OnRound = Callable[[RoundRecord], None]


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
    """
    plugins.load(experiment.imports)  # in a worker process they are not imported yet
    retry = experiment.checkpoint.on_divergence == "retry"
    if retry:
        check_retry(experiment.method, experiment.engine)
        if prepare:
            raise ConfigError("on_divergence = 'retry' is for simulations; write on_divergence = 'stop'")
    job = None
    if experiment.task.is_own and prepare is None:  # a finished run is used again for the same data only
        experiment, job = settled(experiment, data_dir)
        if not again:
            refuse_other_task(path, experiment.fingerprint)
    folder = RunFolder(path, experiment)
    if folder.exists and not again:
        if done := folder.summary():
            folder.verify()
            again = _other_policy(folder, done, retry)
            if not again:
                refuse_diverged(done)
                sizes = (done["bytes_up"], done["bytes_down"], done["bytes_catchup"])
                return {**done, **byte_totals(*sizes, experiment.accounting, done.get("bytes_abandoned", 0))}
        elif not resume:
            raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` continues it")
    simulation = prepare() if prepare else experiment.engine.prepare(job or build_job(experiment, data_dir))
    with folder.locked():
        if again:
            folder.clear()
        folder.create()
        store = FolderStore(folder, experiment.engine.device)
        rescue = Rescue(experiment.engine.prepare, simulation.job, store, experiment.checkpoint.every, str(path), retry)
        simulation = rescue.runner(simulation)
        state = _first_state(folder, simulation, resume)
        run = _Run(experiment, folder, rescue, folder.rewind(state.round))
        simulation, state = run.train(simulation, state, on_round, on_message)
        summary = run.summary(simulation, state)
        weights, buffers = simulation.federation.final(state)
        folder.finish(summary, {**weights, **buffers})
    return summary


def _other_policy(folder: RunFolder, done: Summary, retry: bool) -> bool:
    """Whether a finished run must be run again, because it failed without going back and now may."""
    then = RunFolder.open(folder.path).experiment.checkpoint.on_divergence
    if done.get("retries") and not retry:
        raise CheckpointError(
            f"{folder.path} holds a run that went back {len(done['retries'])} times; "
            "write --on-divergence retry, or --again to run it without"
        )
    return retry and then == "stop" and is_broken(done)


def refuse_diverged(summary: Summary) -> None:
    """Raise the error of a run that diverged before: it would diverge again."""
    if summary.get("status") == "diverged":
        raise Diverged(f"{summary['status_why']} (known from an earlier run; --again runs it once more)")


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


def _first_state(folder: RunFolder, simulation: Runner, resume: bool) -> RunState:
    """The state of the newest checkpoint when resuming, otherwise the state before round 1."""
    state = folder.load(simulation.federation.engine.device) if resume else None
    if state is None:
        return simulation.start()
    check_blocks(simulation, state)
    return state


@dataclass(frozen=True, eq=False)
class _Run:
    """A run in its directory.

    Args:
        experiment: the experiment.
        folder: its run directory.
        rescue: trains the rounds, and goes back if that is wanted.
        records: the records so far; rounds are appended.
    """

    experiment: Experiment
    folder: RunFolder
    rescue: Rescue
    records: list[RoundRecord]

    def train(
        self, simulation: Runner, state: RunState, on_round: OnRound | None, on_message: OnMessage | None
    ) -> tuple[Runner, RunState]:
        """Train the rounds that are left, record each, save some."""
        experiment, written = self.experiment, None
        for record in self.records if on_round else ():
            on_round(record)  # type: ignore[misc]
        stop = Stop(experiment.rounds, experiment.eval.target_accuracy)
        checkpoints = Checkpoints(experiment.checkpoint.every, self.folder.save)
        self.rescue.begin = self._with_backend
        try:
            loop = self.rescue.rounds(simulation, state, stop, self.records, checkpoints, on_message)
            for simulation, state, record in loop:
                self.folder.record(record)
                self.records.append(record)
                if written != (written := (state.backend, state.backend_reason)):
                    self._write_environment(simulation, state)
                if on_round:
                    on_round(record)
        except Diverged as error:
            self.folder.record_diverged(str(error), diverged_summary(self.summary(simulation, state), error))
            raise
        return simulation, state

    def summary(self, simulation: Runner, state: RunState) -> Summary:
        """The totals of the rounds so far."""
        return summary_of_experiment(self.experiment, simulation, state, self.records, self.rescue.store.retries)

    def _with_backend(self, simulation: Runner, state: RunState) -> RunState:
        """The state with a backend; before round 1 it is chosen and written to disk.

        A run that is resumed before its first checkpoint uses the backend that was chosen then.
        """
        if state.round:
            return state
        if chosen := self.folder.training():
            return state._replace(**chosen._asdict())
        state = simulation.choose_backend(state)
        self.folder.keep_training(Training.of(state))
        return state

    def _write_environment(self, simulation: Runner, state: RunState) -> None:
        """Write the machine and how clients are trained on it."""
        engine, chance = self.experiment.engine, chance_of(simulation)
        self.folder.write_environment(
            {
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
        )
