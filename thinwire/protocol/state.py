"""What is known, and by whom: to everyone, to the server, to one client; and what both ends agreed on at the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from thinwire.codecs.base import Codec, Peer, Raw
from thinwire.core.key import Device, Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, restrict, to_device
from thinwire.masks.masks import NoMask
from thinwire.protocol.ledger import Ledger
from thinwire.protocol.method import Method
from thinwire.sketches.base import Identity
from thinwire.wire import message as wire
from thinwire.wire.message import Schema

_SPARE = 1 << 16  # bytes that a message may have beyond its numbers: heads, plans, notes for the schedule


class Public(NamedTuple):
    """What everybody at a version knows. Public is a function of the version: the same on every machine."""

    version: int
    base: Tree  # the weights that the space builds on
    coords: Tree  # the trained coordinates
    shared: Tree  # memory of the correction that everyone knows
    buffers: Tree  # the model's floating-point buffers (running statistics)


class ServerState(NamedTuple):
    """What the server alone keeps besides the public state."""

    public: Public
    opt: Tree
    correction: Tree
    schedule: Tree
    codec: Tree  # of the down link
    ledger: Ledger


@dataclass(frozen=True, eq=False)
class ClientState:
    """What a client keeps between rounds.

    Args:
        version: the version that it last saw.
        held: the part of its change that it has told nobody, by block.
        correction: its memory of the correction.
        codec: its memory of the up codec.
        opt: the state of its optimiser, kept only within a window of the schedule.
    """

    version: int = 0
    held: Tree = field(default_factory=dict)
    correction: Tree = field(default_factory=dict)
    codec: Tree = field(default_factory=dict)
    opt: Tree = field(default_factory=dict)

    @property
    def blank(self) -> bool:
        """Whether there is nothing to keep but the version."""
        return not (self.held or self.correction or self.codec or self.opt)


@dataclass(frozen=True, eq=False)
class Contract:
    """What server and clients agreed on before the first round; both derive it from method, model and seed.

    Args:
        method: the method.
        weights, coords, shared, buffers: what the trees of the public state look like.
        key: the root of all shared randomness.
        schema: the hash of all this that every message carries, and the block names behind its plans.
        later: what holds from version `later.since` on, where the method has two stages.
        since: the version from which on this holds.
    """

    method: Method
    weights: Spec
    coords: Spec
    shared: Spec
    buffers: Spec
    key: Key
    schema: Schema
    later: Contract | None = None
    since: int = 0
    _basis: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def at(self, version: int) -> Contract:
        """What holds at a version: this, or what its method does later."""
        return self.later if self.later is not None and version >= self.later.since else self

    @property
    def stages(self) -> tuple[Contract, ...]:
        """This, and what comes later."""
        return (self,) if self.later is None else (self, self.later)

    @cached_property
    def sendable(self) -> Spec:
        """The coordinates that are ever sent: all but the private ones."""
        return self.coords.restrict(self.coords.named - self.method.schedule.never(self.coords))

    @cached_property
    def report(self) -> Spec:
        """What a client's correction reports to the server; often nothing."""
        method, shapes = self.method, self.sendable.shapes()
        mine = method.correction.init_client(shapes)
        return Spec.of(method.correction.finish(shapes, 1, method.client_opt.lr, mine, self.shared.shapes())[1])

    @cached_property
    def longest_up(self) -> int:
        """How many bytes a message from a client may have: no codec doubles what it is given."""
        return 2 * sum(part.nbytes for part in (self.code, self.report, self.buffers, self.coords)) + _SPARE

    @cached_property
    def longest_down(self) -> int:
        """How many bytes a message to a client may have: what is longer than the whole state is sent as that."""
        parts = (self.code, self.coords, self.weights, self.shared, self.buffers)
        return 2 * sum(part.nbytes for part in parts) + _SPARE

    @cached_property
    def longest_way(self) -> int:
        """How many bodies steps may have: each costs a client a merge, or the draws of a sketch, which take longer."""
        return wire.LONGEST_WAY if isinstance(self.method.sketch, Identity) else wire.LONGEST_WAY // 4

    @cached_property
    def remembers(self) -> bool:
        """Whether the correction does anything after local training: keep a memory, or report."""
        return bool(self.report.blocks or self.method.correction.init_client(self.sendable.shapes()))

    @cached_property
    def code(self) -> Spec:
        """What clients send and the server averages when all blocks speak that ever do."""
        return self.method.sketch.spec(self.sendable)

    def basis(self, version: int, device: Device) -> Tree:
        """The basis in which the round from `version` trains; the newest is kept, for it is asked for often."""
        if (holds := self.at(version)) is not self:
            return holds.basis(version, device)
        window, device = self.window(version), torch.device(device or "cpu")
        if self._basis.get("of") != (window, device):
            basis = self.method.space.basis(self.weights, self.key.fold("frame", window), device)
            self._basis.update(of=(window, device), basis=basis)
        return dict(self._basis["basis"])

    def window(self, version: int) -> int:
        """The number of the basis in which the round from `version` trains; a merge lies between two windows."""
        every = self.method.space.redraw_every
        return version // every if every else 0

    def window_end(self, version: int) -> int | None:
        """The version at which the basis of the round from `version` is given up; None if it is kept for ever."""
        every = self.method.space.redraw_every
        return (version // every + 1) * every if every else None

    @cached_property
    def settles(self) -> bool:
        """Whether coordinates change a little when their basis ends."""
        return not isinstance(self.method.merge_codec, Raw)

    def sketch_key(self, version: int) -> Key:
        """The key of the sketch in the round from `version`."""
        return self.key.fold("sketch", version)

    def peer(self, version: int, client: int, mask: Tree | None = None) -> Peer:
        """What both ends know of that client in that round, with the mask of what it trains."""
        return Peer(self.key.fold("peer", version, client), self.key.fold("peers", version), mask or {})

    def trained(self, public: Public) -> Tree:
        """Which numbers a client trains that received this public state, on the CPU; empty means all."""
        if isinstance(self.method.mask, NoMask):
            return {}
        if self.method.mask.fixed:
            return self.moving
        heard = to_device(restrict(public.coords, self.sendable.names), "cpu")
        return self.method.mask.trained(heard, public.version)

    @cached_property
    def moving(self) -> Tree:
        """Which numbers are ever trained, where a mask says it once and for all; empty means all."""
        return self.method.mask.trained(self.sendable.zeros(), 0) if self.method.mask.fixed else {}

    def heard(self, coords: Tree, known: Tree) -> Tree:
        """What was decoded from the server, with the numbers in place that never move and are not sent."""
        return {**coords, **{n: torch.where(moves, coords[n], known[n]) for n, moves in self.moving.items()}}

    def tier(self, client: int) -> int:
        """The number of that client's tier."""
        return self.method.budget.tier(client, self._tiers)

    @cached_property
    def _tiers(self) -> Key:
        """The key from which tiers are drawn."""
        return self.key.fold("tier")

    def up(self, client: int) -> Codec:
        """The codec of that client's messages."""
        return self.method.ups[self.tier(client)]

    def down(self, client: int) -> Codec:
        """The codec of messages to that client; on incremental download the same for all."""
        return self.method.downs[self.tier(client)]


def device_of(public: Public) -> torch.device:
    """The device on which a public state lies."""
    return next(iter(public.base.values())).device
