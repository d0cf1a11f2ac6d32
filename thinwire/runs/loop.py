"""The round loop: one generator for `tw.simulate`, `thinwire run`, grids, the tuner and the Flower server app.

    for state, record in rounds(simulation, simulation.start(), Stop(rounds=10)):
        ...

It yields after every round. The loop adds the change of status to the record (`alarm`, see `collapse.py`), ends early
where `Stop` says so, and saves checkpoints: both after the caller has handled the record. `retry.py` goes back to a
healthy state when the loop raises `Diverged`.

What a caller hands to a run: functions that see every record, and one that may end it.

After every round, in this order: the record is written to `metrics.jsonl`, `on_round` is called, the callbacks in the
order given, then the stop function; last, a checkpoint is written if one is due. A run that continues shows the records
of its earlier rounds first, so that a log or a plot is complete.

A callback is a function of the record, or an object with `on_round(record)` and, if it likes, `on_end(records)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from thinwire.errors import ConfigError, Diverged
from thinwire.federation.federation import Federation as Runner, OnMessage
from thinwire.federation.job import RoundRecord, RunState
from thinwire.runs.best import Lead, selected_by
from thinwire.runs.collapse import Course, Verdict, chance_of, news
from thinwire.schedules.base import LayerFacts
from thinwire.training.autotune import first_line
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


EndedBy = Literal["rounds", "target accuracy", "patience", "stop function", "divergence"]


class Stop(NamedTuple):
    """When a run ends.

    Args:
        rounds: after this round.
        target_accuracy: after a round that reaches this accuracy on the test set; 1 for never.
        patience: after so many evaluations without a new best one (`best.py`); 0 for never.
        when: after a round for which this function of its record and of all records is true.

    >>> from thinwire.metrics.objective import Objective
    >>> record = RoundRecord(1, 0.5, 0.9, 0.4, 0, 0, 0, 1, 0.1)
    >>> Stop(5).ended_by([record], Lead(Objective())), Stop(5, 0.8).ended_by([record], Lead(Objective()))
    (None, 'target accuracy')
    """

    rounds: int
    target_accuracy: float = 1.0
    patience: int = 0
    when: Callable[[RoundRecord, Sequence[RoundRecord]], bool] | None = None

    def ended_by(self, records: Sequence[RoundRecord], lead: Lead) -> EndedBy | None:
        """Why a run with these records ends; None if it goes on."""
        if by := self.limit(records, lead):
            return by
        return "stop function" if records and self.when and self.when(records[-1], records) else None

    def limit(self, records: Sequence[RoundRecord], lead: Lead) -> EndedBy | None:
        """Why it ends by its own settings, without asking the function."""
        if not records:
            return None
        last = records[-1]
        if last.round >= self.rounds:
            return "rounds"
        if self.target_accuracy < 1 and last.accuracy is not None and last.accuracy >= self.target_accuracy:
            return "target accuracy"
        return "patience" if 0 < self.patience <= lead.since else None


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


def _measured(simulation: Runner, state: RunState) -> LayerFacts:
    """What the schedule measured about layers in the last round."""
    contract = simulation.contract.at(state.server.public.version)
    return contract.method.schedule.measured(state.server.schedule, contract.coords)


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


OnRound = Callable[[RoundRecord], None]
StopFunction = Callable[[RoundRecord, Sequence[RoundRecord]], bool]


class CallbackFailed(ConfigError):
    """A callback or a stop function raised an error; the run can be continued."""


@dataclass(frozen=True, eq=False)
class Watchers:
    """The functions of a caller.

    Args:
        on_round: is called with every record; its errors are raised as they are.
        on_message: is called with every message.
        callbacks: functions and objects; their errors are raised as one line with their name.
        stop: ends the run; see `as_stop`.
        on_continue: is called with the number of rounds that are done, before the others are trained.
    """

    on_round: OnRound | None = None
    on_message: OnMessage | None = None
    callbacks: Sequence[Any] = ()
    stop: StopFunction | None = None
    on_continue: Callable[[int], None] | None = None

    @classmethod
    def of(
        cls,
        on_round: OnRound | None = None,
        on_message: OnMessage | None = None,
        callbacks: Any = (),
        stop: Callable[..., Any] | None = None,
    ) -> Watchers:
        """Check what a caller gave."""
        given = (
            tuple(callbacks) if isinstance(callbacks, Iterable) and not hasattr(callbacks, "on_round") else callbacks
        )
        given = given if isinstance(given, tuple) else (given,)
        for one in given:
            if not callable(getattr(one, "on_round", one)):
                raise ConfigError(
                    f"a callback must be a function of the record or an object with on_round(record), not {one!r}"
                )
        return cls(on_round, on_message, given, None if stop is None else as_stop(stop))

    def show(self, record: RoundRecord) -> None:
        """Call everyone with a record."""
        if self.on_round:
            self.on_round(record)
        for one in self.callbacks:
            _call(f"callback {_name(one)}", record, getattr(one, "on_round", one), record)

    def end(self, records: Sequence[RoundRecord]) -> None:
        """Call `on_end` of the callbacks that have it."""
        for one in self.callbacks:
            if records and callable(ending := getattr(one, "on_end", None)):
                _call(f"callback {_name(one)}", records[-1], ending, records)


def as_stop(function: Callable[..., Any]) -> StopFunction:
    """A stop function of the record, or of the record and all records so far, as one of both.

    >>> record = RoundRecord(3, 0.1, 0.9, 0.2, 10, 10, 0, 2, 0.1)
    >>> as_stop(lambda record: record.loss < 0.2)(record, [record])
    True
    >>> as_stop(lambda record, records: len(records) > 1)(record, [record])
    False
    """
    if not callable(function):
        raise ConfigError(f"stop must be a function of the record, such as lambda r: r.loss < 0.1, not {function!r}")
    try:
        given = inspect.signature(function).parameters.values()
        two = len([p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > 1
    except (TypeError, ValueError):  # written in C
        two = False

    def ask(record: RoundRecord, records: Sequence[RoundRecord]) -> bool:
        return bool(
            _call(f"stop function {_name(function)}", record, function, *((record, records) if two else (record,)))
        )

    return ask


def _call(what: str, record: RoundRecord, function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except Exception as error:
        raise CallbackFailed(
            f"{what} failed after round {record.round}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _name(one: Any) -> str:
    return getattr(one, "__qualname__", None) or type(one).__qualname__
