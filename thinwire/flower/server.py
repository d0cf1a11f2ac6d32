"""The server's side of a deployment: ask, wait, check, decide. It knows a transport, not what is behind it.

What goes wrong, and what then happens:

    a client is not there, or too late         the round goes on without it, if enough others answered (`quorum`)
    fewer answered                             asked again (they repeat what they said), then the run stops: resume
    a message is damaged, far too long, of     refused and counted; the client stays where it was
      another version or method, or not finite
    a client lies                              bounded by the median of the cohort (`protocol/norm_bound.py`); outvoted, if
                                               the method says so (`aggregators/base.py`)
    an answer comes twice                      the first counts
    a client was away, or lost its state       the shortest way from its version; or the whole state, if it asks
    an answer was lost on its way              the client goes back to where it was before (`client_store.py`)
    the server dies                            it resumes at its checkpoint; clients repeat their last answer
    two servers                                the lock of the run directory keeps the second out
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.key import SecretKey
from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError, Diverged, IncompatibleParts, WireError
from thinwire.flower.client_store import Answer, Ask
from thinwire.flower.transport import Transport
from thinwire.protocol.download import open_round, repair, split_down
from thinwire.protocol.fields import MOST_EXAMPLES, unpack_up
from thinwire.protocol.norm_bound import WEIGHT_LIMIT, factors
from thinwire.protocol.server import closed_round, masks_of
from thinwire.protocol.state import ClientState, Contract, ServerState
from thinwire.runtime.job import Job, RoundRecord, RunState
from thinwire.schedules.base import Plan
from thinwire.simulation.engine import LocalEngine
from thinwire.simulation.simulation import OnMessage, Simulation, show
from thinwire.wire import message as wire

Log = Callable[[str], None]


@dataclass(frozen=True)
class RoundPolicy:
    """How long a server waits, and for how many.

    Args:
        seconds: for the answers of one asking.
        quorum: the share of the cohort that must have answered, from above 0 to 1.
        tries: how often clients that did not answer are asked while there is no quorum.
    """

    seconds: float = 600.0
    quorum: float = 0.5
    tries: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise ConfigError(f"quorum must be above 0 and at most 1, not {self.quorum}")
        if not self.seconds > 0 or self.tries < 1:
            raise ConfigError(f"seconds must be above 0 and tries 1 or more, not {self.seconds} and {self.tries}")

    def enough(self, cohort: int) -> int:
        """How many answers a round needs.

        >>> RoundPolicy(quorum=0.5).enough(5)
        3
        """
        return math.ceil(self.quorum * cohort)


class _Asking(NamedTuple):
    """What a round wants to know, and from which state on."""

    number: int
    server: ServerState
    plan: Plan
    masks: Mapping[int, Tree]  # what clients of each tier train


@dataclass
class _Gathered:
    """What one round has brought so far."""

    accepted: dict[int, Answer] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_catchup: int = 0
    drifted: int = 0


class FlowerServer(Simulation):
    """A job whose clients are elsewhere. `round` is that of the simulation, over a transport.

    Args:
        engine: the device of the server.
        job: what is learnt; of the clients' examples only their number is used.
        connect: gives, for a contract and a number of clients, what brings messages to them.
        patience: how long to wait for whom.
        log: is told, in one line each, what was refused.
    """

    def __init__(
        self,
        engine: LocalEngine,
        job: Job,
        connect: Callable[[Contract, int], Transport],
        patience: RoundPolicy | None = None,
        log: Log = lambda line: None,
    ) -> None:
        super().__init__(engine, job)
        if job.method.secure_aggregation:
            raise IncompatibleParts(
                "secure_aggregation = true needs secrets between clients, and those of a deployment agree on none yet. "
                "Write secure_aggregation = false, or simulate"
            )
        self.transport = connect(self.contract, len(job.task.clients))
        self.patience, self.log = patience or RoundPolicy(), log
        self._met = False  # nobody yet: nodes take a while to arrive

    def start(self) -> RunState:
        """The state before the first round."""
        return super().start()._replace(backend="loop", backend_reason="clients are elsewhere")

    def round(self, state: RunState, on_message: OnMessage | None = None) -> tuple[RunState, RoundRecord]:
        """One round."""
        began = time.perf_counter()
        number = state.round + 1
        server, job = state.server, self.job
        contract = self.contract.at(server.public.version)
        plan, cohort = self._opening(state)
        asking = _Asking(number, server, plan, masks_of(contract, server.public, cohort))
        heard = {i: state.clients[i].version if i in state.clients else -1 for i in cohort}
        down = open_round(contract, server, {i: max(0, version) for i, version in heard.items()})
        got = self._gather(asking, {i: Ask(down[i], heard[i]) for i in cohort})
        up = {i: got.accepted[i].data for i in cohort if i in got.accepted}
        try:
            noise = SecretKey.draw()  # of the seed, which clients know, it would hide nothing from them
            closed = closed_round(self.contract, server, plan, up, len(job.task.clients), noise)
        except Diverged as error:
            raise Diverged(f"round {number}: {error}") from error
        after = closed.server
        for i, why in closed.refused.items():
            self.log(f"round {number}: refused client {i}: {why}")
            got.refused[i] = why
            del up[i]
        loss, odd = _training_loss({i: got.accepted[i] for i in up}, contract.method.norm_bound)
        bounded = {i: why for i, why in {**odd, **closed.bounded}.items() if i in up}
        for i, why in bounded.items():
            self.log(f"round {number}: bounded client {i}: {why}")
        if on_message:
            show(on_message, number, down, up)
        # all that the server knows of a client is from which version it last answered
        clients = {**state.clients, **{i: ClientState(server.public.version) for i in up}}
        test_loss = accuracy = None
        if self._tested(number):
            with self.kernels():
                test_loss, accuracy = self._test(after.public)
        record = RoundRecord(
            number,
            loss,
            accuracy,
            test_loss,
            got.bytes_up,
            got.bytes_down,
            got.bytes_catchup,
            len(up),
            time.perf_counter() - began,
            rate=contract.method.client_opt_at(server.public.version).lr,
            drifted=got.drifted,
            refused=len(got.refused),
            bounded=len(bounded),
            absent=len(cohort) - len(up) - len(got.refused.keys() - up.keys()),
            epsilon=(self.spent(number) or (None,))[0],
        )
        sync_counts = state.sync_counts.add(contract, plan, up)
        return RunState(number, after, clients, cohort, state.backend, state.backend_reason, sync_counts), record

    def _gather(self, asking: _Asking, asks: Mapping[int, Ask]) -> _Gathered:
        """Ask the cohort, and again those that did not answer while they are too few."""
        number, server = asking.number, asking.server
        got, needed = _Gathered(), self.patience.enough(len(asks))
        for attempt in range(self.patience.tries):
            here = self._present(asks.keys(), needed)
            asked = {i: ask for i, ask in asks.items() if i in here and i not in got.accepted}
            sent = {i: ask.data for i, ask in asked.items()}
            ordinary, more = split_down(self.contract, server, sent)
            again = ordinary if attempt else 0  # a message that is sent again is no ordinary one
            got.bytes_down, got.bytes_catchup = got.bytes_down + ordinary - again, got.bytes_catchup + more + again
            lost = self._hear(got, asking, asked)
            if lost:
                got.drifted += len(lost)
                got.bytes_catchup += sum(len(ask.data) for ask in lost.values())
                self._hear(got, asking, lost)
            for i, why in got.refused.items():
                self.log(f"round {number}: refused client {i}: {why}")
            if len(got.accepted) >= needed:
                return got
            self.log(f"round {number}: {len(got.accepted)} of {len(asks)} clients answered, {needed} are needed")
        raise WireError(
            f"round {number}: {len(got.accepted)} of {len(asks)} clients gave an answer that can be used, "
            f"{needed} are needed; `thinwire resume` goes on when they are back"
        )

    def _present(self, cohort: Set[int], needed: int) -> Set[int]:
        """The clients that can be asked. At first a server waits for its whole cohort, later for enough of it."""
        end = time.monotonic() + self.patience.seconds
        wanted = needed if self._met else len(cohort)
        while len(here := cohort & self.transport.clients()) < wanted and time.monotonic() < end:
            time.sleep(min(1.0, self.patience.seconds / 10))
        self._met = True
        return here

    def _hear(self, got: _Gathered, asking: _Asking, asked: Mapping[int, Ask]) -> dict[int, Ask]:
        """Take the answers that can be used; gives what those need that say they are lost."""
        lost: dict[int, Ask] = {}
        if not asked:
            return lost
        for client, answer in self.transport.ask(asked, self.patience.seconds):
            got.bytes_up += len(answer.data)
            if client not in asked or client in got.accepted or client in lost:
                continue
            try:
                need = self._judge(asking, client, answer)
            except (WireError, Diverged) as error:
                got.refused[client] = str(error)
                continue
            if need is None:
                got.accepted[client] = answer
            else:
                lost[client] = Ask(need, asked[client].heard)
        return lost

    def _judge(self, asking: _Asking, client: int, answer: Answer) -> bytes | None:
        """Refuse an answer, or accept it (None), or give the state that a lost client needs."""
        if answer.error:
            raise WireError(f"it could not answer: {visible(answer.error, 300)}")
        version, mask = asking.server.public.version, asking.masks[self.contract.tier(client)]
        contract = self.contract.at(version)
        if wire.unpack(answer.data, contract.schema.sent_by(client), contract.longest_up).kind == wire.LOST:
            return repair(self.contract, asking.server, answer.data, client)
        unpack_up(contract, asking.plan, version, client, answer.data, mask)
        if not (math.isfinite(answer.loss) and 0 < answer.examples <= MOST_EXAMPLES):
            raise Diverged(f"its training loss is {answer.loss} over {answer.examples} examples")
        return None


def _training_loss(answers: Mapping[int, Answer], limit: float) -> tuple[float, dict[int, str]]:
    """The mean loss over all examples, with both bounded as uploads are; and which clients were, and why."""
    losses = [abs(one.loss) for one in answers.values()]
    examples = [float(one.examples) for one in answers.values()]
    by_loss = factors(losses, limit) if limit else [1.0] * len(losses)
    by_count = factors(examples, WEIGHT_LIMIT)
    shares = [count * by for count, by in zip(examples, by_count, strict=True)]
    total = sum(one.loss * by * share for one, by, share in zip(answers.values(), by_loss, shares, strict=True))
    why = {
        client: f"it says that its loss is {one.loss:.3g} over {one.examples:.3g} examples, far beyond the median"
        for client, one, *by in zip(answers, answers.values(), by_loss, by_count, strict=True)
        if min(by) < 1
    }
    return total / sum(shares), why
