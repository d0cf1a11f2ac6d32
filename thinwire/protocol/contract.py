"""The contract: everything that server and clients derive from method, model and seed before the first round."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from thinwire.codecs.base import Codec, Peer
from thinwire.core.key import Device, Key
from thinwire.core.tree import Spec, Tree, restrict, to_device
from thinwire.optimizers.base import Optimizer
from thinwire.protocol.method import Method
from thinwire.protocol.state import PublicState
from thinwire.schedules.base import Plan
from thinwire.spaces.base import Space
from thinwire.wire import message as wire
from thinwire.wire.message import Schema

_SPARE = 1 << 16  # bytes that a message may have beyond its values: headers, plans, reports for the schedule
EVERYONE = -1  # the client number of a broadcast
STACKED = -2  # that of a stack, which has its own randomness


class Sent(NamedTuple):
    """What is sent in a round, besides a stack."""

    fields: frozenset[int]  # of an upload
    code: Spec  # of an upload
    report: Spec  # of an upload, for the schedule
    step: Spec  # of the broadcast


@dataclass(frozen=True, eq=False)
class Contract:
    """What server and clients agree on; both derive it from method, model and seed.

    Args:
        method: the method.
        weights: names, shapes and types of the trainable weights.
        coords: the same of the coordinates.
        shared: the same of the public state of the correction.
        buffers: the same of the buffers.
        key: the root of all shared randomness.
        schema: the hash of all this, which every message carries, and the block names that plans refer to.
        later: the contract from version `later.since` on, if the method has two stages.
        since: the first version of this contract.
        initial: the initial weights, where the basis depends on them.
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
    initial: Tree = field(default_factory=dict, repr=False)
    _basis: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _sent: dict[Plan, Sent] = field(default_factory=dict, init=False, repr=False)

    # -- stages and windows --------------------------------------------------------------------------------------------

    def at(self, version: int) -> Contract:
        """The contract at a version: this one, or that of the second stage."""
        return self.later if self.later is not None and version >= self.later.since else self

    @property
    def stages(self) -> tuple[Contract, ...]:
        """This contract and that of the second stage, if there is one."""
        return (self,) if self.later is None else (self, self.later)

    def window(self, version: int) -> int:
        """The number of the basis in which the round from `version` trains; between two windows is a merge."""
        every = self.method.space.redraw_every
        return version // every if every else 0

    def window_end(self, version: int) -> int | None:
        """The version at which the basis of the round from `version` is replaced; None if it never is."""
        every = self.method.space.redraw_every
        return (version // every + 1) * every if every else None

    def basis(self, version: int, device: Device) -> Tree:
        """The basis in which the round from `version` trains; the newest one is cached."""
        if (holds := self.at(version)) is not self:
            return holds.basis(version, device)
        window, device = self.window(version), torch.device(device or "cpu")
        if self._basis.get("of") != (window, device):
            space, key = self.method.space, self.key.fold("frame", window)
            basis = (
                space.basis_from(self.initial, key, device) if self.initial else space.basis(self.weights, key, device)
            )
            self._basis.update(of=(window, device), basis=basis)
        return dict(self._basis["basis"])

    def keep_basis(self, basis: Tree, device: Device) -> None:
        """Cache the basis of the first window, which setup made."""
        self._basis.update(of=(0, torch.device(device or "cpu")), basis=basis)

    # -- what is sent --------------------------------------------------------------------------------------------------

    @cached_property
    def private(self) -> frozenset[str]:
        """The names of the coordinates that are never sent."""
        return self.method.schedule.never(self.coords)

    @cached_property
    def sendable(self) -> Spec:
        """The coordinates that are sent: all but the private ones."""
        return self.coords.restrict(self.coords.named - self.private)

    @cached_property
    def code(self) -> Spec:
        """What clients send and the server averages when all blocks are synchronized."""
        return self.method.sketch.spec(self.sendable)

    @cached_property
    def step(self) -> Spec:
        """What the server broadcasts when all blocks are synchronized: the code, or coordinates recovered from it."""
        return self.step_of(self.sendable)

    def step_of(self, planned: Spec) -> Spec:
        """What the server broadcasts when these blocks are synchronized, besides a stack."""
        if (stacking := self.method.space.stacking) is not None:
            return stacking.averaged(planned)
        sketch = self.method.sketch
        return planned if sketch.is_identity or sketch.recovers else sketch.spec(planned)

    @cached_property
    def report(self) -> Spec:
        """What a client's correction reports to the server; often nothing."""
        method, shapes = self.method, self.sendable.shapes()
        own = method.correction.init_client(shapes)
        return Spec.of(method.correction.finish(shapes, 1, method.client_opt.lr, own, self.shared.shapes())[1])

    def sent(self, plan: Plan) -> Sent:
        """What is sent for this plan."""
        if (known := self._sent.get(plan)) is None:
            method, planned = self.method, self.coords.restrict(plan.names)
            report = Spec.of(method.schedule.report(planned.shapes(), plan))
            fields = {wire.COORDS}
            if not method.secure_aggregation:
                fields |= {wire.WEIGHT} if method.client_weight.sent else set()
                fields |= {wire.BUFFERS} if self.buffers.blocks else set()
                fields |= {wire.SHARED} if self.report.blocks else set()
                fields |= {wire.REPORT} if report.blocks else set()
            while len(self._sent) >= 16:
                del self._sent[next(iter(self._sent))]
            code, step = method.sketch.spec(planned), self.step_of(planned)
            known = self._sent[plan] = Sent(frozenset(fields), code, report, step)
        return known

    @cached_property
    def longest_up(self) -> int:
        """The largest size of an upload in bytes: no codec doubles its input."""
        return 2 * sum(part.nbytes for part in (self.code, self.report, self.buffers, self.coords)) + _SPARE

    @cached_property
    def longest_down(self) -> int:
        """The largest size of a download in bytes: anything larger is sent as the whole state."""
        parts = (self.code, self.coords, self.weights, self.shared, self.buffers)
        return 2 * sum(part.nbytes for part in parts) + _SPARE

    @cached_property
    def has_drift_check(self) -> bool:
        """Whether downloads contain a drift check; full downloads need none."""
        return self.method.drift_check and self.method.download == "incremental"

    @cached_property
    def max_steps(self) -> int:
        """The largest number of bodies of steps: each costs a client a merge, or the slower draws of a sketch."""
        sketch = self.method.sketch
        return wire.MAX_STEPS if sketch.is_identity or sketch.recovers else wire.MAX_STEPS // 4

    # -- parts in a round ----------------------------------------------------------------------------------------------

    @cached_property
    def has_client_correction(self) -> bool:
        """Whether the correction does anything after local training: keep a client state, or report."""
        return bool(self.report.blocks or self.method.correction.init_client(self.sendable.shapes()))

    @cached_property
    def training_space(self) -> Space:
        """The space used in training: adapters are not merged into the weights of each client where that is possible.

        A penalty depends on the weights that coordinates expand to, so with one they are merged.
        """
        space = self.method.space
        return space if self.method.penalty.active and not space.reparametrized else space.unmerged()

    def client_opt(self, version: int) -> Optimizer:
        """The client optimizer with the learning rate of the round from `version`."""
        return self.method.client_opt.scaled(self.method.lr_schedule.factor(version))

    def server_opt(self, version: int) -> Optimizer:
        """The server optimizer with the learning rate of the round from `version`."""
        return self.method.server_opt.scaled(self.method.server_lr_schedule.factor(version))

    def sketch_key(self, version: int) -> Key:
        """The key of the sketch in the round from `version`."""
        return self.key.fold("sketch", 0 if self.method.sketch.recovers else version)

    def peer(self, version: int, client: int, hints: Tree | None = None) -> Peer:
        """What both ends know about that client in that round; see `hints`."""
        mask, known = (hints or {}, {}) if self.method.mask.active else ({}, hints or {})
        return Peer(self.key.fold("peer", version, client), self.key.fold("peers", version), mask, known)

    # -- tiers of clients ----------------------------------------------------------------------------------------------

    def tier(self, client: int) -> int:
        """The tier of a client."""
        return self.method.budget.tier(client, self._tier_key) if self.method.budget.tiers else 0

    @cached_property
    def _tier_key(self) -> Key:
        return self.key.fold("tier")

    def up(self, client: int) -> Codec:
        """The codec of that client's uploads."""
        return self.method.ups[self.tier(client)] if self.method.budget.tiers else self.method.up

    def down(self, client: int) -> Codec:
        """The codec of downloads to that client; for incremental downloads the same for all."""
        return self.method.downs[self.tier(client)] if self.method.budget.tiers else self.method.down

    # -- masks ---------------------------------------------------------------------------------------------------------

    def trained(self, public: PublicState) -> Tree:
        """Which values a client trains that received this public state, on the CPU; empty means all."""
        mask = self.method.mask
        if not mask.active:
            return {}
        if mask.fixed:
            return self.moving
        received = to_device(restrict(public.coords, self.sendable.names), "cpu")
        return mask.trained(received, public.version)

    @cached_property
    def has_hints(self) -> bool:
        """Whether both ends know more about the values of an upload than their shapes."""
        method = self.method
        predicted = method.upload == "weights" and any(up.predicts for up in method.ups)
        return method.mask.active or (predicted and not method.secure_aggregation)

    def hints(self, public: PublicState) -> Tree:
        """What both ends know about the values of an upload: which are trained, or what they were; often nothing."""
        if self.method.mask.active:
            return self.trained(public)
        return to_device(restrict(public.coords, self.sendable.names), "cpu") if self.has_hints else {}

    @cached_property
    def moving(self) -> Tree:
        """Which values are ever trained, where the mask is fixed; empty means all."""
        mask = self.method.mask
        return mask.trained(self.sendable.zeros(), 0) if mask.active and mask.fixed else {}

    def with_fixed_values(self, coords: Tree, known: Tree) -> Tree:
        """Decoded coordinates, with the values that never change, and are not sent, taken from `known`."""
        return {**coords, **{n: torch.where(moves, coords[n], known[n]) for n, moves in self.moving.items()}}
