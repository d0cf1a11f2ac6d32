"""On the server: from the clients' messages to the next version, and the entry of the ledger that leads to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.threads import each
from thinwire.core.tree import Tree, add, all_finite, bring, restrict, scale, sub, tmap, to_device
from thinwire.errors import Diverged, WireError
from thinwire.masks.masks import NoMask
from thinwire.protocol.advance import advance, moved, switched
from thinwire.protocol.fields import (
    Step,
    Upload,
    WindowSnapshot,
    as_received,
    pack_end,
    pack_step,
    read_snapshot,
    read_step,
    unpack_up,
)
from thinwire.protocol.foresight import Foreseen
from thinwire.protocol.ledger import Ledger
from thinwire.protocol.method import NORM_BOUND
from thinwire.protocol.norm_bound import bound_uploads
from thinwire.protocol.secagg import secure_mean
from thinwire.protocol.setup import begin
from thinwire.protocol.state import Contract, Public, ServerState, device_of
from thinwire.schedules.base import Plan
from thinwire.sketches.base import Identity
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class Closed(NamedTuple):
    """A closed round: the server's next state, and which clients did not count as they wanted, and why."""

    server: ServerState
    bounded: dict[int, str]  # scaled down: see `bounds`
    refused: dict[int, str]  # left out, because the next state would not have been finite with them


def close_round(
    contract: Contract,
    server: ServerState,
    plan: Plan,
    messages: Mapping[int, Bytes],
    registered: int,
    noise: Key | None = None,
    foreseen: Foreseen | None = None,
) -> ServerState:
    """The server's state after `closed_round`."""
    return closed_round(contract, server, plan, messages, registered, noise, foreseen).server


def closed_round(
    contract: Contract,
    server: ServerState,
    plan: Plan,
    messages: Mapping[int, Bytes],
    registered: int,
    noise: Key | None = None,
    foreseen: Foreseen | None = None,
) -> Closed:
    """Average what the clients said and make the next version.

    Args:
        contract: the contract.
        server: the server's state.
        plan: the plan that the round was opened with.
        messages: one message a client, not trusted.
        registered: how many clients there are in all.
        noise: where privacy takes its noise from; by default the seed, which clients know.
        foreseen: the next version as the clients' device made it; taken if it is the one that their messages make.

    A message that cannot be decoded raises WireError. The whole next state is checked before it counts: if it is not
    finite, clients far beyond the median are left out, and if that does not help, Diverged is raised. The mean and the
    server's own memories lie on the CPU, where messages are decoded; the next version is made on the device of the
    public state.
    """
    now = contract.at(server.public.version)
    method, public = now.method, server.public
    if not messages:
        raise WireError(f"no client answered in the round from version {public.version}; ask again, or ask others")
    noise = noise or now.key.fold("release", public.version)
    if method.secure_aggregation:
        mean = secure_mean(now, plan, public.version, messages, noise)
        said = [Upload({}, 1.0, {}, {}, {})] * len(messages)
        return Closed(_next_state(contract, server, plan, said, registered, noise, None, mean), {}, {})
    clients, said = sorted(messages), read_uploads(now, server, plan, messages)
    start = to_device(restrict(public.coords, plan.names), "cpu") if method.upload == "weights" else {}
    buffers = to_device(public.buffers, "cpu")
    limit = 0.0 if method.privacy.bounds else method.norm_bound
    uploads, bounded = bound_uploads(clients, said, limit, start, buffers)
    try:
        return Closed(_next_state(contract, server, plan, uploads, registered, noise, foreseen), bounded, {})
    except Diverged:
        far = bound_uploads(clients, said, NORM_BOUND, start, buffers).why
        left = [one for client, one in zip(clients, uploads, strict=True) if client not in far]
        if not far or not left or method.privacy.bounds:  # there one client must not decide who else counts
            raise
    refused = {client: f"the next state is not finite with it: {why}" for client, why in far.items()}
    return Closed(_next_state(contract, server, plan, left, registered, noise), bounded, refused)


def read_uploads(contract: Contract, server: ServerState, plan: Plan, messages: Mapping[int, Bytes]) -> list[Upload]:
    """What clients sent, decoded and checked, in the order of their numbers."""
    version, masks = server.public.version, masks_of(contract, server.public, messages)
    return each(
        lambda client: unpack_up(contract, plan, version, client, messages[client], masks[contract.tier(client)]),
        sorted(messages),
        contract.code.nbytes,
    )


def _next_state(
    contract: Contract,
    server: ServerState,
    plan: Plan,
    said: list[Upload],
    registered: int,
    noise: Key,
    foreseen: Foreseen | None = None,
    mean: Tree | None = None,
) -> ServerState:
    """The state that these uploads lead to, all of it finite; `mean` where only that is known, as it is released."""
    whole, contract = contract, contract.at(server.public.version)
    method, public = contract.method, server.public
    device = device_of(public)
    coords = to_device(restrict(public.coords, plan.names), "cpu")
    weights = [one.weight for one in said]
    if mean is None:
        factors = [method.correction.factor(one.report) for one in said]
        codes = [one.code if f == 1.0 else scale(one.code, f) for one, f in zip(said, factors, strict=True)]
        codes, weights = method.aggregator.admit(codes, weights)
        mean = method.privacy.aggregate(codes, partial(method.aggregator.of, weights=weights), len(said), noise)
    if method.upload == "weights":
        mean = sub(mean, coords)
    planned, sketch_key = contract.coords.restrict(plan.names), contract.sketch_key(public.version)
    decoded = mean
    if not isinstance(method.sketch, Identity):
        decoded = to_device(method.sketch.decode(to_device(mean, device), planned, sketch_key), "cpu")
    schedule = method.schedule.observe(
        server.schedule, plan, decoded, method.aggregator.of([one.noted for one in said], weights)
    )
    fraction = len(said) / registered
    # memories of server and optimiser belong to blocks; those that did not speak keep theirs as they were
    silent = contract.code.named - mean.keys()
    mine = _of_blocks(server.correction, silent)
    mean, shared, mine = method.correction.server(
        mean, method.aggregator.of([one.report for one in said], weights), fraction, mine
    )
    moving = method.server_opt_at(public.version)
    change, opt = moving.update(scale(mean, -1.0), _of_blocks(server.opt, silent), coords)
    if foreseen is None and not all_finite(change):  # before the codec: what it makes of a NaN is not defined
        raise Diverged(f"the step to version {public.version + 1} is not finite; try a smaller learning rate")
    if method.mask.prunes and (left := method.mask.left(coords, add(coords, change), public.version + 1)):
        change = tmap(lambda step, now, stays: torch.where(stays, step, -now), change, coords, left)
        opt = {name: _under(block, left.get(name.split("/", 1)[-1])) for name, block in opt.items()}
    if moving_at := restrict(contract.moving, change.keys()) if contract.moving else {}:
        change = tmap(lambda step, moves: torch.where(moves, step, 0), change, moving_at)  # noise, too, stays out
        opt = {name: _under(block, moving_at.get(name.split("/", 1)[-1])) for name, block in opt.items()}
    opt = {**server.opt, **opt}
    step = Step(plan.names, change)
    codec = server.codec
    body = b""
    if method.download == "incremental":
        body, codec = pack_step(contract, step, public.version, server.codec)
        step = read_step(contract, wire.unpack_body(body, contract.schema), public.version, torch.device("cpu"))
    if foreseen is not None and not foreseen.confirmed(step.code):
        foreseen = None
    buffers = method.aggregator.of([one.buffers for one in said], weights)
    if foreseen is not None:
        reached = foreseen.coords
    else:
        code, shared, buffers = bring((step.code, shared, buffers), device)
        reached = moved(contract, public, Step(step.names, code))
    end = None
    if method.download == "incremental" and public.version + 1 == contract.window_end(public.version):
        values = to_device(restrict(reached, plan.names), "cpu")
        end = pack_end(contract, WindowSnapshot(plan.names, values), public.version + 1)
        if contract.settles:  # everybody merges what the codec leaves, also those who followed every entry
            settled = read_snapshot(contract, wire.unpack_body(end, contract.schema), device, public.version + 1)
            reached, body = {**reached, **settled.values}, end
        elif method.space.redraw_every == 1:
            end = body  # one entry says it all
    after = advance(contract, public, reached, public.version + 1)._replace(
        shared={**public.shared, **add(restrict(public.shared, shared), shared)}, buffers=buffers or public.buffers
    )
    fine = foreseen is not None and math.isfinite(foreseen.total.item())
    if not fine and not (all_finite(after.coords) and (after.base is public.base or all_finite(after.base))):
        raise Diverged(f"the weights of version {after.version} are not finite; try a smaller learning rate")
    if (next_stage := whole.at(after.version)) is not contract:
        return _checked(begin(next_stage, switched(contract, next_stage, after)))
    if contract.window(after.version) != contract.window(public.version):
        # what was remembered of the old coordinates means nothing in the new ones
        opt, codec = moving.init(contract.code.zeros()), method.down.init(contract.code)
    ledger = append_entry(contract, server, plan, body, end)
    return _checked(ServerState(after, opt, {**server.correction, **mine}, schedule, codec, ledger))


def _checked(server: ServerState) -> ServerState:
    """The same state; raises Diverged if a memory of the server, of the correction or a buffer is not finite."""
    public = server.public
    parts = (("optimizer", server.opt), ("correction", server.correction), ("correction", public.shared))
    for part, tree in (*parts, ("schedule", server.schedule), ("codec", server.codec), ("buffers", public.buffers)):
        if not all_finite(tree):
            raise Diverged(
                f"the state of the {part} of version {public.version} is not finite; try a smaller learning rate"
            )
    return server


def append_entry(contract: Contract, server: ServerState, plan: Plan, body: bytes, end: bytes | None) -> Ledger:
    """The ledger with one more entry, and where its window ended if it did."""
    if contract.method.download == "full":  # nobody replays: it only remembers when each block was synchronised
        return server.ledger.append(b"", plan.names, limit=-1, longest=-1)
    # what is longer than the state that it makes serves nobody; after a merge that state holds the whole base
    return server.ledger.append(
        body,
        plan.names,
        limit=contract.coords.nbytes + contract.weights.nbytes,
        longest=contract.coords.nbytes + 16,  # the coordinates, and at least what a body adds to them
        end=end,
    )


def masks_of(contract: Contract, public: Public, clients: Iterable[int]) -> dict[int, Tree]:
    """Which numbers clients of each tier train: what they receive decides it."""
    downs = {contract.tier(client): contract.down(client) for client in clients}
    if isinstance(contract.method.mask, NoMask):
        return {tier: {} for tier in downs}
    return {tier: contract.trained(as_received(contract, public, down)) for tier, down in downs.items()}


def _under(block: Tensor, mask: Tensor | None) -> Tensor:
    """An optimiser's memory without what belongs to numbers that are gone."""
    return block if mask is None or mask.shape != block.shape else torch.where(mask, block, 0)


def _of_blocks(state: Tree, silent: frozenset[str]) -> Tree:
    """A state without what belongs to silent blocks: `fc.weight`, or `momentum/fc.weight`."""
    return {name: value for name, value in state.items() if not {name, name.split("/", 1)[-1]} & silent}
