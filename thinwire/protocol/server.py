"""On the server: from decoded uploads to the next version.

    aggregate       the mean update, and the means of what clients report besides it
    next_version    correction, server optimizer, mask, broadcast codec, merge, ledger

Aggregates and the server's own states are on the CPU, where uploads are decoded; the next version is made on the device
of the public state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from thinwire.core.key import Key
from thinwire.core.tree import (
    State,
    Tree,
    Vector,
    add,
    all_finite,
    bring,
    merge_states,
    restrict,
    restrict_state,
    scale,
    sub,
    tmap,
    to_device,
)
from thinwire.errors import Diverged
from thinwire.protocol.contract import Contract
from thinwire.protocol.download import (
    Step,
    adds_up,
    advance,
    apply_step,
    pack_snapshot,
    pack_step,
    read_snapshot,
    read_step,
)
from thinwire.protocol.ledger import Ledger
from thinwire.protocol.receive import switch_stage
from thinwire.protocol.setup import UNRECOVERED, initial_optimizer_state, initial_server_state
from thinwire.protocol.state import PublicState, ServerState
from thinwire.protocol.upload import Upload
from thinwire.schedules.base import Plan
from thinwire.spaces.base import Stack
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class Aggregate(NamedTuple):
    """The aggregated uploads of a round, on the CPU."""

    update: Tree  # of the coordinates, or its sketch
    report: Tree  # of the correction
    schedule_report: Tree
    buffers: Tree
    stack: Stack | None = None  # what is added to the base


SumMasked = Callable[[Contract, Plan, int, Sequence[Bytes], Key, tuple[int, int]], Tree]
"""The sum of masked uploads; see `thinwire.secure.masks.sum_masked`."""


def aggregate(
    contract: Contract,
    public: PublicState,
    plan: Plan,
    uploads: Sequence[Upload],
    noise: Key | None = None,
    sum_masked: SumMasked | None = None,
) -> Aggregate:
    """Aggregate uploads with the aggregator and the privacy mechanism of the method.

    Args:
        contract: the contract at this version.
        public: the public state that clients trained from; in asynchronous rounds the current one.
        plan: the plan of the round.
        uploads: the uploads that count.
        noise: the source of noise for differential privacy; by default the seed, which clients know.
        sum_masked: sums masked uploads; needed for secure aggregation.
    """
    method, noise = contract.method, noise or contract.key.fold("release", public.version)
    moved = method.upload == "weights"  # the coordinates themselves are aggregated
    start: Tree = {}  # the coordinates that clients started from
    if moved or method.space.stacking is not None:
        start = to_device(restrict(public.coords, plan.names), "cpu")
    if method.secure_aggregation:
        assert sum_masked is not None, "secure_aggregation = true needs `sum_masked` of thinwire.secure.masks"
        payloads, began = [one.masked for one in uploads], uploads[0].began
        update = sum_masked(contract, plan, public.version, payloads, noise, began)
        return Aggregate(sub(update, start) if moved else update, {}, {}, {})
    codes, weights = [one.code for one in uploads], [one.weight for one in uploads]
    if method.correction.active:
        codes = _scaled(codes, [method.correction.factor(one.report) for one in uploads])
    if method.asynchronous.active:
        codes = _scaled(codes, [method.asynchronous.factor(one.staleness) for one in uploads])
    values = [add(start, code) for code in codes] if start and method.upload == "delta" else codes
    if not method.aggregator.is_weighted_mean:
        codes, weights = method.aggregator.admit(codes, weights, _beside(uploads))
    mean = partial(method.aggregator.of, weights=weights)
    update = method.privacy.aggregate(codes, mean, len(uploads), noise) if method.privacy.active else mean(codes)
    stack = None
    if (stacking := method.space.stacking) is not None:
        total = math.fsum(weights)
        stack = stacking.stack(values, [weight / total for weight in weights])
        update = restrict(update, contract.sent(plan).step.named)
    first = uploads[0]
    return Aggregate(
        sub(update, restrict(start, update)) if moved else update,
        mean([one.report for one in uploads]) if first.report else {},
        mean([one.schedule_report for one in uploads]) if first.schedule_report else {},
        mean([one.buffers for one in uploads]) if first.buffers else {},
        stack,
    )


def _beside(uploads: Sequence[Upload]) -> list[list[Tree]]:
    """What is averaged beside the updates, for each report and each buffer one tree of every client."""
    whole = [[one.report for one in uploads]] if uploads[0].report else []
    blocks = [("schedule_report", name) for name in uploads[0].schedule_report]
    blocks += [("buffers", name) for name in uploads[0].buffers]
    return whole + [[{name: getattr(one, part)[name]} for one in uploads] for part, name in blocks]


def _scaled(codes: Sequence[Tree], factors: Sequence[float]) -> list[Tree]:
    return [code if factor == 1.0 else scale(code, factor) for code, factor in zip(codes, factors, strict=True)]


class Change(NamedTuple):
    """The server's step before it is broadcast, and the states of the parts that made it."""

    change: Tree
    shared: Tree  # change of the public state of the correction
    opt: State
    correction: Tree


def next_version(contract: Contract, server: ServerState, plan: Plan, total: Aggregate, fraction: float) -> ServerState:
    """The server's state at the next version, all of it finite; raises Diverged otherwise.

    Args:
        contract: the contract.
        server: the server's state.
        plan: the plan of the round.
        total: the aggregated uploads.
        fraction: the fraction of all clients that took part.
    """
    whole, contract, public = contract, contract.at(server.public.version), server.public
    method, version, decoded = contract.method, public.version, total.update
    if not method.sketch.is_identity:
        planned, key = contract.coords.restrict(plan.names), contract.sketch_key(version)
        decoded = to_device(method.sketch.decode(to_device(decoded, public.device), planned, key), "cpu")
    schedule = method.schedule.observe(server.schedule, plan, decoded, total.schedule_report)
    made = _server_step(contract, server, plan, total, fraction)
    step, body, codec = _broadcast(contract, server, plan, Step(plan.names, made.change, total.stack))
    code, shared, buffers = bring((step.code, made.shared, total.buffers), public.device)
    coords = apply_step(contract, public, Step(step.names, code))
    end = None
    redraws = contract.window(version + 1) != contract.window(version)
    if redraws and method.download == "incremental":
        coords, body, end = _end_window(contract, public, plan, coords, body)
    stack = None if step.stack is None else step.stack._replace(blocks=to_device(step.stack.blocks, public.device))
    after = advance(contract, public, coords, version + 1, stack)
    if shared or buffers:
        shared = {**public.shared, **add(restrict(public.shared, shared), shared)}
        after = after._replace(shared=shared, buffers=buffers or public.buffers)
    if not (all_finite(after.coords) and (after.base is public.base or all_finite(after.base))):
        raise Diverged(f"the weights of version {after.version} are not finite; try a smaller learning rate")
    if (later := whole.at(after.version)) is not contract:
        return _finite(initial_server_state(later, switch_stage(contract, later, after)))
    opt = merge_states(server.opt, made.opt) if server.opt else made.opt
    if redraws:  # optimizer and codec states of the old coordinates have no meaning in the new basis
        opt, codec = initial_optimizer_state(contract), method.down.init(contract.step)
    exact = method.sends_sums and adds_up(public.coords, code, coords)
    ledger = append_entry(contract, server.ledger, plan, body, end, exact)
    return _finite(ServerState(after, opt, {**server.correction, **made.correction}, schedule, codec, ledger))


def _server_step(contract: Contract, server: ServerState, plan: Plan, total: Aggregate, fraction: float) -> Change:
    """The step of the server optimizer on the corrected mean update; states of other blocks do not change."""
    method, version, update = contract.method, server.public.version, total.update
    optimizer = contract.server_opt(version)
    coords: Tree = {}
    if optimizer.reads_coords or method.mask.active:
        coords = to_device(restrict(server.public.coords, plan.names), "cpu")
    shared, own = dict[str, torch.Tensor](), server.correction
    if method.correction.active:
        absent = contract.code.named - update.keys()
        own = {name: block for name, block in server.correction.items() if name not in absent}
        update, shared, own = method.correction.server(update, total.report, fraction, own)
    kept = {slot: tree for slot, tree in server.opt.items() if slot != UNRECOVERED}
    state = restrict_state(kept, update.keys()) if kept else kept
    change, opt = optimizer.server_step(update, state, coords)
    if not all_finite(change):  # before the codec, whose result for a NaN is not defined
        raise Diverged(f"the step to version {version + 1} is not finite; try a smaller learning rate")
    if method.mask.active:
        if method.mask.prunes and (left := method.mask.left(coords, add(coords, change), version + 1)):
            change = tmap(lambda step, now, stays: torch.where(stays, step, -now), change, coords, left)
            opt = _masked(opt, left)
        if moving := restrict(contract.moving, change.keys()):
            change = tmap(lambda step, moves: torch.where(moves, step, 0), change, moving)  # noise is masked, too
            opt = _masked(opt, moving)
    made = Change(change, shared, opt, own)
    return _recovered(contract, server, plan, made) if method.sketch.recovers else made


def _recovered(contract: Contract, server: ServerState, plan: Plan, made: Change) -> Change:
    """The update that the sketch recovers from this step and what earlier ones left; the rest is kept."""
    planned, key = contract.coords.restrict(plan.names), contract.sketch_key(server.public.version)
    total = add(restrict(server.opt[UNRECOVERED], made.change.keys()), made.change)
    update, left = contract.method.sketch.recover(total, planned, key)
    opt = _masked({**made.opt, UNRECOVERED: total}, left)
    return made._replace(change=update, opt=opt)


def _masked(opt: State, mask: Tree) -> State:
    """An optimizer state with zeros for the values outside a mask."""

    def kept(name: str, block: torch.Tensor) -> torch.Tensor:
        inside = mask.get(name)
        return block if inside is None or inside.shape != block.shape else torch.where(inside, block, 0)

    return {slot: {name: kept(name, block) for name, block in tree.items()} for slot, tree in opt.items()}


def _broadcast(contract: Contract, server: ServerState, plan: Plan, step: Step) -> tuple[Step, Bytes, Tree]:
    """The step as clients decode it, its ledger entry, and the next state of the download codec.

    The server applies the *decoded* step to its own state, so that a lossy codec cannot make it drift from its clients.
    """
    if contract.method.download == "full":  # broadcasts no steps
        return step, b"", server.codec
    version = server.public.version
    body, codec = pack_step(contract, step, version, server.codec)
    exact = contract.method.down.exact and step.stack is None
    if exact and isinstance(step.code, Vector) and step.code.spec == contract.sent(plan).step:
        return step, body, codec  # the body decodes to the same bits
    return read_step(contract, wire.unpack_body(body, contract.schema), version, torch.device("cpu")), body, codec


def _end_window(
    contract: Contract, public: PublicState, plan: Plan, coords: Tree, body: Bytes
) -> tuple[Tree, Bytes, Bytes]:
    """Coordinates, entry and snapshot of the end of the window that this round is the last of."""
    method, version = contract.method, public.version + 1
    end = pack_snapshot(contract, to_device(restrict(coords, plan.names), "cpu"), version)
    if not method.merge_codec.exact:  # everyone merges what the codec decodes, also those who have every entry
        decoded = read_snapshot(contract, wire.unpack_body(end, contract.schema), public.device, version)
        return {**coords, **decoded}, end, end
    return coords, body, body if method.space.redraw_every == 1 else end  # of a window of one round one entry is enough


def append_entry(
    contract: Contract, ledger: Ledger, plan: Plan, body: Bytes, end: Bytes | None, adds_up: bool = False
) -> Ledger:
    """The ledger with one more entry, and with a snapshot of the window's end if it ended."""
    if contract.method.download == "full":  # entries are not replayed: only the version of each block is needed
        return ledger.append(b"", plan.names, limit=-1, longest=-1)
    # drop entries larger than a full state; after a merge that state contains the whole base
    limit = contract.coords.nbytes + contract.weights.nbytes
    # the coordinates, and at least what a body adds to them; sums of entries are shorter than the entries
    longest = contract.coords.nbytes * (4 if contract.method.sends_sums else 1) + 16
    return ledger.append(body, plan.names, limit=limit, longest=longest, end=end, adds_up=adds_up)


def _finite(server: ServerState) -> ServerState:
    """The same state; raises Diverged if a state of a part, or a buffer, is not finite."""
    public = server.public
    trees = [("optimizer", tree) for tree in server.opt.values()]
    trees += [("correction", server.correction), ("correction", public.shared), ("schedule", server.schedule)]
    for part, tree in (*trees, ("codec", server.codec), ("buffers", public.buffers)):
        if tree and not all_finite(tree):
            raise Diverged(
                f"the state of the {part} of version {public.version} is not finite; try a smaller learning rate"
            )
    return server
