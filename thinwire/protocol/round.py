"""The round between server and clients, as a simulation and a deployment call it.

    server                                    client
    Round.open                                                   which blocks this round synchronizes
    Round.downloads  ── steps or state ──►    receive            the public state of version v, bit for bit
                                              training_inputs    -> train -> updates
    Round.read       ◄── upload ──────────    make_uploads       correction, codec, masking, packing
    Round.close                               aggregate, server optimizer, broadcast codec, ledger
    advance: public(v) -> public(v + 1)       (the client does the same with its next download)

The server applies the *decoded* broadcast to itself, so that a lossy download codec cannot make it drift from its
clients. All of it is pure: states go in and come out; there are no threads, sockets or clocks here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from thinwire.core.key import Key
from thinwire.core.tree import Tree, restrict, to_device
from thinwire.errors import Diverged, Unfit, WireError
from thinwire.protocol.bounds import Bounded, Known, bound_uploads
from thinwire.protocol.contract import Contract
from thinwire.protocol.download import Downloads
from thinwire.protocol.method import NORM_BOUND
from thinwire.protocol.server import SumMasked, aggregate, next_version
from thinwire.protocol.setup import check_codes, unsent_in_old_basis
from thinwire.protocol.state import ClientState, ServerState, SyncCounts
from thinwire.protocol.upload import Upload, as_received, decode_upload
from thinwire.schedules.base import Plan
from thinwire.training.evaluation import Evaluation
from thinwire.wire.bits import Bytes

EVALUATE = "evaluate"  # phase of a request for an evaluation alone


class Request(NamedTuple):
    """What a server sends to a client: a download, and which of its uploads was last accepted."""

    data: bytes
    accepted: int = -1  # the version that it was trained from; -1 for none
    phase: str = ""  # "" to train and upload, EVALUATE, or a phase of secure aggregation (`secure/frames.py`)


class Response(NamedTuple):
    """What a client in another process sends back: an upload and values for the metrics, an evaluation, or an error."""

    data: bytes
    loss: float = 0.0
    examples: int = 0
    error: str = ""
    evaluation: Evaluation | None = None  # of the received model on the client's validation examples


class Reply(NamedTuple):
    """The upload of a client, not decoded, and what is known about it."""

    client: int
    version: int  # that it trained from
    message: Bytes
    loss: float
    examples: int
    state: ClientState  # after its upload; a server of real clients knows only the version
    evaluation: Evaluation | None = None
    arrives: float = 0.0  # on the simulated clock


class Closed(NamedTuple):
    """A closed round."""

    server: ServerState  # the next one
    uploads: Bounded  # without the refused ones: far beyond any bound, or the next state would not be finite


@dataclass(frozen=True, eq=False)
class Round:
    """An open round: pure functions of the contract and the server's state. Who the clients are, it does not know.

    Args:
        contract: the contract, of all stages.
        server: the server's state.
        plan: which blocks the round synchronizes.
    """

    contract: Contract
    server: ServerState
    plan: Plan
    _hints: dict[int, Tree] = field(default_factory=dict, init=False, repr=False)  # by tier

    @classmethod
    def open(cls, contract: Contract, server: ServerState) -> Round:
        """The next round: which blocks it synchronizes."""
        now = contract.at(server.public.version)
        plan = now.method.schedule.plan(server.schedule, now.coords, server.public.version)
        if plan.names != now.coords.named:
            if now.method.space.redraw_every:
                raise unsent_in_old_basis(now.method, now.coords.named - plan.names)
            check_codes(now, server, plan.names)
        return cls(contract, server, plan)

    @property
    def version(self) -> int:
        """The version that the round starts from."""
        return self.server.public.version

    @cached_property
    def downloads(self) -> Downloads:
        """The messages that open the round."""
        return Downloads(self.contract.at(self.version), self.server, self.plan)

    def read(self, reply: Reply) -> Upload:
        """The decoded upload of a client, as of the version that it trained from; raises WireError if it is refused."""
        contract, client, staleness = self.contract.at(reply.version), reply.client, self.version - reply.version
        if staleness and contract.method.asynchronous.is_too_stale(staleness):
            raise WireError(
                f"it trained version {reply.version}, {staleness} versions ago, and at most "
                f"{contract.method.asynchronous.most_stale} are used"
            )
        hints = self.hints(client) if contract.has_hints else None
        upload = decode_upload(contract, self.plan, reply.version, client, reply.message, hints)
        return upload._replace(staleness=staleness) if staleness else upload

    def hints(self, client: int) -> Tree:
        """What both ends know about the values of an upload (`Contract.hints`).

        They depend on the coordinates that the client received. Those of stale uploads are of a mask that is fixed.
        """
        contract = self.contract.at(self.version)
        tier = contract.tier(client)
        if tier not in self._hints:
            self._hints[tier] = contract.hints(as_received(contract, self.server.public, contract.down(client)))
        return self._hints[tier]

    def close(
        self,
        uploads: Mapping[int, Upload],
        registered: int,
        noise: Key | None = None,
        recent: Mapping[str, float] = {},
        known: Mapping[int, Known] = {},
        sum_masked: SumMasked | None = None,
    ) -> Closed:
        """Aggregate the uploads and make the next version.

        Args:
            uploads: the decoded uploads, by client number.
            registered: number of clients in all.
            noise: the source of noise for differential privacy; by default the seed, which clients know.
            recent: the medians of the latest rounds (`Recent.sizes`).
            known: what is known about some of the clients.
            sum_masked: sums masked uploads (`thinwire.secure.masks`); needed for secure aggregation.

        Uploads far beyond their bound are left out. The whole next state is checked: if it is not finite, clients far
        above the median norm are left out, and if that does not help, Diverged is raised.
        """
        if not uploads:
            raise WireError(
                f"no client responded in the round from version {self.version}; repeat the round, or sample other "
                "clients"
            )
        contract, public, plan = self.contract.at(self.version), self.server.public, self.plan
        method, received = contract.method, {client: uploads[client] for client in sorted(uploads)}

        def after(given: Mapping[int, Upload], left_out: Collection[int] = ()) -> ServerState:
            used = [one for client, one in given.items() if client not in left_out]
            total = aggregate(contract, public, plan, used, noise, sum_masked)
            return next_version(self.contract, self.server, plan, total, len(used) / registered)

        if method.secure_aggregation:
            return Closed(after(received), Bounded(received))
        start = to_device(restrict(public.coords, plan.names), "cpu") if method.upload == "weights" else {}
        buffers = to_device(public.buffers, "cpu") if public.buffers else {}
        limit = 0.0 if method.privacy.bounds else method.norm_bound

        def factor(one: Upload) -> float:
            nova = method.correction.factor(one.report) if method.correction.active else 1.0
            return nova * (method.asynchronous.factor(one.staleness) if method.asynchronous.active else 1.0)

        given: Any = (start, buffers, recent, known, factor)
        found = bound_uploads(received, limit, *given)
        if found.refused.keys() == received.keys():
            raise Unfit("no upload of this round can be used", found.refused)
        try:
            return Closed(after(found.uploads, found.refused), found)
        except Diverged:
            beyond = bound_uploads(received, NORM_BOUND, *given)
            far = {**beyond.bounded, **beyond.refused}
            none_left = received.keys() == far.keys() | found.refused.keys()
            if not far or none_left or method.privacy.bounds:  # with privacy, one client must not decide who counts
                raise
        refused = {client: f"the next state is not finite with it: {reason}" for client, reason in far.items()}
        found = found._replace(refused={**refused, **found.refused})
        return Closed(after(found.uploads, found.refused), found)

    def counts(self, before: SyncCounts, clients: Collection[int]) -> SyncCounts:
        """How often each block was synchronized, after this round was closed with uploads of these clients.

        Bytes are counted by block where uploads are values as they are: these are refused if they have another size.
        """
        contract = self.contract.at(self.version)
        method, planned = contract.method, contract.coords.restrict(self.plan.names)
        syncs = {**before.syncs, **{name: before.syncs.get(name, 0) + 1 for name in planned.names}}
        if before.bytes_up is None or (not method.sketch.is_identity and method.sketch.spec(planned) != planned):
            return SyncCounts(syncs, None)
        bytes_up = dict(before.bytes_up)
        tiers = Counter(map(contract.tier, clients)) if method.budget.tiers else {0: len(clients)}
        for tier, uploads in tiers.items():
            if not method.ups[tier].exact or method.ups[tier].size(planned) != planned.nbytes:
                return SyncCounts(syncs, None)
            for block in planned:
                bytes_up[block.name] = bytes_up.get(block.name, 0) + uploads * block.nbytes
        return SyncCounts(syncs, bytes_up)
