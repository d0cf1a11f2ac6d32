"""What a server does about uploads that are wrong: bounds, refusals, going back, and records of every client.

    bounds     uploads, losses and numbers of examples are compared with the medians of the latest rounds, too
               (`protocol/norm_bound.py`), so that a cohort of one client, or of mostly malicious ones, is bounded
    far off    the norm of a client's update is above 3 times the median of its round or of the latest rounds
    not fit    the median loss that the next cohort reports is above 3 times the median of the latest rounds, and above
               3 times that of each of the last three

A state that is not fit, after a round with clients far off, is given up: the run goes back to the state before that
round and leaves these clients out (`experiments/retry.py`). Without such clients the run continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from thinwire.core.key import SecretKey
from thinwire.core.text import visible
from thinwire.core.tree import Tree, flatten, norm, restrict, sub, to_device
from thinwire.errors import Diverged, Unfit
from thinwire.flower.collect import Collected, Collector
from thinwire.protocol.norm_bound import WEIGHT_LIMIT, factors, reference
from thinwire.protocol.recent import FAR, Recent
from thinwire.protocol.round import Response
from thinwire.protocol.server import ClosedRound, Terms, close_round
from thinwire.protocol.state import ServerState
from thinwire.runtime.federation import Federation
from thinwire.runtime.job import RunState
from thinwire.runtime.site_record import SiteRecord, Status
from thinwire.schedules.base import Plan
from thinwire.secure.masks import sum_masked

OnSites = Callable[[Sequence[SiteRecord]], None]


class Guard:
    """Closes the rounds of a server, and tells which clients were scaled down or refused.

    Args:
        federation: the job on the device of the server.
        collector: has the transport and the log.
        on_sites: receives the records of all clients of a round.
        goes_back: whether a state that is not fit ends the round with `Unfit`, so that the run goes back.
    """

    def __init__(
        self,
        federation: Federation,
        collector: Collector,
        on_sites: OnSites = lambda records: None,
        goes_back: bool = False,
    ) -> None:
        self.federation, self.contract, self.method = federation, federation.contract, federation.job.method
        self.collector, self.on_sites, self.goes_back = collector, on_sites, goes_back
        self.transport, self.log = collector.transport, collector.log
        self.left_out: Mapping[int, int] = {}  # clients, and the last round without them
        self.attempt = 0  # how often the run went back

    def out(self, number: int) -> frozenset[int]:
        """The clients that are left out of a round."""
        return frozenset(i for i, until in self.left_out.items() if number <= until)

    def close(self, state: RunState, plan: Plan, got: Collected) -> ClosedRound:
        """The closed round; clients that it refuses are removed from what was received."""
        number, server = got.number, state.server
        losses = [abs(one.loss) for one in got.counted.values()]
        if state.recent.loss_is_unfit(loss := reference(losses) if losses else 0.0):
            self._go_back(state, got, f"the median loss is {loss:.3g}, far above that of the latest rounds")
        try:
            noise = SecretKey.draw()  # noise from the seed, which clients know, would hide nothing from them
            recent = state.recent.sizes(self._lr(server))
            terms = Terms(len(self.federation.job.task.clients), noise, recent, sum_masked)
            closed = close_round(self.contract, server, plan, got.uploads, terms)
        except Unfit as error:
            self.collector.refuse(got, error.far)
            self._write_sites(state, got)
            raise Unfit(f"round {number}: {error}", error.far, _sent(got), state.round) from error
        except Diverged as error:
            self._go_back(state, got, str(error))
            raise Diverged(f"round {number}: {error}") from error
        self.collector.refuse(got, closed.refused)
        return closed

    def recent(self, state: RunState, got: Collected, closed: ClosedRound) -> Recent:
        """What is remembered of the latest rounds after this one."""
        recent, lr, counted = state.recent, self._lr(state.server), got.counted
        losses, examples = _reported(counted)
        reported = {"loss": reference(losses, recent.of("loss"))}
        reported |= {"examples": reference(examples, recent.of("examples"))}
        norms = {client: size for client, size in closed.norms.items() if client in counted}
        return recent.after({**closed.medians, **reported}, lr, far_off(norms, recent.sizes(lr).get("code", 0.0)))

    def record(self, state: RunState, got: Collected, closed: ClosedRound) -> tuple[float, int]:
        """The training loss of a closed round, and the number of clients scaled down; writes log and records."""
        counted = got.counted
        loss, odd = training_loss(counted, self.method.norm_bound, state.recent)
        bounded = {i: why for i, why in {**odd, **closed.bounded}.items() if i in counted}
        for i, why in bounded.items():
            self.log(f"round {got.number}: bounded {self.transport.name(i)}: {why}")
        self._write_sites(state, got, bounded, closed.norms)
        return loss, len(bounded)

    def _go_back(self, state: RunState, got: Collected, why: str) -> None:
        """Raise `Unfit` if clients were far off in the round that made this state."""
        names = " and ".join(map(self.transport.name, state.recent.far))
        if not self.goes_back or not names or self.method.privacy.active:  # abandoned rounds spend privacy, too
            return
        line = f"round {got.number}: {why}, and {names} was far off in round {state.round}"
        self.log(f"{line}; the run goes back to round {state.round - 1} without")
        far = dict.fromkeys(state.recent.far, f"far off in round {state.round}")
        raise Unfit(line, far, _sent(got), state.round - 1)

    def _lr(self, server: ServerState) -> float:
        """The learning rate of the clients."""
        return self.contract.at(server.public.version).client_opt(server.public.version).lr

    def _write_sites(
        self, state: RunState, got: Collected, bounded: Mapping[int, str] = {}, norms: Mapping[int, float] = {}
    ) -> None:
        """Pass on the lines of `sites.jsonl`: what each client of the cohort sent, and what became of it."""
        hidden = self.method.secure_aggregation  # the server has no update of a single client
        updates, start = {} if hidden else {i: one.code for i, one in got.uploads.items()}, Tree()
        if updates and self.method.upload == "weights":
            start = to_device(restrict(state.server.public.coords, next(iter(updates.values())).keys()), "cpu")
        lengths, cosines = similarity(updates, start)
        lengths |= norms
        records = []
        for i in got.cohort:
            status, why = _status(i, got, bounded)
            records.append(
                SiteRecord(
                    round=got.number,
                    site=self.transport.name(i),
                    client=i,
                    status=status,
                    norm=_finite(lengths.get(i)),
                    cosine=_finite(cosines.get(i)),
                    loss=_finite(got.responses[i].loss if i in got.uploads else None),
                    seconds=round(got.seconds[i], 3) if i in got.seconds else None,
                    bytes_up=got.up.get(i, 0),
                    bytes_down=got.down.get(i, 0),
                    why=visible(why, 300),
                    attempt=self.attempt,
                )
            )
        self.on_sites(records)


def far_off(norms: Mapping[int, float], recent: float) -> tuple[int, ...]:
    """The clients whose update is far longer than the median of the round, or than that of the latest rounds.

    >>> far_off({0: 1.0, 1: 1.2, 2: 9.0}, recent=0.0), far_off({0: 8.0}, recent=1.0)
    ((2,), (0,))
    """
    if not norms:
        return ()
    middle = reference(list(norms.values()))
    most = FAR * (min(middle, recent) if recent and middle else recent or middle)
    return tuple(client for client, size in sorted(norms.items()) if size > most > 0)


def training_loss(responses: Mapping[int, Response], limit: float, recent: Recent) -> tuple[float, dict[int, str]]:
    """The mean loss over all examples, with both bounded as uploads are; and the clients that were, with reasons.

    Args:
        responses: the responses that were used.
        limit: the largest loss, in units of the median; 0 for no bound.
        recent: the latest rounds.
    """
    losses, examples = _reported(responses)
    by_loss = factors(losses, limit, recent.of("loss")) if limit else [1.0] * len(losses)
    by_count = factors(examples, WEIGHT_LIMIT, recent.of("examples"))
    shares = [count * by for count, by in zip(examples, by_count, strict=True)]
    total = sum(one.loss * by * share for one, by, share in zip(responses.values(), by_loss, shares, strict=True))
    why = {
        client: f"it reports a loss of {one.loss:.3g} over {one.examples:.3g} examples, far above the median"
        for client, one, *by in zip(responses, responses.values(), by_loss, by_count, strict=True)
        if min(by) < 1
    }
    return total / sum(shares), why


def similarity(updates: Mapping[int, Tree], start: Tree) -> tuple[dict[int, float], dict[int, float]]:
    """The norm of each update, and its cosine to the mean, in which no update is longer than the median.

    >>> import torch
    >>> trees = {0: {"w": torch.ones(2)}, 1: {"w": torch.ones(2)}, 2: {"w": -1e6 * torch.ones(2)}}
    >>> similarity(trees, {})[1]
    {0: 1.0, 1: 1.0, 2: -1.0}
    """
    moved = {i: sub(tree, start) if start else tree for i, tree in updates.items() if tree}
    norms = {i: norm(tree) for i, tree in moved.items()}
    if not moved:
        return {}, {}
    longest = reference(list(norms.values()))
    parts = [flatten(tree) * (min(1.0, longest / norms[i]) if norms[i] else 0.0) for i, tree in moved.items()]
    total = sum(parts[1:], parts[0])
    length = float(total.norm())
    cosines = {
        i: round(float(flatten(tree) @ total) / (norms[i] * length), 4) if norms[i] * length else 0.0
        for i, tree in moved.items()
    }
    return norms, cosines


def _status(client: int, got: Collected, bounded: Mapping[int, str]) -> tuple[Status, str]:
    if client in got.uploads:
        return ("bounded", bounded[client]) if client in bounded else ("accepted", "")
    if client in got.refused:
        return "refused", got.refused[client]
    if client in got.late:
        return "late", "the round was closed before it responded"
    return "absent", "no response in time"


def _reported(responses: Mapping[int, Response]) -> tuple[list[float], list[float]]:
    """Losses and numbers of examples."""
    return [abs(one.loss) for one in responses.values()], [float(one.examples) for one in responses.values()]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sent(got: Collected) -> tuple[int, int, int]:
    """Bytes of the round: up, down, and for catching up."""
    return got.bytes_up, got.bytes_down, got.bytes_catchup
