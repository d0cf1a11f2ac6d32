"""Downloads: the shortest message that brings a client from its version to the current one, and ledger entries.

Incremental downloads: each window (the rounds of one basis) that a client missed costs the missed entries or the
coordinates at its end, whichever is shorter. All of it never costs more than the whole state, nor more than 512 bodies
(128 with a sketch): a client that is further behind is sent the state. Version 0 is never sent: everyone derives it
from method, model and seed. Full downloads: always the coordinates, encoded by the download codec.

Every message ends in the *request*: the blocks that the round synchronizes, and what is new besides coordinates.

*Sums of entries* take the place of several entries where steps add up without rounding. Steps that are multiples of a
power of two (`Lattice`) add up exactly in floating point, as long as the coordinates are multiples of a
power of two themselves and not too large for it. Then

    coords(now) = coords(v) + sum of the entries since v

holds bit for bit, in any order: a client that replays every entry and one that adds the sum have the same state. The
sum is one vector of small integers, which `LatticeSum` encodes in fewer bytes than the entries take together. Nothing
relies on the codec: the server checks each step (`adds_up`), and the ledger remembers since which version all of them
were exact (`Ledger.adds_since`). Sums never go further back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.tree import Tree, add, bring, restrict
from thinwire.errors import WireError
from thinwire.protocol.contract import EVERYONE, STACKED, Contract
from thinwire.protocol.drift_check import pack_drift_check
from thinwire.protocol.ledger import Ledger
from thinwire.protocol.state import PublicState, ServerState
from thinwire.protocol.upload import planned_names, raw, unraw
from thinwire.schedules.base import Plan
from thinwire.spaces.base import Stack, Stacking
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes, read_varint, varint

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Downloads:
    """The messages that open one round; what they share is encoded at most once.

    Args:
        contract: the contract at the server's version.
        server: the server's state.
        plan: the plan of the round.
    """

    contract: Contract
    server: ServerState
    plan: Plan
    _messages: dict[tuple[int, int], wire.Parts] = field(default_factory=dict, init=False)  # by version and tier
    _encoded: dict[int, Bytes] = field(default_factory=dict, init=False)  # coordinates by tier
    _snapshots: dict[frozenset[str], Bytes] = field(default_factory=dict, init=False)  # by the blocks in them
    _requests: dict[bool, Bytes] = field(default_factory=dict, init=False)  # with news or without

    @cached_property
    def _sums(self) -> Sums:
        return Sums(self.contract, self.server.ledger)

    def messages(self, versions: Mapping[int, int]) -> dict[int, bytes]:
        """One message to each client, the shortest that brings it from its version to the current one.

        Args:
            versions: the version of each client.
        """
        return {client: bytes(parts) for client, parts in self.parts(versions).items()}

    def parts(self, versions: Mapping[int, int]) -> dict[int, wire.Parts]:
        """As `messages`, without copies of what they share: a simulation counts them and seldom joins them."""
        newest_first = sorted(versions.items(), key=lambda item: -item[1])  # sums go back step by step
        made = {client: self.shortest(version, client) for client, version in newest_first}
        return {client: made[client] for client in versions}

    def split(self, messages: Mapping[int, Sized]) -> tuple[int, int]:
        """Bytes of the ordinary broadcast, and bytes beyond it because clients had missed rounds.

        The ordinary part of a message is the size of the message to a client that has the previous version.
        """
        sizes = [len(one) for one in messages.values()]
        if self.contract.method.download == "full":
            return sum(sizes), 0
        ordinary = len(self.shortest(max(0, self.server.public.version - 1)))
        down = sum(min(one, ordinary) for one in sizes)
        return down, sum(sizes) - down

    def shortest(self, version: int, client: int = EVERYONE) -> wire.Parts:
        """The shortest message to a client that has this version; incremental downloads do not depend on the client."""
        contract, server, now = self.contract, self.server, self.server.public.version
        full = contract.method.download == "full"
        like = (version, contract.tier(client) if full else 0)
        if like not in self._messages:
            past = None if full else server.ledger.past_way(version)
            if past is None or len(past) >= contract.max_steps:  # at least one body is needed for the open window
                message = self.state(version, client)
            else:
                bodies = (
                    *past,
                    *self._open_window(version, contract.max_steps - len(past)),
                    self._request(now > version),
                )
                message = wire.pack_parts(wire.STEPS, now, bodies, contract.schema, now - version)
                # before the first merge no state is shorter: do not build it
                if contract.window(now) and len(message) > contract.weights.nbytes + contract.coords.nbytes:
                    message = min(message, self.state(version, client), key=len)
            self._messages[like] = message
        return self._messages[like]

    def full_state(self, data: Bytes, client: int) -> bytes:
        """The whole state, for a client that requested it.

        Args:
            data: the client's message (`request_full_state`), not trusted.
            client: its number.
        """
        contract, now = self.contract, self.server.public.version
        message = wire.unpack(data, contract.schema.sent_by(client), contract.longest_up)
        if message.kind != wire.LOST:
            raise WireError(f"a message of kind {wire.KINDS[message.kind]!r} requests no state, expected 'lost'")
        if message.version > now:
            raise WireError(f"a client is lost at version {message.version}, the server is at {now}")
        return bytes(self.state(message.version, client))

    def state(self, version: int, client: int) -> wire.Parts:
        """The whole state. Its plan lists the blocks that were synchronized since the client's version."""
        contract, now, public = self.contract, self.server.public.version, self._public
        coords, fields = restrict(public.coords, contract.sendable.names), dict[int, Bytes]()
        if contract.method.download == "full":  # as all clients of a tier receive them
            tier = contract.tier(client)
            if tier not in self._encoded:
                peer = contract.peer(now, EVERYONE, contract.moving)
                self._encoded[tier], _ = contract.down(client).encode(coords, {}, peer)
            fields[wire.COORDS] = self._encoded[tier]
        else:
            fields[wire.COORDS] = raw(coords)
            if contract.window(now):
                fields[wire.BASE] = raw(public.base)
        body = wire.pack_body(wire.Body(self.server.ledger.synced_since(version), fields), contract.schema)
        return wire.pack_parts(wire.STATE, now, (body, self._request(True)), contract.schema, now - version)

    def _open_window(self, version: int, most: int) -> tuple[Bytes, ...]:
        """From a version, or else from the beginning of the open window, to now, in at most this number of bodies."""
        contract, ledger = self.contract, self.server.ledger
        start = max(version, ledger.opened)
        if start == ledger.version:
            return ()
        entries, touched = ledger.since(start), ledger.synced_since(start)
        ways = [] if entries is None or len(entries) > most else [entries]
        if contract.method.sends_sums and (total := self._sums.body(start)) is not None:
            ways.append((total,))
        codec, spec = contract.method.merge_codec, contract.coords.restrict(touched)
        values = codec.size(spec) if codec.exact else spec.nbytes
        least = (
            values + 1 + len(varint(values)) if values else 0
        )  # bytes of a snapshot; 0 where they depend on the values
        is_shortest = any(sum(map(len, way)) <= least for way in ways)
        if touched not in self._snapshots and not is_shortest:
            self._snapshots[touched] = pack_snapshot(contract, restrict(self._public.coords, touched))
        if touched in self._snapshots:
            ways.append((self._snapshots[touched],))
        return min(ways, key=lambda way: sum(map(len, way)))

    def _request(self, news: bool) -> Bytes:
        """The last body: the plan of the round, the shared state and buffers if they are news, and the drift check."""
        contract = self.contract
        if news not in self._requests:
            fields: dict[int, Bytes] = {}
            if news and (contract.shared.blocks or contract.buffers.blocks):
                trees = {wire.SHARED: self._public.shared, wire.BUFFERS: self._public.buffers}
                fields = {number: raw(tree) for number, tree in trees.items() if tree}
            if contract.has_drift_check:
                fields[wire.DRIFT_CHECK] = pack_drift_check(contract, self.server.public)
            self._requests[news] = wire.pack_body(wire.Body(self.plan.names, fields), contract.schema)
        return self._requests[news]

    @cached_property
    def _public(self) -> PublicState:
        """The public state on the CPU, where bytes are produced; the base only if it was merged into, else not sent."""
        public = self.server.public
        if self.contract.window(public.version):
            return PublicState(public.version, *bring(public[1:], "cpu"))
        return PublicState(public.version, public.base, *bring(public[2:], "cpu"))


# -- ledger entries, snapshots and sums, as the bytes that are sent ----------------------------------------------------


class Step(NamedTuple):
    """What one version adds: the aggregated code of the synchronized blocks, or what was recovered from it."""

    names: frozenset[str]
    code: Tree
    stack: Stack | None = None  # what it adds to the base, in a space with `stacking`


def pack_step(contract: Contract, step: Step, version: int, codec: Tree) -> tuple[Bytes, Tree]:
    """The entry that leads from `version` to the next one, as it is broadcast, and the next state of the codec."""
    fields: dict[int, Bytes] = {wire.COORDS: b""}
    if contract.step.blocks:
        fields[wire.COORDS], codec = contract.method.down.encode(step.code, codec, contract.peer(version, EVERYONE))
    if step.stack is not None:
        fields[wire.STACK] = _pack_stack(contract, step.stack, version)
    return wire.pack_body(wire.Body(step.names, fields), contract.schema), codec


def read_step(contract: Contract, body: wire.Body, version: int, device: torch.device) -> Step:
    """The entry that leads from `version` to the next one, from a body that is not trusted."""
    stacking = contract.method.space.stacking
    names = planned_names(contract, body, {wire.COORDS} if stacking is None else {wire.COORDS, wire.STACK})
    spec, data = contract.step_of(contract.coords.restrict(names)), body.fields[wire.COORDS]
    if not contract.step.blocks:
        code = unraw(data, spec)
    else:
        code = contract.method.down.decode(data, spec, contract.peer(version, EVERYONE))
    if stacking is None:
        return Step(names, bring((code,), device)[0])
    count, blocks = _read_stack(contract, stacking, body.fields[wire.STACK], version)
    code, blocks = bring((code, blocks), device)
    return Step(names, code, Stack(count, blocks))


def apply_step(contract: Contract, public: PublicState, step: Step) -> Tree:
    """All coordinates after one entry, in the basis in which they were trained."""
    change, sketch = step.code, contract.method.sketch
    if not (sketch.is_identity or sketch.recovers):
        planned = contract.coords.restrict(step.names)
        change = sketch.decode(step.code, planned, contract.sketch_key(public.version))
    if not change:
        return public.coords
    moved = add(restrict(public.coords, change), change)
    return moved if list(moved) == list(public.coords) else {**public.coords, **moved}


def advance(
    contract: Contract, public: PublicState, coords: Tree, version: int, stack: Stack | None = None
) -> PublicState:
    """public(v) -> public(version) with these coordinates; the caller replaces shared state and buffers.

    The window must not end before `version`, but may end at it: then the stack of the entry, if it has one, is added to
    the base, the coordinates are merged into it, and new ones begin (`Space.merge`). Base and coordinates depend only
    on the coordinates at the end and on stacks, not on the way there.
    """
    space, base = contract.method.space, public.base
    if stack is not None and stack.blocks and space.stacking is not None:
        base = space.stacking.with_stack(base, stack.blocks)
    if space.redraw_every and contract.window(version) != contract.window(public.version):
        basis = contract.basis(public.version, public.device)
        base, coords = space.merge(base, basis, coords, contract.key.fold("init", version))
    return PublicState(version, base, coords, public.shared, public.buffers)


def _pack_stack(contract: Contract, stack: Stack, version: int) -> bytes:
    """How many adapters are stacked, and their factors, encoded by the download codec, which keeps no state of them."""
    if not stack.blocks:
        return varint(stack.adapters)
    down = contract.method.down
    return varint(stack.adapters) + bytes(down.encode(stack.blocks, {}, contract.peer(version, STACKED))[0])


def _read_stack(contract: Contract, stacking: Stacking, data: Bytes, version: int) -> Stack:
    """A stack, from bytes that are not trusted: of any number of adapters it is at most as large as the weights."""
    count, at = read_varint(data, 0)
    spec = stacking.stack_spec(contract.weights, count)
    if spec.blocks:
        return Stack(count, contract.method.down.decode(data[at:], spec, contract.peer(version, STACKED)))
    return Stack(count, unraw(data[at:], spec))


def pack_snapshot(contract: Contract, values: Tree, end: int | None = None) -> Bytes:
    """The values of some coordinates after several versions of one window, as they are sent.

    Args:
        contract: the contract.
        values: the coordinates.
        end: the version that the window led to: then the merge codec encodes them. Within a window, None, it does where
            it is exact; else they are raw.
    """
    codec = contract.method.merge_codec
    if end is None and not codec.exact:
        payload = raw(values)
    else:
        payload, _ = codec.encode(values, {}, contract.peer(end or 0, EVERYONE))
    return wire.pack_body(wire.Body(frozenset(values), {wire.VALUES: payload}), contract.schema)


def read_snapshot(contract: Contract, body: wire.Body, device: torch.device, end: int | None = None) -> Tree:
    """The values of a snapshot, from a body that is not trusted; see `pack_snapshot`."""
    spec = contract.coords.restrict(planned_names(contract, body, {wire.VALUES}))
    data = body.fields[wire.VALUES]
    codec = contract.method.merge_codec
    if end is None and not codec.exact:
        values = unraw(data, spec)
    else:
        values = codec.decode(data, spec, contract.peer(end or 0, EVERYONE))
    return bring((values,), device)[0]


def adds_up(before: Tree, step: Tree, after: Tree) -> bool:
    """Whether after = before + step without rounding, value by value.

    >>> one, tiny = {"w": torch.ones(1)}, {"w": torch.full((1,), 2.0**-30)}
    >>> adds_up(one, one, {"w": torch.full((1,), 2.0)}), adds_up(one, tiny, one)
    (True, False)
    """
    return all(_is_exact(before[name].double(), step[name].double(), after[name].double()) for name in step)


def _is_exact(before: Tensor, step: Tensor, after: Tensor) -> bool:
    # both differences: one alone could be rounded in float64. A negative zero would lose its sign in a sum.
    exact = (after - before == step) & (after - step == before) & ~((after == 0) & after.signbit())
    return bool(exact.all())


class Sums:
    """Sums of the newest entries of a ledger; versions in descending order decode each entry once.

    Args:
        contract: the contract.
        ledger: the ledger.
    """

    def __init__(self, contract: Contract, ledger: Ledger) -> None:
        self._contract, self._ledger = contract, ledger
        self._since, self._total = ledger.version, dict[str, Tensor]()

    def body(self, version: int) -> Bytes | None:
        """The sum of the entries since that version, as it is sent; None where there is none.

        There is none where an entry is missing or was rounded, and none of a single entry or of more than 512.
        """
        ledger, missed = self._ledger, self._ledger.version - version
        if version < ledger.adds_since or not 1 < missed <= wire.MAX_STEPS:
            return None
        entries = ledger.since(version)
        return None if entries is None else pack_sum(self._contract, self._add(version, entries))

    def _add(self, version: int, entries: tuple[Bytes, ...]) -> Step:
        """The sum, in float64, of these entries, of which the first starts at that version."""
        if version > self._since:
            self._since, self._total = self._ledger.version, {}
        for at in reversed(range(version, self._since)):
            body = wire.unpack_body(entries[at - version], self._contract.schema)
            for name, block in read_step(self._contract, body, at, _CPU).code.items():
                more = block.double()
                self._total[name] = self._total[name] + more if name in self._total else more
        self._since = version
        total = {name: self._total[name] for name in self._contract.coords.names if name in self._total}
        return Step(frozenset(total), total)


def pack_sum(contract: Contract, total: Step) -> Bytes | None:
    """A sum of entries as it is sent, encoded by the merge codec; None if its values are too long for their type."""
    values = {block.name: total.code[block.name].to(block.dtype) for block in contract.coords.restrict(total.names)}
    if not all(torch.equal(values[name].double(), block) for name, block in total.code.items()):
        return None
    payload, _ = contract.method.merge_codec.encode(values, {}, contract.peer(0, EVERYONE))
    return wire.pack_body(wire.Body(total.names, {wire.SUM: payload}), contract.schema)


def read_sum(contract: Contract, body: wire.Body, device: torch.device) -> Step:
    """A sum of entries, from a body that is not trusted."""
    if not contract.method.sends_sums:
        raise WireError("the message has a sum of entries, which is not sent with this method")
    names = planned_names(contract, body, {wire.SUM})
    spec = contract.coords.restrict(names)
    total = contract.method.merge_codec.decode(body.fields[wire.SUM], spec, contract.peer(0, EVERYONE))
    return Step(names, bring((total,), device)[0])
