"""The one way in which a run is executed: from round 1 or its newest checkpoint, into a directory or in memory.

`execute` (command line, grids, deployments), `tw.simulate` and `tw.run_task` all come here with a `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError, Diverged
from thinwire.experiments.best import BestModel
from thinwire.experiments.chance import chance_of
from thinwire.experiments.loop import Checkpoints, EndedBy, Training
from thinwire.experiments.plan import Plan
from thinwire.experiments.records import rounds_in
from thinwire.experiments.retry import Rescue, Retry, Store
from thinwire.experiments.run_directory import RunFolder, Summary
from thinwire.experiments.samples import make_samples, write_samples
from thinwire.experiments.selection import Lead, selected_by
from thinwire.experiments.summary import diverged_summary, summarize_run
from thinwire.experiments.watchers import CallbackFailed, Watchers
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.runtime.runner import Runner


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
    if folder is None:
        best = _best(plan, simulation, None)
        return _Execution(plan, None, _rescue(plan, simulation, Store()), best, []).run(
            simulation, simulation.start(), watchers
        )
    with folder.locked():
        if again:
            folder.clear()
        folder.create()
        best = _best(plan, simulation, folder)
        rescue = _rescue(plan, simulation, Store(folder, plan.engine.device), str(folder.path))
        simulation = rescue.runner(simulation)
        state = _first_state(folder, simulation, resume)
        records = folder.rewind(state.round)
        if best:
            best.go_back(records)
        return _Execution(plan, folder, rescue, best, records).run(simulation, state, watchers)


def reopen(plan: Plan, folder: RunFolder, summary: Summary) -> Finished:
    """A finished run from the files of its directory; nothing is trained and nothing is written."""
    simulation = plan.prepare()
    store = Store(folder)
    simulation = _rescue(plan, simulation, store).runner(simulation)
    state = folder.load(plan.engine.device)
    if state is None or state.round != summary["rounds"]:
        raise CheckpointError(
            f"{folder.path} lacks the checkpoint of its last round, {summary['rounds']}; "
            f"tw.load_run({str(folder.path)!r}) reads its results"
        )
    check_blocks(simulation, state)
    records, best = folder.history(), _best(plan, simulation, folder)
    if best:
        best.go_back(records)
    return Finished(simulation, state, records, store.retries, summary, best)


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


def _best(plan: Plan, simulation: Runner, folder: RunFolder | None) -> BestModel | None:
    if not plan.checkpoint.best:
        return None
    return BestModel(selected_by(simulation.job), folder.path if folder else None)


def _rescue(plan: Plan, simulation: Runner, store: Store, name: str = "") -> Rescue:
    return Rescue(plan.engine.prepare, simulation.job, store, plan.checkpoint.every, name, plan.retries)


def _first_state(folder: RunFolder, simulation: Runner, resume: bool) -> RunState:
    """The state of the newest checkpoint when resuming, otherwise the state before round 1."""
    state = folder.load(simulation.federation.engine.device) if resume else None
    if state is None:
        return simulation.start()
    check_blocks(simulation, state)
    return state


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
        return Finished(simulation, state, self.records, self.rescue.store.retries, summary, self.best)

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
                self.folder.record_diverged(str(error), found)
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
            points = (self.rescue.store.round,) if self.rescue.active else ()
            self.best.after(self.records, lambda: _merged(final_model(simulation, state)), points)
        self.done = state

    def _save(self, state: RunState) -> None:
        """Write a checkpoint, and before it the best model until then."""
        assert self.folder is not None
        if self.best:
            self.best.write()
        self.folder.save(state)
        if self.best:
            self.best.prune(self.records, rounds_in(self.folder.checkpoints))
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
        summary = summarize_run(*names, simulation, state, self.records, self.rescue.store.retries)
        found = {} if self.best is None or not self.best.lead.round else {"best": _described(self.best)}
        return {**summary, "ended_by": ended_by, **found}

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


def _merged(model: tuple[Tree, Tree]) -> Tree:
    return {**model[0], **model[1]}


def _described(best: BestModel) -> dict[str, Any]:
    """The best round in `summary.json`."""
    return {"round": best.lead.round, "value": best.lead.value, "chosen_by": best.lead.objective.label}
