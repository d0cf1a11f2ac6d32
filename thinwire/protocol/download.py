"""Downloads: the shortest message that brings a client from its version to the current one.

Incremental downloads: each window (the rounds of one basis) that a client missed costs the missed entries or the
coordinates at its end, whichever is shorter. All of it never costs more than the whole state, nor more than 512 bodies
(128 with a sketch): a client that is further behind is sent the state. Version 0 is never sent: everyone derives it
from method, model and seed. Full downloads: always the coordinates, encoded by the download codec.

Every message ends in the *request*: the blocks that the round synchronizes, and what is new besides coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from thinwire.core.tree import bring, restrict
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.drift_check import pack_drift_check
from thinwire.protocol.entries import WindowSnapshot, least_snapshot, snapshot_parts
from thinwire.protocol.fields import raw
from thinwire.protocol.setup import plan_round
from thinwire.protocol.state import PublicState, ServerState
from thinwire.protocol.sums import Sums
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class RoundOpening:
    """The messages that open one round; what they share is encoded at most once.

    Args:
        contract: the contract.
        server: the server's state.
        names: the blocks that the round synchronizes; by default the schedule is asked.
    """

    def __init__(self, contract: Contract, server: ServerState, names: frozenset[str] | None = None) -> None:
        self.contract, self.server = contract.at(server.public.version), server
        self.names = plan_round(self.contract, server).names if names is None else names
        self._full: dict[int, Bytes] = {}  # coordinates by tier
        self._snapshots: dict[frozenset[str], tuple[Bytes, ...]] = {}  # in parts, by the blocks in them
        self._sums = Sums(self.contract, server.ledger)
        self._requests: dict[bool, bytes] = {}  # with news or without
        self._drift_check: Bytes = b""

    def messages(self, versions: Mapping[int, int]) -> dict[int, wire.Pieces]:
        """One message to each client, in pieces; see `open_round`."""
        full, out = self.contract.method.download == "full", {}
        made: dict[tuple[int, int], wire.Pieces] = {}
        for client, version in sorted(versions.items(), key=lambda item: -item[1]):  # sums go back step by step
            like = (version, self.contract.tier(client) if full else 0)
            if like not in made:
                made[like] = self.shortest(version, client)
            out[client] = made[like]
        return {client: out[client] for client in versions}

    def split(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Bytes of the ordinary broadcast, and bytes beyond it because clients had missed rounds.

        The ordinary part of a message is the size of the message to a client that has the previous version.
        """
        total = sum(sizes)
        if self.contract.method.download == "full":
            return total, 0
        ordinary = wire.length(self.shortest(max(0, self.server.public.version - 1)))
        down = sum(min(one, ordinary) for one in sizes)
        return down, total - down

    def shortest(self, version: int, client: int = EVERYONE) -> wire.Pieces:
        """The shortest message to a client that has this version; incremental downloads do not depend on the client."""
        contract, now = self.contract, self.server.public.version
        past = self.server.ledger.past_way(version) if contract.method.download == "incremental" else None
        if past is None or len(past) >= contract.max_steps:  # at least one body is needed for the open window
            return self.state(version, client)
        steps = self.steps(version, past)
        if contract.window(now) and wire.length(steps) > contract.weights.nbytes + contract.coords.nbytes:
            return min(steps, self.state(version, client), key=wire.length)
        return steps  # before the first merge no state is shorter: do not build it

    def steps(self, version: int, past: tuple[Bytes, ...]) -> wire.Pieces:
        """The entries and snapshots from a version to now; `past` are those before the open window."""
        now, opened = self.server.public.version, self._open_window(version, self.contract.max_steps - len(past))
        bodies = *past, *opened, self._request(now > version)
        return wire.pack_pieces(wire.STEPS, now, bodies, self.contract.schema, now - version)

    def state(self, version: int, client: int) -> wire.Pieces:
        """The whole state. Its plan lists the blocks that were synchronized since the client's version."""
        contract, now, public = self.contract, self.server.public.version, self.public
        if contract.method.download == "full":
            fields = {wire.COORDS: self._encoded(client)}
        else:
            base = {wire.BASE: raw(public.base)} if contract.window(now) else {}
            fields = {wire.COORDS: raw(restrict(public.coords, contract.sendable.names)), **base}
        body = wire.pack_body(wire.Body(self.server.ledger.synced_since(version), fields), contract.schema)
        return wire.pack_pieces(wire.STATE, now, (body, self._request(True)), contract.schema, now - version)

    def _open_window(self, version: int, most: int) -> tuple[Bytes, ...]:
        """From a version, or else from the beginning of the open window, to now, in at most this number of bodies.

        A snapshot is one body in several parts.
        """
        contract, ledger = self.contract, self.server.ledger
        start = max(version, ledger.opened)
        if start == ledger.version:
            return ()
        entries, touched = ledger.since(start), ledger.synced_since(start)
        if entries is not None and len(entries) > most:
            entries = None
        ways: list[tuple[Bytes, ...]] = [] if entries is None else [entries]
        ways += [] if (total := self._sums.body(start)) is None else [(total,)]
        best = min(ways, key=wire.length, default=None)
        if best is not None and wire.length(best) <= least_snapshot(contract, touched):
            return best
        snapshot = self._snapshot(touched)
        return snapshot if best is None or wire.length(snapshot) < wire.length(best) else best

    def _snapshot(self, names: frozenset[str]) -> tuple[Bytes, ...]:
        """The current values of these blocks, in parts."""
        if names not in self._snapshots:
            values = restrict(self.public.coords, names)
            self._snapshots[names] = snapshot_parts(self.contract, WindowSnapshot(names, values))
        return self._snapshots[names]

    @cached_property
    def public(self) -> PublicState:
        """The public state on the CPU, where bytes are produced; the base only if it was merged into, else not sent."""
        public = self.server.public
        if self.contract.window(public.version):
            return PublicState(public.version, *bring(public[1:], "cpu"))
        return PublicState(public.version, public.base, *bring(public[2:], "cpu"))

    def _encoded(self, client: int) -> Bytes:
        """The coordinates as all clients of a tier receive them in a full download."""
        contract, public, tier = self.contract, self.public, self.contract.tier(client)
        if tier not in self._full:
            coords = restrict(public.coords, contract.sendable.names)
            peer = contract.peer(public.version, EVERYONE, contract.moving)
            self._full[tier], _ = contract.down(client).encode(coords, {}, peer)
        return self._full[tier]

    def _request(self, news: bool) -> bytes:
        """The last body: the plan of the round, the shared state and buffers if they are news, and the drift check."""
        if news not in self._requests:
            fields: dict[int, Bytes] = {}
            if news and (self.contract.shared.blocks or self.contract.buffers.blocks):
                trees = {wire.SHARED: self.public.shared, wire.BUFFERS: self.public.buffers}
                fields = {number: raw(tree) for number, tree in trees.items() if tree}
            if has_drift_check(self.contract):
                self._drift_check = self._drift_check or pack_drift_check(self.contract, self.server.public)
                fields[wire.DRIFT_CHECK] = self._drift_check
            self._requests[news] = wire.pack_body(wire.Body(self.names, fields), self.contract.schema)
        return self._requests[news]


def has_drift_check(contract: Contract) -> bool:
    """Whether downloads contain a drift check; full downloads need none."""
    return contract.method.drift_check and contract.method.download == "incremental"
