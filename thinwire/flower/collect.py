"""Collect the uploads of a round: ask its cohort, wait for enough, and close without those that are late.

while fewer than `quorum` have sent an upload that can be used, at most `tries` times:
    the cohort, from the clients that are there      `cohorts.py`; others in place of those that did not respond
    send the requests, and read what arrives         until all responded, `seconds` end, `grace` seconds after the
                                                     quorum, or when as many responded as the cohort has places
    send the whole state to clients that request it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.tree import Tree
from thinwire.errors import Diverged, WireError
from thinwire.flower.client_store import Request, Response
from thinwire.flower.cohorts import CohortSampler, Turn
from thinwire.flower.deadline import Deadline
from thinwire.protocol.contract import Contract
from thinwire.protocol.server import open_round, split_download
from thinwire.protocol.state import ServerState
from thinwire.protocol.upload import Upload, trained_by_tier
from thinwire.runtime.job import RunState
from thinwire.schedules.base import Plan


class OpenRound(NamedTuple):
    """A round that is open."""

    number: int
    server: ServerState
    plan: Plan
    trained: Mapping[int, Tree] = {}  # the values that clients of each tier train


@dataclass
class Collected:
    """What one round has received so far."""

    size: int  # the number of uploads that the round is for
    responses: dict[int, Response] = field(default_factory=dict)
    uploads: dict[int, Upload] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    cohort: tuple[int, ...] = ()
    requests: dict[int, Request] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # clients that the round did not wait for
    logged: set[int] = field(default_factory=set)  # refused clients that are in the log
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_catchup: int = 0
    drifted: int = 0


class Collector:
    """Collects the uploads of rounds.

    Args:
        contract: the contract.
        cohorts: takes the cohort of a round; has the transport, the policy, the log and the clock.
        read: decodes the upload of a response, or returns the whole state that a lost client needs; raises if the
            response is refused.
    """

    def __init__(
        self,
        contract: Contract,
        cohorts: CohortSampler,
        read: Callable[[OpenRound, int, Response], Upload | bytes],
    ) -> None:
        self.contract, self.cohorts, self.read = contract, cohorts, read
        self.transport, self.policy, self.log, self.clock = (
            cohorts.transport,
            cohorts.policy,
            cohorts.log,
            cohorts.clock,
        )

    def collect(self, state: RunState, opened: OpenRound, turn: Turn) -> Collected:
        """Ask the cohort, and while there are too few uploads clients that did not respond, and others besides.

        Args:
            state: the state before the round.
            opened: the round.
            turn: how its cohort is taken.
        """
        number, got, needed = opened.number, Collected(turn.size), self.policy.needed(turn.size)
        for attempt in range(self.policy.tries):
            got.cohort = (
                self.cohorts.again(turn, got.cohort, got.uploads.keys()) if attempt else self.cohorts.draw(turn)
            )
            opened = opened._replace(trained=trained_by_tier(self.contract, opened.server.public, got.cohort))
            self._ask(got, opened, self.requests(state, got), needed)
            self._log_refused(number, got)
            if len(got.uploads) >= needed:
                got.late -= got.uploads.keys() | got.refused.keys()
                if got.late:
                    late = ", ".join(map(self.transport.name, sorted(got.late)))
                    self.log(
                        f"round {number}: closed with {len(got.uploads)} of {len(got.cohort)} clients; late: {late}"
                    )
                return got
            self.log(f"round {number}: {len(got.uploads)} of {len(got.cohort)} clients responded, {needed} are needed")
        raise WireError(
            f"round {number}: {len(got.uploads)} of {len(got.cohort)} clients sent an upload that can be used, "
            f"{needed} are needed; `thinwire resume` continues when they are back"
        )

    def requests(self, state: RunState, got: Collected) -> dict[int, Request]:
        """The requests to the clients of a cohort that are there and have not sent an upload that can be used."""
        new = [i for i in got.cohort if i not in got.requests]
        accepted = {i: state.clients[i].version if i in state.clients else -1 for i in new}
        down = open_round(self.contract, state.server, {i: max(0, version) for i, version in accepted.items()})
        repeated = {i: request for i, request in got.requests.items() if i in self.cohorts.here - got.uploads.keys()}
        got.requests |= {i: Request(down[i], accepted[i]) for i in new}
        asked = {i: got.requests[i] for i in got.cohort if i in repeated or i in new}
        ordinary, more = split_download(self.contract, state.server, {i: one.data for i, one in asked.items()})
        again, _ = split_download(self.contract, state.server, {i: one.data for i, one in repeated.items()})
        got.bytes_down += ordinary - again  # a repeated message counts as catching up
        got.bytes_catchup += more + again
        return asked

    def _ask(self, got: Collected, opened: OpenRound, asked: Mapping[int, Request], needed: int) -> None:
        """Collect the responses to requests; clients that request the whole state are sent it, while there is time."""
        busy, deadline = (Deadline(self.policy.seconds, self.clock) for _ in range(2))
        lost = self._exchange(got, opened, asked, deadline)
        if len(got.uploads) < needed or self.policy.grace is None:
            deadline = Deadline(self.policy.seconds, self.clock)
        got.drifted += len(lost)
        if lost and deadline.left():
            got.bytes_catchup += sum(len(request.data) for request in lost.values())
            self._exchange(got, opened, lost, deadline)
        self.cohorts.late(got.late - got.uploads.keys(), busy)

    def _exchange(
        self, got: Collected, opened: OpenRound, asked: Mapping[int, Request], deadline: Deadline
    ) -> dict[int, Request]:
        """Collect the uploads that can be used; returns what clients need that requested the whole state."""
        lost: dict[int, Request] = {}
        needed, enough = self.policy.needed(got.size), False
        for client, response in self.transport.exchange(asked, deadline) if asked else ():
            got.bytes_up += len(response.data)
            self.cohorts.responded(client)
            if client not in got.requests:
                self._late(opened.number, client)
            if client not in got.requests or client in got.uploads or client in lost:
                continue
            try:
                result = self.read(opened, client, response)
            except (WireError, Diverged) as error:
                got.refused[client] = str(error)
                continue
            if isinstance(result, bytes):
                lost[client] = Request(result, got.requests[client].accepted)
                continue
            got.uploads[client], got.responses[client] = result, response
            if self.policy.grace is not None and len(got.uploads) >= needed:
                deadline.at_most(self.policy.grace)
                enough = True
            if len(got.uploads) >= got.size and not asked.keys() <= got.uploads.keys() | lost.keys():
                deadline.at_most(0.0)
                enough = True
                break
        if enough and not deadline.left():
            got.late |= asked.keys() - got.uploads.keys() - lost.keys() - got.refused.keys()
        return lost

    def _late(self, number: int, client: int) -> None:
        """Handle an upload to a round that is closed: it is not used, which the next request tells its client.

        A server that aggregates by version, as FedBuff does, would use it here.
        """
        self.log(f"round {number}: {self.transport.name(client)} responded to a round that is closed; it is not used")

    def _log_refused(self, number: int, got: Collected) -> None:
        """Log each refused client once."""
        for i in got.refused.keys() - got.logged:
            self.log(f"round {number}: refused {self.transport.name(i)}: {got.refused[i]}")
        got.logged |= got.refused.keys()
