"""Ledger entries: what one version adds, and where the coordinates of a window are, as the bytes that are sent."""

from __future__ import annotations

from typing import NamedTuple

import torch

from thinwire.core.tree import Tree, bring
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.fields import expect_fields, planned_names, raw, unraw
from thinwire.wire import message as wire
from thinwire.wire.bits import varint


class ServerStep(NamedTuple):
    """What one version adds: the aggregated code of the synchronized blocks, or what was recovered from it."""

    names: frozenset[str]
    code: Tree


class WindowSnapshot(NamedTuple):
    """The values of some coordinates after several versions of one window."""

    names: frozenset[str]
    values: Tree


def pack_step(contract: Contract, step: ServerStep, version: int, codec: Tree) -> tuple[bytes, Tree]:
    """The entry that leads from `version` to the next one, as it is broadcast, and the next state of the codec."""
    payload, codec = contract.method.down.encode(step.code, codec, contract.peer(version, EVERYONE))
    return wire.pack_body(wire.Body(step.names, {wire.COORDS: payload}), contract.schema), codec


def read_step(contract: Contract, body: wire.Body, version: int, device: torch.device) -> ServerStep:
    """The entry that leads from `version` to the next one, from a body that is not trusted."""
    names = planned_names(contract, body)
    expect_fields(body, {wire.COORDS})
    spec = contract.step_of(contract.coords.restrict(names))
    code = contract.method.down.decode(body.fields[wire.COORDS], spec, contract.peer(version, EVERYONE))
    return ServerStep(names, *bring((code,), device))


def pack_snapshot(contract: Contract, snapshot: WindowSnapshot) -> bytes:
    """A snapshot within a window, as it is sent: encoded by the merge codec where that is exact, else raw."""
    if contract.method.merge_codec.exact:
        payload, _ = contract.method.merge_codec.encode(snapshot.values, {}, contract.peer(0, EVERYONE))
    else:
        payload = raw(snapshot.values)
    return wire.pack_body(wire.Body(snapshot.names, {wire.VALUES: payload}), contract.schema)


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
