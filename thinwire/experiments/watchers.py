"""What a caller hands to a run: functions that see every record, and one that may end it.

After every round, in this order: the record is written to `metrics.jsonl`, `on_round` is called, the callbacks in the
order given, then the stop function; last, a checkpoint is written if one is due. A run that continues shows the records
of its earlier rounds first, so that a log or a plot is complete.

A callback is a function of the record, or an object with `on_round(record)` and, if it likes, `on_end(records)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import RoundRecord
from thinwire.training.autotune import first_line

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
