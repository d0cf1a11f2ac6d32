"""What a server does about uploads that are wrong: bounds, refusals, going back, and records of every client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from thinwire.core.secret_key import SecretKey
from thinwire.core.tree import restrict, to_device
from thinwire.errors import Diverged, Unfit
from thinwire.flower.client_store import Response
from thinwire.flower.recent import after_round, median_loss, training_loss
from thinwire.flower.site_stats import Outcome, Traffic, site_records
from thinwire.flower.transport import Transport
from thinwire.protocol.recent import Recent
from thinwire.protocol.server import ClosedRound, Terms, close_on
from thinwire.protocol.state import ServerState
from thinwire.protocol.upload import Upload
from thinwire.runtime.federation import Federation
from thinwire.runtime.job import RunState
from thinwire.runtime.site_record import SiteRecord
from thinwire.schedules.base import Plan

OnSites = Callable[[Sequence[SiteRecord]], None]


class Gathered(Protocol):
    """What a round has received: its clients' responses, their uploads, who was refused and why, bytes and seconds."""

    responses: dict[int, Response]
    uploads: dict[int, Upload]
    refused: dict[int, str]
    logged: set[int]  # refused clients that the log has named
    traffic: Traffic
    bytes_up: int
    bytes_down: int
    bytes_catchup: int
    late: set[int]  # clients that the round did not wait for


class Guard:
    """Closes the rounds of a server, and tells which clients were scaled down or refused.

    Args:
        federation: the job on the device of the server.
        transport: has the names of clients.
        log: receives a line for everything that was refused.
        on_sites: receives the records of all clients of a round.
        goes_back: whether a state that is not fit ends the round with `Unfit`, so that the run goes back.
    """

    def __init__(
        self,
        federation: Federation,
        transport: Transport,
        log: Callable[[str], None],
        on_sites: OnSites = lambda records: None,
        goes_back: bool = False,
    ) -> None:
        self.federation, self.contract, self.method = federation, federation.contract, federation.job.method
        self.transport, self.log, self.on_sites, self.goes_back = transport, log, on_sites, goes_back
        self.left_out: Mapping[int, int] = {}  # clients, and the last round without them
        self.attempt = 0  # how often the run went back

    def out(self, number: int) -> frozenset[int]:
        """The clients that are left out of a round."""
        return frozenset(i for i, until in self.left_out.items() if number <= until)

    def close(self, state: RunState, plan: Plan, got: Gathered, cohort: tuple[int, ...]) -> ClosedRound:
        """The closed round; clients that it refuses are removed from what was received."""
        number, server = state.round + 1, state.server
        if state.recent.loss_is_unfit(loss := median_loss([got.responses[i] for i in got.uploads])):
            self._go_back(state, got, f"the median loss is {loss:.3g}, far above that of the latest rounds")
        try:
            noise = SecretKey.draw()  # noise from the seed, which clients know, would hide nothing from them
            terms = Terms(len(self.federation.job.task.clients), noise, state.recent.sizes(self._lr(server)))
            closed = close_on(self.contract, server, plan, got.uploads, terms)
        except Unfit as error:
            self.refuse(number, got, error.far)
            self._write_sites(state, cohort, got)
            raise Unfit(f"round {number}: {error}", error.far, _sent(got), state.round) from error
        except Diverged as error:
            self._go_back(state, got, str(error))
            raise Diverged(f"round {number}: {error}") from error
        self.refuse(number, got, closed.refused)
        return closed

    def refuse(self, number: int, got: Gathered, refused: Mapping[int, str] = {}) -> None:
        """Remove uploads; each refused client is named once in the log of a round."""
        for i, why in refused.items():
            got.refused[i] = why
            got.uploads.pop(i, None)
        for i, why in got.refused.items():
            if i not in got.logged:
                self.log(f"round {number}: refused {self.transport.name(i)}: {why}")
        got.logged |= got.refused.keys()

    def recent(self, state: RunState, got: Gathered, closed: ClosedRound) -> Recent:
        """What is remembered of the latest rounds after this one."""
        return after_round(state.recent, closed, _counted(got), self._lr(state.server))

    def record(self, state: RunState, got: Gathered, closed: ClosedRound, cohort: tuple[int, ...]) -> tuple[float, int]:
        """The training loss of a closed round, and the number of clients scaled down; writes log and records."""
        number, counted = state.round + 1, _counted(got)
        loss, odd = training_loss(counted, self.method.norm_bound, state.recent)
        bounded = {i: why for i, why in {**odd, **closed.bounded}.items() if i in counted}
        for i, why in bounded.items():
            self.log(f"round {number}: bounded {self.transport.name(i)}: {why}")
        self._write_sites(state, cohort, got, bounded, closed.norms)
        return loss, len(bounded)

    def _go_back(self, state: RunState, got: Gathered, why: str) -> None:
        """Raise `Unfit` if clients were far off in the round that made this state."""
        names = " and ".join(map(self.transport.name, state.recent.far))
        if not self.goes_back or not names or self.method.privacy.active:  # abandoned rounds spend privacy, too
            return
        line = f"round {state.round + 1}: {why}, and {names} was far off in round {state.round}"
        self.log(f"{line}; the run goes back to round {state.round - 1} without")
        far = dict.fromkeys(state.recent.far, f"far off in round {state.round}")
        raise Unfit(line, far, _sent(got), state.round - 1)

    def _lr(self, server: ServerState) -> float:
        """The learning rate of the clients."""
        return self.contract.at(server.public.version).client_opt(server.public.version).lr

    def _write_sites(
        self,
        state: RunState,
        cohort: tuple[int, ...],
        got: Gathered,
        bounded: Mapping[int, str] = {},
        norms: Mapping[int, float] = {},
    ) -> None:
        """Pass on the records of all clients of the cohort."""
        hidden = self.method.secure_aggregation  # the server has no update of a single client
        updates, start = {} if hidden else {i: one.code for i, one in got.uploads.items()}, dict[str, Tensor]()
        if updates and self.method.upload == "weights":
            start = to_device(restrict(state.server.public.coords, next(iter(updates.values())).keys()), "cpu")
        outcome = Outcome(_counted(got), bounded, got.refused, norms, updates, start, frozenset(got.late))
        records = site_records(state.round + 1, cohort, self.transport.name, outcome, got.traffic)
        self.on_sites([one._replace(attempt=self.attempt) for one in records])


def _counted(got: Gathered) -> dict[int, Response]:
    """The responses that are used."""
    return {i: got.responses[i] for i in got.uploads}


def _sent(got: Gathered) -> tuple[int, int, int]:
    """Bytes of the round: up, down, and for catching up."""
    return got.bytes_up, got.bytes_down, got.bytes_catchup
