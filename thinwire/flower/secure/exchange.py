"""Messages of one phase of secure aggregation: ask, wait, check, and ask again while there are too few answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from thinwire.core.text import visible
from thinwire.errors import Diverged, WireError
from thinwire.flower.client_store import Request, Response
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.secure import frames
from thinwire.flower.secure.client import AlreadyAnswered
from thinwire.flower.secure.frames import Head
from thinwire.flower.transport import Transport
from thinwire.protocol.contract import Contract
from thinwire.protocol.upload import Upload
from thinwire.schedules.base import Plan

_Answer = TypeVar("_Answer")


class NeedsState(Exception):
    """A client requested the whole state; the request to send it."""

    def __init__(self, frame: bytes) -> None:
        super().__init__("a client requested the whole state")
        self.frame = frame


class Collected(Protocol):
    """What a round has received so far; the server has it."""

    responses: dict[int, Response]
    uploads: dict[int, Upload]
    refused: dict[int, str]
    logged: set[int]  # refused clients that the log has named
    bytes_up: int
    bytes_down: int
    bytes_catchup: int
    drifted: int


class Opened(NamedTuple):
    """A round that is open, and what the server needs to exchange messages in it."""

    number: int
    version: int
    contract: Contract  # at this version
    plan: Plan
    clients: int  # number of clients of the job
    cohort: int  # number of them in a round
    run: str  # the name of the run
    full_state: Callable[[bytes, int], bytes]  # the whole state, for a client that requested it
    available: Callable[[Set[int], int], Set[int]]  # waits for so many of these clients
    split: Callable[[Mapping[int, bytes]], tuple[int, int]]  # bytes of downloads: ordinary, and catching up


@dataclass
class PhaseExchange:
    """Exchanges the messages of the phases of one round.

    Args:
        opened: the round.
        transport: brings requests to clients and their responses back.
        policy: how long to wait, and how often to ask again.
        log: receives a line for everything that was refused.
        got: receives the counts of bytes, and who was refused.
        accepted: the version of each client's last accepted upload.
    """

    opened: Opened
    transport: Transport
    policy: RoundPolicy
    log: Callable[[str], None]
    got: Collected
    accepted: Mapping[int, int]
    answered: set[int] = field(default_factory=set)  # clients that have answered this version in another session
    _logged: set[tuple[int, str]] = field(default_factory=set)

    def ask(
        self,
        phase: str,
        requests: dict[int, bytes],
        read: Callable[[int, Response], _Answer],
        least: int,
        downloads: Mapping[int, bytes] | None = None,
    ) -> dict[int, _Answer]:
        """The answers of a phase; clients that did not answer are asked again while there are too few.

        Args:
            phase: the phase.
            requests: one for each client.
            read: returns what an answer says; raises if it is refused.
            least: how many answers are needed.
            downloads: the parts of the requests that are downloads; some of these are catching up.
        """
        answers: dict[int, _Answer] = {}
        for attempt in range(self.policy.tries):
            missing = requests.keys() - answers.keys() - self.answered
            asked = sorted(self.opened.available(missing, least - len(answers))) if missing else []
            sent = sum(len(requests[client]) for client in asked)
            more = self.opened.split({client: downloads[client] for client in asked})[1] if downloads else 0
            more = sent if attempt else more  # a repeated message counts as catching up
            self.got.bytes_down, self.got.bytes_catchup = (
                self.got.bytes_down + sent - more,
                self.got.bytes_catchup + more,
            )
            again = self._exchange(phase, {client: requests[client] for client in asked}, read, answers)
            self.got.bytes_catchup += sum(len(data) for data in again.values())
            self._exchange(phase, again, read, answers)
            if len(answers) >= least:
                break
        return answers

    def _exchange(
        self,
        phase: str,
        requests: Mapping[int, bytes],
        read: Callable[[int, Response], _Answer],
        answers: dict[int, _Answer],
    ) -> dict[int, bytes]:
        """Exchange messages once; returns what clients need that requested the whole state."""
        again: dict[int, bytes] = {}
        if not requests:
            return again
        sent = {client: Request(data, self.accepted[client], phase) for client, data in requests.items()}
        for client, response in self.transport.exchange(sent, self.policy.seconds):
            self.got.bytes_up += len(response.data)
            if client not in sent or client in answers or client in again or frames.is_late(response.data, phase):
                continue
            try:
                if response.error:
                    raise WireError(f"it could not respond: {visible(response.error, 300)}")
                answers[client] = read(client, response)
            except NeedsState as lost:
                again[client] = lost.frame
            except (WireError, Diverged) as error:
                if response.error.startswith(AlreadyAnswered.__name__):
                    self.answered.add(client)
                self._refuse(client, phase, str(error))
        return again

    def _refuse(self, client: int, phase: str, why: str) -> None:
        """Count a client as refused, and log each reason once."""
        self.got.refused[client] = why
        if (client, why) not in self._logged:
            self._logged.add((client, why))
            self.got.logged.add(client)
            name = self.transport.name(client)
            self.log(f"round {self.opened.number}: refused {name} in phase {phase or 'upload'!r}: {why}")

    def reader(self, head: Head, phase: str, response: Response) -> frames.Reader:
        """A reader of an answer of this session."""
        found, reader = frames.read_head(response.data, phase, self.opened.clients)
        if found != head:
            raise WireError("it answered in another session")
        return reader
