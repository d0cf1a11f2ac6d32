"""On the clients: inputs of local training, and from its outcome to uploads.

Clients that start from the same public state are handled together: their trees are stacked, with the clients on the
first axis. They train on the device of the public state. Their states, and all that becomes bytes, are on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.core.flat_rows import blocks_of_one
from thinwire.core.rows import Rows, as_rows
from thinwire.core.state import State, smap, stack_states, state_to_device
from thinwire.core.threads import LEAST, MOST_PINNED, each, pinned_empty
from thinwire.core.tree import (
    Tree,
    all_finite,
    bring_async,
    cut,
    grand_total,
    restrict,
    stack,
    sub,
    tmap,
    to_device,
    unstack,
)
from thinwire.errors import Diverged, IncompatibleParts
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.method import Method
from thinwire.protocol.starts import Group as Group, common_start, coordinates, trained_starts
from thinwire.protocol.state import ClientState, PublicState
from thinwire.protocol.upload import UploadContent, pack_upload
from thinwire.schedules.base import Plan
from thinwire.training.inputs import TrainableModel, TrainingInputs, TrainingOutcome, Workload
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class Masks(Protocol):
    """Hides payloads whose sum can be revealed, such as `secure.masks.SecAggCohort`."""

    def mask(self, contract: Contract, payload: Bytes, weight: float, version: int, client: int) -> bytes:
        """The payload of a client under the masks of this round."""
        ...


class UploadContext(NamedTuple):
    """What is the same for all uploads of a group."""

    version: int
    plan: Plan
    shared: Tree  # the public state of the correction, on the CPU
    hints: Tree  # see `Contract.hints`
    masks: Masks | None = None


class ClientUpdate(NamedTuple):
    """One client's update after local training, on the CPU."""

    code: Tree  # what is encoded for upload
    schedule_report: Tree
    unsent: Tree  # changes of blocks outside the plan
    moved: Tree  # from where the client started; only where the correction needs it
    buffers: Tree
    opt: State  # where it is kept for the next round
    steps: int
    finite: bool  # False if a value of the code, the report or the buffers of some client of the group is not finite


class Updates(NamedTuple):
    """The updates of a group; trees are stacked, with the clients on the first axis."""

    code: Tree  # one matrix under the name "" where `names` is given
    names: tuple[str, ...]
    like: tuple[Tensor, ...]  # tensors with the shapes of the blocks
    schedule_report: Tree
    unsent: Tree
    moved: Tree
    buffers: Tree
    shared: Tree
    opt: State
    loss: Tensor
    steps: tuple[int, ...]
    finite: bool
    rows: Rows | None = None  # of which the code is a part, on the CPU

    def client(self, i: int) -> ClientUpdate:
        """The update of the client at position i (views)."""
        code = cut(self.code[""][i], self.names, self.like) if self.names else unstack(self.code, i)
        trees = (self.schedule_report, self.unsent, self.moved, self.buffers)
        if not (any(trees) or self.opt):
            return ClientUpdate(code, {}, {}, {}, {}, {}, self.steps[i], self.finite)
        report, unsent, moved, buffers = (unstack(tree, i) if tree else {} for tree in trees)
        opt = {slot: unstack(tree, i) for slot, tree in self.opt.items()}
        return ClientUpdate(code, report, unsent, moved, buffers, opt, self.steps[i], self.finite)


def initial_client_state(contract: Contract, public: PublicState, client: int = EVERYONE) -> ClientState:
    """The state of a client that has not taken part yet: it derives version 0 from the seed.

    Args:
        contract: the contract.
        public: the public state of any version.
        client: the number of the client; needed where tiers of clients have different codecs.
    """
    contract = contract.at(public.version)
    own: Tree = {}
    if contract.method.correction.active:
        coords = restrict(public.coords, contract.sendable.names)
        own = to_device(contract.method.correction.init_client(coords), "cpu")
    return ClientState(version=0, correction=own, codec=contract.up(client).init(contract.code))


def drop_stale(state: ClientState, synced: frozenset[str]) -> ClientState:
    """Drop the unsent changes of blocks that were synchronized without this client."""
    if not state.unsent or not synced & state.unsent.keys():
        return state
    return replace(state, unsent={name: block for name, block in state.unsent.items() if name not in synced})


def training_inputs(contract: Contract, model: TrainableModel, group: Group, work: Workload) -> TrainingInputs:
    """The inputs of local training for a group of clients."""
    public, version = group.public, group.public.version
    contract = contract.at(version)
    method, device = contract.method, public.device
    return TrainingInputs(
        model,
        contract.training_space,
        method.client_opt,
        method.correction,
        method.penalty,
        public.base,
        contract.basis(version, device),
        public.shared,
        public.buffers,
        trained_starts(contract, group),
        to_device(stack([state.correction for state in group.states]), device) if method.correction.active else {},
        work,
        _optimizer_states(contract, group),
        to_device(contract.trained(public), device) if method.mask.active else {},
        contract.private,
        None if method.lr_schedule.constant else method.lr_schedule.factor(version),
        common_start(contract, group),
    )


class PendingUpdates(NamedTuple):
    """The updates of a group on their way to the CPU; a call waits until they are there.

    Args:
        wait: waits and returns the updates.
        codes: the codes on the device of training, one row a client; None where blocks have several types.
    """

    wait: Callable[[], Updates]
    codes: Tensor | None

    def __call__(self) -> Updates:
        """Wait, and return the updates."""
        return self.wait()


def begin_updates(contract: Contract, group: Group, start: Tree, outcome: TrainingOutcome) -> PendingUpdates:
    """Updates from the outcome of local training. A call of the result waits until they are on the CPU.

    Args:
        contract: the contract.
        group: the clients.
        start: the stacked values that training started from.
        outcome: the outcome of training.

    In between, a GPU can be given further work, which does not delay the transfer.
    """
    contract, public, plan = contract.at(group.public.version), group.public, group.plan
    method = contract.method
    trained, outcome = outcome.coords, outcome._replace(coords=coordinates(contract, group, start, outcome.coords))
    delta = sub(outcome.coords, public.coords)
    sent = restrict(delta if method.upload == "delta" else outcome.coords, plan.names)
    report: Tree = {}
    if contract.upload_fields(plan)[2].blocks:
        report = method.schedule.reports(restrict(delta, plan.names), plan)
    if not method.sketch.is_identity or method.privacy.active:
        sent = stack([_code(contract, unstack(sent, i), public.version, c) for i, c in enumerate(group.clients)])
    unsent: Tree = {}
    if not plan.names.issuperset(delta):
        unsent = {name: block for name, block in delta.items() if name not in plan.names}
    moved = restrict(sub(trained, start), contract.sendable.names) if contract.has_client_correction else {}
    opt = outcome.opt_state if _keeps_optimizer(method, public.version + 1) else {}
    names, like = tuple(sent), blocks_of_one(sent)
    if (rows := as_rows(sent)) is not None:  # one row a client: the codec gets contiguous values
        sent = {"": rows.whole}
    sums = {"loss": outcome.loss, "all": grand_total(sent, report, outcome.buffers)}
    trees = [sent, report, unsent, moved, outcome.buffers, public.shared, sums, *opt.values()]
    arrive = bring_async(trees, "cpu")

    def wait() -> Updates:
        code, notes, kept, ways, buffers, shared, sums, *slots = arrive()
        here = None if rows is None else rows._replace(whole=code[""])
        return Updates(
            *(code if here is None else {"": here.values}, names if here else (), like, notes, kept, ways, buffers),
            *(shared, dict(zip(opt, slots, strict=True)), sums["loss"], outcome.steps),
            *(math.isfinite(sums["all"].item()), here),
        )

    return PendingUpdates(wait, None if rows is None else rows.values)


def make_uploads(
    contract: Contract, group: Group, updates: Updates, samples: tuple[int, ...], masks: Masks | None = None
) -> tuple[list[Bytes], list[ClientState]]:
    """The upload and the next state of each client of a group.

    Args:
        contract: the contract.
        group: the clients.
        updates: their updates.
        samples: number of examples of each.
        masks: hides payloads; needed for secure aggregation.
    """
    contract, public = contract.at(group.public.version), group.public
    context = UploadContext(public.version, group.plan, updates.shared, contract.hints(public), masks)
    pinned = public.device.type == "cuda" and len(group.clients) * contract.code.nbytes <= MOST_PINNED
    allocate = partial(pinned_empty, pinned=pinned)
    unchanged = ClientState(public.version)  # one object for all clients that keep nothing

    def one(i: int) -> tuple[Bytes, ClientState]:
        client = group.clients[i]
        pieces, state = make_upload(contract, context, client, group.states[i], updates.client(i), samples[i])
        message: Bytes
        if wire.length(pieces) < LEAST:
            message = wire.join_pieces(pieces)
        else:  # around the values, without a copy, if the codec sends them as they are
            message = wire.join_pieces(pieces, allocate, updates.rows.room(i) if updates.rows else None)
        return message, unchanged if state.is_empty else state

    messages, states = zip(*each(one, range(len(group.clients)), contract.code.nbytes), strict=True)
    return list(messages), list(states)


def make_upload(
    contract: Contract, context: UploadContext, client: int, state: ClientState, update: ClientUpdate, samples: int
) -> tuple[wire.Pieces, ClientState]:
    """One client's upload, in pieces, and its next state: correction, codec, masking, packing.

    Args:
        contract: the contract at this version.
        context: what is the same for all clients of the group.
        client: the number of the client.
        state: its state before the round.
        update: its update.
        samples: its number of examples.
    """
    method, version = contract.method, context.version
    own, report = state.correction, dict[str, Tensor]()
    if contract.has_client_correction:
        lr = contract.client_opt(version).lr
        own, report = method.correction.finish(update.moved, update.steps, lr, own, context.shared)
    # before the codec, whose result for a NaN is not defined
    check = (report,) if update.finite else (report, update.code, update.schedule_report, update.buffers)
    if not all(all_finite(tree) for tree in check if tree):
        raise Diverged(f"client {client} trained to a value that is not finite; try a smaller learning rate")
    codec_state = _codec_state(contract, client, state, version) if state.codec else state.codec
    payload, codec_state = contract.up(client).encode(
        update.code, codec_state, contract.peer(version, client, context.hints)
    )
    weight, content = method.client_weight.weight(samples), None
    if method.secure_aggregation:
        if context.masks is None:
            raise IncompatibleParts("secure_aggregation = true needs the cohort and its secrets: pass masks")
        payload = context.masks.mask(contract, payload, weight, version, client)
    else:
        content = UploadContent(weight, update.buffers, report, update.schedule_report)
    pieces = pack_upload(contract, context.plan, version, client, payload, content)
    # clones: a view would keep the blocks of all clients in memory
    unsent = tmap(torch.clone, update.unsent) if update.unsent else {}
    opt = smap(torch.clone, update.opt) if update.opt else {}
    return pieces, ClientState(version, unsent, own, codec_state, opt)


def _code(contract: Contract, sent: Tree, version: int, client: int) -> Tree:
    """The sketch of one client's update, bounded by the privacy mechanism."""
    code = contract.method.sketch.encode(sent, contract.sketch_key(version))
    return contract.method.privacy.bound(code, contract.key.fold("privacy", version, client))


def _codec_state(contract: Contract, client: int, state: ClientState, version: int) -> Tree:
    """The state of a client's upload codec, which is reset if the basis was redrawn since."""
    stale = state.version < contract.since or contract.window(state.version) != contract.window(version)
    return contract.up(client).init(contract.code) if stale else state.codec


def _keeps_optimizer(method: Method, version: int) -> bool:
    """Whether the round that starts from this version begins with optimizer states of earlier rounds."""
    return method.opt_lifetime == "run" or (method.opt_lifetime == "window" and not method.schedule.resamples(version))


def _optimizer_states(contract: Contract, group: Group) -> State | None:
    """Stacked optimizer states that clients kept, or new ones for those that have none; None if nobody keeps any."""
    public, method = group.public, contract.method
    if not _keeps_optimizer(method, public.version):
        return None
    fresh = state_to_device(method.client_opt.init(public.coords), "cpu")
    first = public.version - 1  # within a window a client that missed a round starts again
    if method.opt_lifetime == "run":
        first = contract.since
    window = contract.window(public.version)  # of the basis: momentum of old coordinates has no meaning in new ones
    kept = [
        state.opt if state.opt and state.version >= first and contract.window(state.version) == window else fresh
        for state in group.states
    ]
    return state_to_device(stack_states(kept), public.device)
