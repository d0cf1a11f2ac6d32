"""The contract of what runs the rounds of a job: a simulation, or the server of a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from thinwire.federation.federation import Federation, OnMessage
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.protocol.contract import Contract


class Runner(Protocol):
    """Runs the rounds of a job. The state goes in and comes out of `round`."""

    federation: Federation
    contract: Contract
    job: Job

    def start(self) -> RunState:
        """The state before the first round."""
        ...

    def choose_backend(self, state: RunState) -> RunState:
        """The state with the training backend chosen; called once, before the first round."""
        ...

    def round(self, state: RunState, on_message: OnMessage | None = None) -> tuple[RunState, RoundRecord]:
        """One round: the state after it, and its record."""
        ...

    def convolutions(self, state: RunState) -> str:
        """How convolutions are computed in training."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A runner whose clients can be left out of cohorts: the server of a deployment."""

    def leave_out(self, until: Mapping[int, int], attempt: int) -> None:
        """Leave clients out.

        Args:
            until: the last round without each of them.
            attempt: how often the run went back so far.
        """
        ...
