"""Trees to lanes of a message and back: what a client says, and what a version adds.

Whatever arrives is checked against the contract: the version, the plan, exactly the lanes that the method has, finite
numbers.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch

from thinwire.codecs import message as wire
from thinwire.codecs.base import Peer, Raw
from thinwire.core.rng import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, all_finite, to_device
from thinwire.errors import WireError
from thinwire.rounds.state import Contract
from thinwire.schedules.base import Plan

_RAW = Raw()
_NOBODY = Peer(Key(0))  # Raw needs to know nothing of the other side
_WEIGHT = Spec.of({"weight": torch.zeros(())})
EVERYONE = -1  # the peer of a broadcast


class Step(NamedTuple):
    """What one version adds: the averaged code of the planned blocks, and the new shared memory and buffers."""

    names: frozenset[str]
    code: Tree
    shared: Tree  # added to the shared memory
    buffers: Tree  # replaces the buffers


class Said(NamedTuple):
    """What one client said, decoded, on the CPU."""

    code: Tree
    weight: float
    buffers: Tree
    report: Tree
    noted: Tree


def unpack_up(contract: Contract, plan: Plan, version: int, client: int, data: bytes) -> Said:
    """What a client said, from bytes that may come from anywhere."""
    method = contract.method
    message = wire.unpack(data, contract.schema)
    if message.kind != wire.UP:
        raise WireError(f"client {client} sent a message of kind {wire.KINDS[message.kind]!r}, expected 'up'")
    if message.version != version:
        raise WireError(f"client {client} trained version {message.version}, the round is at {version}")
    body = wire.unpack_body(message.bodies[0], contract.schema)
    if planned_names(contract, body) != plan.names:
        raise WireError(f"client {client} answered for other blocks than the round asked for")
    planned = contract.coords.restrict(plan.names)
    shapes = contract.sendable.shapes()
    _, report = method.correction.finish(
        shapes, 1, method.client_opt.lr, method.correction.init_client(shapes), contract.shared.shapes()
    )
    noted = method.schedule.report(planned.shapes(), plan)
    expected = {wire.COORDS}
    expected |= {wire.WEIGHT} if method.weigh.sent else set()
    expected |= {wire.BUFFERS} if contract.buffers.blocks else set()
    expected |= {wire.SHARED} if report else set()
    expected |= {wire.REPORT} if noted else set()
    expect_lanes(body, expected)
    lanes = body.lanes
    code = method.up.decode(lanes[wire.COORDS], method.sketch.spec(planned), contract.peer(version, client))
    weight = float(unraw(lanes[wire.WEIGHT], _WEIGHT)["weight"]) if method.weigh.sent else method.weigh.weight(0)
    said = Said(
        code,
        weight,
        unraw(lanes[wire.BUFFERS], contract.buffers) if contract.buffers.blocks else {},
        unraw(lanes[wire.SHARED], Spec.of(report)) if report else {},
        unraw(lanes[wire.REPORT], Spec.of(noted)) if noted else {},
    )
    if not (0 < weight < float("inf")):
        raise WireError(f"client {client} says that it counts {weight}; expected a number above 0")
    if not all(all_finite(tree) for tree in (said.code, said.buffers, said.report, said.noted)):
        raise WireError(f"client {client} sent a number that is not finite")
    return said


def pack_step(contract: Contract, step: Step, version: int, codec: Tree) -> tuple[bytes, Tree]:
    """The entry that leads on from `version`, as it is broadcast, and the next state of the down codec."""
    payload, codec = contract.method.down.encode(step.code, codec, contract.peer(version, EVERYONE))
    lanes = {wire.COORDS: payload}
    if step.shared:
        lanes[wire.SHARED] = raw(step.shared)
    if step.buffers:
        lanes[wire.BUFFERS] = raw(step.buffers)
    return wire.pack_body(wire.Body(step.names, lanes), contract.schema), codec


def unpack_step(contract: Contract, data: bytes | memoryview, version: int, device: torch.device) -> Step:
    """An entry from bytes that may come from anywhere."""
    body = wire.unpack_body(data, contract.schema)
    names = planned_names(contract, body)
    expect_lanes(
        body,
        {wire.COORDS}
        | ({wire.BUFFERS} if contract.buffers.blocks else set())
        | ({wire.SHARED} if contract.shared.blocks else set()),
    )
    spec = contract.method.sketch.spec(contract.coords.restrict(names))
    code = contract.method.down.decode(body.lanes[wire.COORDS], spec, contract.peer(version, EVERYONE))
    shared = unraw(body.lanes[wire.SHARED], contract.shared) if contract.shared.blocks else {}
    buffers = unraw(body.lanes[wire.BUFFERS], contract.buffers) if contract.buffers.blocks else {}
    return Step(names, to_device(code, device), to_device(shared, device), to_device(buffers, device))


def planned_names(contract: Contract, body: wire.Body) -> frozenset[str]:
    """The blocks of a body's plan; refuses private ones, so that nobody can ask for them or overwrite them."""
    names = frozenset(contract.coords.names) if body.plan is None else body.plan
    if private := names - frozenset(contract.sendable.names):
        raise WireError(f"the message is about block {min(private)!r}, which is private and never travels")
    return names


def expect_lanes(body: wire.Body, expected: Set[int]) -> None:
    """Refuse a body that lacks a lane, or has one that the method does not send."""
    if body.lanes.keys() != expected:
        raise WireError(f"the message has lanes {sorted(body.lanes)}, expected {sorted(expected)}")


def raw(tree: Tree) -> bytes:
    """A lane of numbers as they are."""
    return _RAW.encode(tree, {}, _NOBODY)[0]


def unraw(data: bytes, spec: Spec) -> Tree:
    """The numbers of such a lane."""
    return _RAW.decode(data, spec, _NOBODY)
