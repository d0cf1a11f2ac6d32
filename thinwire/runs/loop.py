"""The round loop: one generator for simulations and the Flower server app.

    for state, record in rounds(simulation, simulation.start(), Stop(rounds=10)):
        ...

It yields after every round. The loop adds the change of status to the record (`alarm`, see `collapse.py`), ends early
where `Stop` says so, and saves checkpoints: both after the caller has handled the record. `retry.py` goes back to a
healthy state when the loop raises `Diverged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from thinwire.errors import Diverged
from thinwire.federation.federation import Federation, OnMessage
from thinwire.federation.job import RoundRecord, RunState
from thinwire.runs.best import Lead, selected_by
from thinwire.runs.collapse import Course, Verdict, chance_of, news
from thinwire.schedules.base import LayerFacts
from thinwire.training.inputs import Backend


class Training(NamedTuple):
    """How clients are trained: the fields of `RunState` that may change rounding, and the reason for the backend."""

    backend: Backend
    backend_reason: str
    chunk: int
    onednn: bool | None

    @classmethod
    def of(cls, state: RunState) -> Training:
        """These fields of a state."""
        return cls(state.backend, state.backend_reason, state.chunk, state.onednn)


OnRound = Callable[[RoundRecord], Any]
EndedBy = Literal["rounds", "target accuracy", "patience", "stop function", "divergence"]


class Stop(NamedTuple):
    """When a run ends.

    Args:
        rounds: after this round.
        target_accuracy: after a round that reaches this accuracy on the test set; 1 for never.
        patience: after so many evaluations without a new best one (`best.py`); 0 for never.
        when: after a record for which this function is true.

    >>> from thinwire.metrics.objective import Objective
    >>> record = RoundRecord(1, 0.5, 0.9, 0.4, 0, 0, 0, 1, 0.1)
    >>> Stop(5).ended_by([record], Lead(Objective())), Stop(5, 0.8).ended_by([record], Lead(Objective()))
    (None, 'target accuracy')
    """

    rounds: int
    target_accuracy: float = 1.0
    patience: int = 0
    when: OnRound | None = None

    def ended_by(self, records: Sequence[RoundRecord], lead: Lead) -> EndedBy | None:
        """Why a run with these records ends; None if it goes on."""
        if not records:
            return None
        last = records[-1]
        if last.round >= self.rounds:
            return "rounds"
        if self.target_accuracy < 1 and last.accuracy is not None and last.accuracy >= self.target_accuracy:
            return "target accuracy"
        if 0 < self.patience <= lead.since:
            return "patience"
        return "stop function" if self.when and self.when(last) else None


class Checkpoints(NamedTuple):
    """How checkpoints are saved.

    Args:
        every: rounds between two of them; the last round is always saved.
        save: writes one.
    """

    every: int
    save: Callable[[RunState], None]


class Collapsed(Diverged):
    """Training failed with finite values: accuracy fell to chance, or the loss is far too high."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.why)
        self.verdict = verdict


def rounds(
    simulation: Federation,
    state: RunState,
    stop: Stop,
    *,
    records: Sequence[RoundRecord] = (),
    checkpoints: Checkpoints | None = None,
    on_message: OnMessage | None = None,
    on_healthy: Callable[[RunState], None] | None = None,
    completed: Callable[[RoundRecord], RoundRecord] = lambda record: record,
) -> Iterator[tuple[RunState, RoundRecord]]:
    """Train the rounds that are left; yields the state and the record after each.

    Args:
        simulation: the job on its device; in a deployment, a `FlowerServer`.
        state: the state to continue from.
        stop: when the run ends.
        records: the records of the rounds before `state`.
        checkpoints: how the state is saved; not at all by default. On Ctrl-C, the state before the round is saved.
        on_message: is called with every message: `on_message(round, "up" or "down", client, message)`.
        on_healthy: is called with every state that an evaluation found healthy, to save it: only these and the last
            state are saved. A run that collapses then raises `Collapsed`, after its record was yielded.
        completed: adds to a record what the loop does not know.
    """
    course = Course(chance_of(simulation)).along(record._asdict() for record in records)
    _check(course, on_healthy is not None)
    history = list(records)
    lead = Lead(selected_by(simulation.job)).along(record._asdict() for record in history)
    ended = stop.ended_by(history, lead)
    while not ended:
        before, old = Training.of(state), state
        try:
            state, record = simulation.round(state, on_message)
        except KeyboardInterrupt:
            if checkpoints and on_healthy is None:
                checkpoints.save(state)  # the current round is lost, the rounds before it are not
            raise
        earlier, course = course, course.after(record._asdict())
        record = completed(record._replace(alarm=news(earlier, course), layers=_measured(simulation, state)))
        history.append(record)
        lead = lead.after(record._asdict())
        yield state, record
        ended = stop.ended_by(history, lead)
        if on_healthy is not None:
            _check(course, True)
            judged = _judged(simulation, old, state, record)
            if judged is not None and course.healthy:
                on_healthy(judged)
        if checkpoints is None:
            continue
        # another way to train, such as fewer clients at a time, must not apply to rounds before it: save at once
        due = Training.of(state) != before or state.round % checkpoints.every == 0
        if ended or (due and on_healthy is None):
            checkpoints.save(state)


def _measured(simulation: Federation, state: RunState) -> LayerFacts:
    """What the schedule measured about layers in the last round."""
    contract = simulation.contract.at(state.server.public.version)
    return contract.method.schedule.measured(state.server.schedule, contract.coords)


def _check(course: Course, wanted: bool) -> None:
    """Raise `Collapsed` if training failed."""
    if wanted and course.too_fast:
        raise Collapsed(course.verdict)


def _judged(simulation: Federation, before: RunState, after: RunState, record: RoundRecord) -> RunState | None:
    """The state that the values of a record are about; None if the round was not evaluated.

    Without examples to evaluate on there is only the training loss, which is that of the state before the round.
    """
    task = simulation.job.task
    if task.test is None and task.client_tests is None:
        return before if before.round else None
    return after if record.test_loss is not None or record.client_accuracy is not None else None
