"""Run an experiment into its directory: from the start, or from where it was killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.core.spec import Spec
from thinwire.core.tree import to_device
from thinwire.errors import CheckpointError, Diverged
from thinwire.experiments.build import build_job
from thinwire.experiments.chance import chance_of
from thinwire.experiments.collapse import Course, Verdict, judge, news, summary_of
from thinwire.experiments.config import Experiment
from thinwire.experiments.layers import layers_of
from thinwire.experiments.link_time import seconds_by_link
from thinwire.experiments.records import Accounting, byte_totals, totals
from thinwire.experiments.run_directory import RunFolder, Summary, Training
from thinwire.masks import NoMask, dead_adapters
from thinwire.protocol.fields import as_received
from thinwire.protocol.sync_counts import SyncCounts
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.simulation.simulation import OnMessage, Simulation

OnRound = Callable[[RoundRecord], None]


def default_folder(experiment: Experiment, parent: Path = Path("runs")) -> Path:
    """Where a run goes if nobody says otherwise: named after method, task, seed and the whole configuration."""
    return parent / f"{experiment.name}-{experiment.task.kind}-s{experiment.seed}-{experiment.digest()[:6]}"


def execute(
    experiment: Experiment,
    path: Path,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    again: bool = False,
    on_round: OnRound | None = None,
    prepare: Callable[[], Simulation] | None = None,
    on_message: OnMessage | None = None,
) -> Summary:
    """Run an experiment and return its totals. Nothing is written before the experiment is known to be sound.

    Args:
        experiment: what to run.
        path: the run directory.
        data_dir: the folder of data sets.
        resume: go on from the newest checkpoint, if there is one; a run that diverged is not run again.
        again: run anew although the directory holds this very run.
        on_round: is called after every round.
        prepare: makes what runs the rounds, if not the experiment's own engine.
        on_message: is shown every message, as it would travel.
    """
    folder = RunFolder(path, experiment)
    if folder.exists and not again:
        if done := folder.summary():
            folder.verify()
            refuse_diverged(done)
            return {
                **done,
                **byte_totals(done["bytes_up"], done["bytes_down"], done["bytes_catchup"], experiment.accounting),
            }
        if not resume:
            raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` goes on with it")
    simulation = prepare() if prepare else experiment.engine.prepare(build_job(experiment, data_dir))
    with folder.locked():
        if again:
            folder.clear()
        folder.create()
        state = _begin(folder, simulation, resume)
        records = folder.rewind(state.round)
        state, records = _rounds(experiment, folder, simulation, state, records, on_round, on_message)
        summary = _summary(experiment, simulation, state, records)
        public = state.server.public
        folder.finish(summary, {**simulation.weights(public), **public.buffers})
    return summary


def _begin(folder: RunFolder, simulation: Simulation, resume: bool) -> RunState:
    """The newest checkpoint, if the run goes on, or the state before round 1."""
    state = folder.load(simulation.engine.device) if resume else None
    if state is None:
        return simulation.start()
    check_blocks(simulation, state)
    return state


def _settled(folder: RunFolder, simulation: Simulation, state: RunState) -> RunState:
    """The state with a way to train; before round 1 it is chosen and written to disk.

    A run that is resumed before its first checkpoint trains as it was chosen then, whatever would be chosen now.
    """
    if state.round:
        return state
    if chosen := folder.training():
        return state._replace(**chosen._asdict())
    state = simulation.settled(state)
    folder.keep_training(Training.of(state))
    return state


def check_blocks(simulation: Simulation, state: RunState) -> None:
    """Refuse a checkpoint whose blocks are not those of this model and method."""
    public, contract = state.server.public, simulation.contract.at(state.server.public.version)
    wanted = (Spec.of(simulation.public.base), contract.coords, contract.shared, contract.buffers)
    for tree, spec in zip(public[1:], wanted, strict=True):
        if Spec.of(tree) != spec:
            raise CheckpointError(
                f"the checkpoint of round {state.round} holds other blocks than this model and method; remove it"
            )


def _rounds(
    experiment: Experiment,
    folder: RunFolder,
    simulation: Simulation,
    state: RunState,
    records: list[RoundRecord],
    on_round: OnRound | None,
    on_message: OnMessage | None,
) -> tuple[RunState, list[RoundRecord]]:
    """The rounds that are left, each recorded, some of them saved."""
    told, chance = None, chance_of(simulation)
    course = Course(chance).along(record._asdict() for record in records)
    for record in records if on_round else ():
        on_round(record)  # type: ignore[misc]
    while state.round < experiment.rounds and not _there(experiment, records):
        try:
            state = _settled(folder, simulation, state)
            way = Training.of(state)
            state, record = simulation.round(state, on_message)
        except KeyboardInterrupt:
            folder.save(state)  # the round under way is lost, the ones before it are not
            raise
        except Diverged as error:
            total = _summary(experiment, simulation, state, records)
            folder.broke_down(str(error), total | summary_of(Verdict("diverged", state.round + 1, str(error))))
            raise
        before, course = course, course.after(record._asdict())
        record = record._replace(alarm=news(before, course))
        folder.record(record)
        records.append(record)
        if told != (told := (state.backend, state.backend_reason)):
            facts = {
                "clients_trained_by": state.backend,
                "because": state.backend_reason,
                "note": simulation.job.task.note,
            }
            engine = {"device": experiment.engine.device, "precision": experiment.engine.precision}
            chunk = state.chunk or experiment.engine.chunk
            facts |= {"convolutions": simulation.convolutions(state), "clients_at_a_time": str(chunk or "all")}
            facts |= {"onednn": "by machine" if state.onednn is None else str(state.onednn).lower()}
            folder.write_environment({**engine, **facts, "chance": chance._asdict() if chance else None})
        if on_round:
            on_round(record)
        last = state.round == experiment.rounds or _there(experiment, records)
        # in another way, such as fewer clients at a time, rounds before it must not be trained again
        if last or Training.of(state) != way or state.round % experiment.checkpoint.every == 0:
            folder.save(state)
    return state, records


def refuse_diverged(summary: Summary) -> None:
    """Raise what a run raised that is known to have diverged: it would do so again."""
    if summary.get("status") == "diverged":
        raise Diverged(f"{summary['status_why']} (this was found before; --again runs it once more)")


def _summary(
    experiment: Experiment, simulation: Simulation, state: RunState, records: Sequence[RoundRecord]
) -> Summary:
    """The totals of the rounds that are done."""
    totals = summarise(
        experiment.name, experiment.task.kind, simulation, records, state.sync_counts, experiment.accounting
    )
    dead = _dead_adapters(simulation, state)
    return {**totals, **({"dead_adapters": list(dead)} if dead else {})}


def _dead_adapters(simulation: Simulation, state: RunState) -> tuple[str, ...]:
    """The weights whose adapter the mask has left without A or B, so that it can never change."""
    contract = simulation.contract.at(state.server.public.version)
    if isinstance(contract.method.mask, NoMask):
        return ()
    heard = as_received(contract, state.server.public, contract.method.down)
    return dead_adapters(to_device(heard.coords, "cpu"), contract.trained(heard))


def _there(experiment: Experiment, records: list[RoundRecord]) -> bool:
    """Whether the last round reached the accuracy at which the run may end."""
    goal, last = experiment.eval.target_accuracy, records[-1].accuracy if records else None
    return goal < 1 and last is not None and last >= goal


def _privacy(simulation: Simulation, rounds: int) -> Summary:
    """What differential privacy cost, for methods that have it."""
    told = simulation.spent(rounds) if rounds else None
    if told is None:
        return {}
    epsilon, why = told
    delta = getattr(simulation.job.method.privacy, "delta", None)
    return {"epsilon": epsilon, "delta": delta, **({"epsilon_unknown": why} if why else {})}


def summarise(
    name: str,
    task: str,
    simulation: Simulation,
    records: Sequence[RoundRecord],
    sync_counts: SyncCounts,
    accounting: Accounting = "honest",
) -> Summary:
    """The totals of a run."""
    lines = [record._asdict() for record in records]
    chance = chance_of(simulation)
    spoken = {block.name: block for stage in simulation.contract.stages for block in stage.coords}
    return {
        "method": name,
        "task": task,
        "seed": simulation.job.seed,
        "rounds": len(records),
        **summary_of(judge(lines, chance), chance),
        "parameters": simulation.model.parameters(),
        "trainable": Spec.of(simulation.public.coords).size,
        **totals(lines, accounting),
        **_privacy(simulation, len(records)),
        "seconds_by_link": seconds_by_link(lines),
        "layers": layers_of(Spec(tuple(spoken.values())), sync_counts),
    }
