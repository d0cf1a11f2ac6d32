"""On the clients: inputs of local training, and from its outcome to uploads.

Clients that start from the same public state are handled together: their trees are stacked, with the clients on the
first axis. They train on the device of the public state. Their states, and all that becomes bytes, are on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.core.parallel import each
from thinwire.core.tree import (
    State,
    Tree,
    Vector,
    all_finite,
    grand_total,
    repeat,
    restrict,
    smap,
    stack,
    stack_states,
    state_to_device,
    sub,
    tmap,
    to_device,
    unstack,
)
from thinwire.errors import Diverged, IncompatibleParts
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.protocol.method import Method
from thinwire.protocol.state import ClientState, PublicState
from thinwire.protocol.upload import raw
from thinwire.schedules.base import Plan
from thinwire.training.inputs import TrainableModel, TrainingInputs, TrainingOutcome, Workload
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class Group(NamedTuple):
    """Some clients of a cohort that start from the same public state and are trained together."""

    public: PublicState
    plan: Plan
    clients: tuple[int, ...]
    states: tuple[ClientState, ...]


class Masks(Protocol):
    """Hides payloads whose sum can be revealed, such as `secure.masks.SecAggCohort`."""

    def mask(self, contract: Contract, payload: Bytes, weight: float, version: int, client: int) -> bytes:
        """The payload of a client under the masks of this round."""
        ...


class Update(NamedTuple):
    """The updates of a group after local training; trees are stacked, with the clients on the first axis."""

    code: Tree  # what is encoded for upload; `Vector` where all blocks have one type
    schedule_report: Tree
    unsent: Tree  # changes of blocks outside the plan
    moved: Tree  # from where clients started; only where the correction needs it
    buffers: Tree
    shared: Tree  # the public state of the correction
    opt: State  # where it is kept for the next round
    loss: Tensor
    total: Tensor  # the sum of code, report and buffers: not finite if one of their values is not
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    wide: Tensor | None = None  # the code with free memory around each row, where a message can be written

    def client(self, i: int) -> Update:
        """The update of the client at position i (views)."""
        return self._replace(
            code=unstack(self.code, i),
            schedule_report=unstack(self.schedule_report, i),
            unsent=unstack(self.unsent, i),
            moved=unstack(self.moved, i),
            buffers=unstack(self.buffers, i),
            opt={slot: unstack(tree, i) for slot, tree in self.opt.items()},
        )


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


# -- before local training ---------------------------------------------------------------------------------------------


def training_inputs(contract: Contract, model: TrainableModel, group: Group, work: Workload) -> TrainingInputs:
    """The inputs of local training for a group of clients."""
    public, version = group.public, group.public.version
    contract = contract.at(version)
    method, device, space = contract.method, public.device, contract.method.space
    basis, start = contract.basis(version, device), _starts(group)
    own: Tree = {}
    if method.correction.active:
        own = to_device(stack([state.correction for state in group.states]), device)
    differ = space.reparametrized or any(state.unsent for state in group.states)
    return TrainingInputs(
        model=model,
        space=contract.training_space,
        optimizer=method.client_opt,
        correction=method.correction,
        penalty=method.penalty,
        base=public.base,
        basis=basis,
        shared=public.shared,
        buffers=public.buffers,
        start=space.to_trained(public.base, basis, start) if space.reparametrized else start,
        correction_state=own,
        work=work,
        opt_state=_optimizer_states(contract, group),
        trainable=to_device(contract.trained(public), device) if method.mask.active else {},
        private=contract.private,
        lr_factor=None if method.lr_schedule.constant else method.lr_schedule.factor(version),
        common_start=public.coords.data if isinstance(public.coords, Vector) and not differ else None,
    )


def _starts(group: Group) -> Tree:
    """Stacked initial coordinates: the public ones, plus each client's unsent changes."""
    coords, states = group.public.coords, group.states
    start = repeat(coords, len(states))
    for name in {name for state in states for name in state.unsent}:
        zero = torch.zeros_like(coords[name], device="cpu")
        unsent = torch.stack([state.unsent.get(name, zero) for state in states])
        start[name] = start[name] + unsent.to(coords[name].device)
    return start


def keeps_optimizer(method: Method, version: int) -> bool:
    """Whether the round that starts from this version begins with optimizer states of earlier rounds."""
    return method.opt_lifetime == "run" or (method.opt_lifetime == "window" and not method.schedule.resamples(version))


def _optimizer_states(contract: Contract, group: Group) -> State:
    """Stacked optimizer states: those that clients kept, or new ones for those that have none."""
    public, method = group.public, contract.method
    if not keeps_optimizer(method, public.version):
        return {slot: repeat(tree, len(group.clients)) for slot, tree in method.client_opt.init(public.coords).items()}
    fresh = state_to_device(method.client_opt.init(public.coords), "cpu")
    # within a window a client that missed a round starts again
    first = contract.since if method.opt_lifetime == "run" else public.version - 1
    window = contract.window(public.version)  # of the basis: momentum of old coordinates has no meaning in new ones
    kept = [
        state.opt if state.opt and state.version >= first and contract.window(state.version) == window else fresh
        for state in group.states
    ]
    return state_to_device(stack_states(kept), public.device)


# -- after local training ----------------------------------------------------------------------------------------------


def updates(contract: Contract, group: Group, inputs: TrainingInputs, outcome: TrainingOutcome) -> Update:
    """The updates of a group from the outcome of local training, on its device."""
    contract, public, plan = contract.at(group.public.version), group.public, group.plan
    method, start = contract.method, inputs.start
    coords = outcome.coords
    if method.space.reparametrized:
        coords = _coordinates(contract, group, start, coords)
    delta = sub(coords, public.coords)
    code = restrict(delta if method.upload == "delta" else coords, plan.names)
    report: Tree = {}
    sent = contract.sent(plan)
    if sent.report.blocks:
        report = method.schedule.reports(restrict(delta, plan.names), plan)
    if not method.sketch.is_identity or method.privacy.active:
        code = stack([_code(contract, unstack(code, i), public.version, c) for i, c in enumerate(group.clients)])
    unsent: Tree = {}
    if not plan.names.issuperset(delta):
        unsent = {name: block for name, block in delta.items() if name not in plan.names}
    code = Vector.rows(code, sent.code)
    return Update(
        code,
        report,
        unsent,
        moved=restrict(sub(outcome.coords, start), contract.sendable.names) if contract.has_client_correction else {},
        buffers=outcome.buffers,
        shared=public.shared,
        opt=outcome.opt_state if keeps_optimizer(method, public.version + 1) else {},
        loss=outcome.loss,
        total=grand_total(code, report, outcome.buffers),
        steps=inputs.work.steps if contract.has_client_correction else (),
        samples=inputs.work.samples,
    )


def _coordinates(contract: Contract, group: Group, start: Tree, trained: Tree) -> Tree:
    """The stacked coordinates of trained values; those of values that training did not change stay the same."""
    public, basis = group.public, contract.basis(group.public.version, group.public.device)
    made = contract.method.space.from_trained(public.base, basis, trained)
    return tmap(lambda now, was, new, old: torch.where(now == was, old, new), trained, start, made, _starts(group))


def _code(contract: Contract, sent: Tree, version: int, client: int) -> Tree:
    """The sketch of one client's update, bounded by the privacy mechanism."""
    code = contract.method.sketch.encode(sent, contract.sketch_key(version))
    return contract.method.privacy.bound(code, contract.key.fold("privacy", version, client))


def make_uploads(
    contract: Contract, group: Group, update: Update, masks: Masks | None = None
) -> list[tuple[Bytes, ClientState]]:
    """The upload and the next state of each client of a group.

    Args:
        contract: the contract.
        group: the clients.
        update: their updates, on the CPU.
        masks: hides payloads; needed for secure aggregation.
    """
    public, plan = group.public, group.plan
    version, contract = public.version, contract.at(public.version)
    method, lr = contract.method, contract.client_opt(version).lr
    hints = contract.hints(public) if contract.has_hints else {}
    finite = math.isfinite(update.total.item())
    unchanged = ClientState(version)  # one object for all clients that keep nothing

    def upload(i: int) -> tuple[Bytes, ClientState]:
        client, state, mine = group.clients[i], group.states[i], update.client(i)
        own, report = state.correction, dict[str, Tensor]()
        if contract.has_client_correction:
            own, report = method.correction.finish(mine.moved, mine.steps[i], lr, own, mine.shared)
        # before the codec, whose result for a NaN is not defined
        check = (report,) if finite else (report, mine.code, mine.schedule_report, mine.buffers)
        if not all(all_finite(tree) for tree in check if tree):
            raise Diverged(f"client {client} trained to a value that is not finite; try a smaller learning rate")
        codec, kept = contract.up(client), state.codec
        if kept and (state.version < contract.since or contract.window(state.version) != contract.window(version)):
            kept = codec.init(contract.code)  # the basis was redrawn since
        payload, kept = codec.encode(mine.code, kept, contract.peer(version, client, hints))
        weight = method.client_weight.weight(mine.samples[i])
        fields = {wire.COORDS: payload}
        if method.secure_aggregation:
            if masks is None:
                raise IncompatibleParts("secure_aggregation = true needs the cohort and its secrets: pass masks")
            fields[wire.COORDS] = masks.mask(contract, payload, weight, version, client)
        else:
            if method.client_weight.sent:
                fields[wire.WEIGHT] = wire.pack_weight(weight)
            trees = {wire.BUFFERS: mine.buffers, wire.SHARED: report, wire.REPORT: mine.schedule_report}
            fields |= {number: raw(tree) for number, tree in trees.items() if tree}
        room = None if update.wide is None else update.wide[i].view(torch.uint8).numpy()
        body = wire.body_parts(wire.Body(plan.names, fields), contract.schema)
        message = wire.join(wire.pack_parts(wire.UP, version, body, contract.schema.sent_by(client)).parts, room)
        if not (mine.unsent or own or kept or mine.opt):
            return message, unchanged
        # clones: a view would keep the blocks of all clients in memory
        return message, ClientState(version, tmap(torch.clone, mine.unsent), own, kept, smap(torch.clone, mine.opt))

    return each(upload, range(len(group.clients)), contract.code.nbytes)
