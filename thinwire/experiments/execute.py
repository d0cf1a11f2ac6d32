"""Run an experiment into its directory: from round 1, or from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.core import plugins
from thinwire.core.spec import Spec
from thinwire.errors import CheckpointError, Diverged
from thinwire.experiments.build import build_job
from thinwire.experiments.chance import chance_of
from thinwire.experiments.collapse import Verdict, summary_of
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.loop import Checkpoints, Stop, Training, rounds
from thinwire.experiments.records import byte_totals
from thinwire.experiments.run_directory import RunFolder, Summary
from thinwire.experiments.summary import summary_of_experiment
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.runtime.runner import Runner

OnRound = Callable[[RoundRecord], None]


def default_folder(experiment: Experiment, parent: Path = Path("runs")) -> Path:
    """The default run directory: named after method, task, seed and a digest of the whole configuration."""
    return parent / f"{experiment.name}-{experiment.task.kind}-s{experiment.seed}-{experiment.digest()[:6]}"


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
        on_round: is called after every round, first with the records of earlier rounds.
        prepare: makes the simulation, if not the experiment's engine.
        on_message: is called with every message, as it is sent.
    """
    plugins.load(experiment.imports)  # in a worker process they are not imported yet
    folder = RunFolder(path, experiment)
    if folder.exists and not again:
        if done := folder.summary():
            folder.verify()
            refuse_diverged(done)
            sizes = (done["bytes_up"], done["bytes_down"], done["bytes_catchup"])
            return {**done, **byte_totals(*sizes, experiment.accounting)}
        if not resume:
            raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` continues it")
    simulation = prepare() if prepare else experiment.engine.prepare(build_job(experiment, data_dir))
    with folder.locked():
        if again:
            folder.clear()
        folder.create()
        state = _first_state(folder, simulation, resume)
        run = _Run(experiment, folder, simulation, folder.rewind(state.round))
        state = run.train(state, on_round, on_message)
        summary = run.summary(state)
        weights, buffers = simulation.federation.final(state)
        folder.finish(summary, {**weights, **buffers})
    return summary


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
        simulation: trains the rounds.
        records: the records so far; rounds are appended.
    """

    experiment: Experiment
    folder: RunFolder
    simulation: Runner
    records: list[RoundRecord]

    def train(self, state: RunState, on_round: OnRound | None, on_message: OnMessage | None) -> RunState:
        """Train the rounds that are left, record each, save some."""
        experiment, written = self.experiment, None
        for record in self.records if on_round else ():
            on_round(record)  # type: ignore[misc]
        stop = Stop(experiment.rounds, experiment.eval.target_accuracy)
        checkpoints = Checkpoints(experiment.checkpoint.every, self.folder.save)
        try:
            state = self._with_backend(state)
            loop = rounds(
                self.simulation, state, stop, records=self.records, checkpoints=checkpoints, on_message=on_message
            )
            for state, record in loop:
                self.folder.record(record)
                self.records.append(record)
                if written != (written := (state.backend, state.backend_reason)):
                    self._write_environment(state)
                if on_round:
                    on_round(record)
        except Diverged as error:
            verdict = Verdict("diverged", state.round + 1, str(error))
            self.folder.record_diverged(str(error), self.summary(state) | summary_of(verdict))
            raise
        return state

    def summary(self, state: RunState) -> Summary:
        """The totals of the rounds so far."""
        return summary_of_experiment(self.experiment, self.simulation, state, self.records)

    def _with_backend(self, state: RunState) -> RunState:
        """The state with a backend; before round 1 it is chosen and written to disk.

        A run that is resumed before its first checkpoint uses the backend that was chosen then.
        """
        if state.round:
            return state
        if chosen := self.folder.training():
            return state._replace(**chosen._asdict())
        state = self.simulation.choose_backend(state)
        self.folder.keep_training(Training.of(state))
        return state

    def _write_environment(self, state: RunState) -> None:
        """Write the machine and how clients are trained on it."""
        engine, chance = self.experiment.engine, chance_of(self.simulation)
        self.folder.write_environment(
            {
                "device": engine.device,
                "precision": engine.precision,
                "clients_trained_by": state.backend,
                "because": state.backend_reason,
                "note": self.simulation.job.task.note,
                "convolutions": self.simulation.convolutions(state),
                "clients_at_a_time": str(state.chunk or engine.chunk or "all"),
                "onednn": "by machine" if state.onednn is None else str(state.onednn).lower(),
                "chance": chance._asdict() if chance else None,
            }
        )
