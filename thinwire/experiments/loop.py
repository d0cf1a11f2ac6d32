"""The round loop: one generator for `tw.simulate`, `thinwire run`, grids, the tuner and the Flower server app.

    for state, record in rounds(simulation, simulation.start(), Stop(rounds=10)):
        ...

It yields after every round. The loop adds the change of status to the record (`alarm`, see `collapse.py`), ends early
at a target accuracy, and saves checkpoints. A checkpoint is saved after the caller has handled the record. `retry.py`
goes back to a healthy state when the loop raises `Diverged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from thinwire.errors import Diverged
from thinwire.experiments.chance import chance_of
from thinwire.experiments.collapse import Course, Verdict, news
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.runtime.runner import Runner
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


class Stop(NamedTuple):
    """When a run ends.

    Args:
        rounds: after this round.
        target_accuracy: after a round that reaches this accuracy on the test set; 1 for never.

    >>> Stop(rounds=5).reached(4, None), Stop(rounds=5).reached(5, None), Stop(5, 0.8).reached(1, 0.9)
    (False, True, True)
    """

    rounds: int
    target_accuracy: float = 1.0

    def reached(self, round_number: int, accuracy: float | None) -> bool:
        """Whether a run ends after this round, given its accuracy if it was evaluated."""
        early = self.target_accuracy < 1 and accuracy is not None and accuracy >= self.target_accuracy
        return round_number >= self.rounds or early


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
    simulation: Runner,
    state: RunState,
    stop: Stop,
    *,
    records: Sequence[RoundRecord] = (),
    checkpoints: Checkpoints | None = None,
    on_message: OnMessage | None = None,
    on_healthy: Callable[[RunState], None] | None = None,
) -> Iterator[tuple[RunState, RoundRecord]]:
    """Train the rounds that are left; yields the state and the record after each.

    Args:
        simulation: the job on its device; in a deployment, a `FlowerServer`.
        state: the state to continue from.
        stop: when the run ends.
        records: the records of the rounds before `state`.
        checkpoints: how the state is saved; not at all by default. On Ctrl-C, the state before the round is saved.
        on_message: is called with every message: `on_message(round, "up" or "down", client, message)`.
        on_healthy: is called with every state that an evaluation found healthy; with it, a run that collapses raises
            `Collapsed`, after its record was yielded.
    """
    course = Course(chance_of(simulation)).along(record._asdict() for record in records)
    _check(course, on_healthy is not None)
    ended = stop.reached(state.round, records[-1].accuracy if records else None)
    while not ended:
        before, old = Training.of(state), state
        try:
            state, record = simulation.round(state, on_message)
        except KeyboardInterrupt:
            if checkpoints:
                checkpoints.save(state)  # the current round is lost, the rounds before it are not
            raise
        earlier, course = course, course.after(record._asdict())
        record = record._replace(alarm=news(earlier, course))
        ended = stop.reached(state.round, record.accuracy)
        yield state, record
        if on_healthy is not None:
            _check(course, True)
            judged = _judged(simulation, old, state, record)
            if judged is not None and course.healthy:
                on_healthy(judged)
        if checkpoints is None:
            continue
        # another way to train, such as fewer clients at a time, must not apply to rounds before it: save at once
        if ended or Training.of(state) != before or state.round % checkpoints.every == 0:
            checkpoints.save(state)


def _check(course: Course, wanted: bool) -> None:
    """Raise `Collapsed` if training failed."""
    if wanted and course.too_fast:
        raise Collapsed(course.verdict)


def _judged(simulation: Runner, before: RunState, after: RunState, record: RoundRecord) -> RunState | None:
    """The state that the values of a record are about; None if the round was not evaluated.

    Without examples to evaluate on there is only the training loss, which is that of the state before the round.
    """
    task = simulation.job.task
    if task.test is None and task.client_tests is None:
        return before if before.round else None
    return after if record.test_loss is not None or record.client_accuracy is not None else None
