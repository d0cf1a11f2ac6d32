"""Ledger entries: what one version adds, and where the coordinates of a window are, as the bytes that are sent."""

from __future__ import annotations

from typing import NamedTuple

import torch

from thinwire.core.threads import LEAST, empty_long
from thinwire.core.tree import Tree, bring
from thinwire.protocol.contract import EVERYONE, STACKED, Contract
from thinwire.protocol.fields import expect_fields, planned_names, raw, unraw
from thinwire.spaces.base import Stack, Stacking
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes, read_varint, varint


class ServerStep(NamedTuple):
    """What one version adds: the aggregated code of the synchronized blocks, or what was recovered from it."""

    names: frozenset[str]
    code: Tree
    stack: Stack | None = None  # what it adds to the base, in a space with `stacking`


class WindowSnapshot(NamedTuple):
    """The values of some coordinates after several versions of one window."""

    names: frozenset[str]
    values: Tree


def pack_step(contract: Contract, step: ServerStep, version: int, codec: Tree) -> tuple[Bytes, Tree]:
    """The entry that leads from `version` to the next one, as it is broadcast, and the next state of the codec."""
    fields: dict[int, Bytes] = {wire.COORDS: b""}
    if contract.step.blocks:
        fields[wire.COORDS], codec = contract.method.down.encode(step.code, codec, contract.peer(version, EVERYONE))
    if step.stack is not None:
        fields[wire.STACK] = _pack_stack(contract, step.stack, version)
    parts = tuple(wire.body_parts(wire.Body(step.names, fields), contract.schema))
    if wire.length(parts) < LEAST:
        return b"".join(parts), codec
    return memoryview(wire.join_pieces(parts, lambda size: empty_long(size).numpy())).toreadonly(), codec


def read_step(contract: Contract, body: wire.Body, version: int, device: torch.device) -> ServerStep:
    """The entry that leads from `version` to the next one, from a body that is not trusted."""
    names = planned_names(contract, body)
    stacking = contract.method.space.stacking
    expect_fields(body, {wire.COORDS} if stacking is None else {wire.COORDS, wire.STACK})
    spec, data = contract.step_of(contract.coords.restrict(names)), body.fields[wire.COORDS]
    if not contract.step.blocks:
        code = unraw(data, spec)
    else:
        code = contract.method.down.decode(data, spec, contract.peer(version, EVERYONE))
    if stacking is None:
        return ServerStep(names, bring((code,), device)[0])
    count, blocks = _read_stack(contract, stacking, body.fields[wire.STACK], version)
    code, blocks = bring((code, blocks), device)
    return ServerStep(names, code, Stack(count, blocks))


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


def snapshot_parts(contract: Contract, snapshot: WindowSnapshot) -> tuple[Bytes, ...]:
    """A snapshot within a window, as it is sent: encoded by the merge codec where that is exact, else raw.

    In parts, so that a long payload is not copied.
    """
    if contract.method.merge_codec.exact:
        payload, _ = contract.method.merge_codec.encode(snapshot.values, {}, contract.peer(0, EVERYONE))
    else:
        payload = raw(snapshot.values)
    return tuple(wire.body_parts(wire.Body(snapshot.names, {wire.VALUES: payload}), contract.schema))


def least_snapshot(contract: Contract, names: frozenset[str]) -> int:
    """A lower bound on the length of a snapshot within a window; 0 where it depends on the values."""
    codec, spec = contract.method.merge_codec, contract.coords.restrict(names)
    values = codec.size(spec) if codec.exact else spec.nbytes
    return values + 1 + len(varint(values)) if values else 0


def pack_window_end(contract: Contract, snapshot: WindowSnapshot, version: int) -> bytes:
    """The snapshot at the end of the window that led to `version`, as it is sent: encoded by the merge codec."""
    payload, _ = contract.method.merge_codec.encode(snapshot.values, {}, contract.peer(version, EVERYONE))
    return wire.pack_body(wire.Body(snapshot.names, {wire.VALUES: payload}), contract.schema)


def read_snapshot(contract: Contract, body: wire.Body, device: torch.device, end: int | None = None) -> WindowSnapshot:
    """A snapshot, from a body that is not trusted.

    Args:
        contract: the contract.
        body: the body.
        device: the device of the result.
        end: the version of the snapshot, if its window ends there; None within a window.
    """
    names = planned_names(contract, body)
    expect_fields(body, {wire.VALUES})
    data, spec = body.fields[wire.VALUES], contract.coords.restrict(names)
    codec = contract.method.merge_codec
    if end is None and not codec.exact:
        values = unraw(data, spec)
    else:
        values = codec.decode(data, spec, contract.peer(end or 0, EVERYONE))
    return WindowSnapshot(names, *bring((values,), device))
