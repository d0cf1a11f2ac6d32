"""The round, as every engine calls it: open, train and answer, close; and `advance`, which both sides compute alike.

    server                                    client
    open_round   ── steps or state ──►        receive        public(v), bit for bit
                                              cohort_round   train, keep what is not sent, encode
    close_round  ◄── change ──────────
    advance: public(v) -> public(v + 1)       (the client does the same when it next hears)

The server applies the *decoded* broadcast to itself, so a lossy down link cannot make it drift from its clients. All
functions are pure: states go in and come out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import message as wire
from thinwire.core.rng import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, all_finite, repeat, restrict, scale, stack, sub, to_device, unstack, weighted_mean
from thinwire.errors import ConfigError, Diverged, IncompatibleParts, WireError
from thinwire.rounds.advance import advance
from thinwire.rounds.lanes import Step, pack_step, raw, unpack_step, unpack_up
from thinwire.rounds.ledger import Ledger
from thinwire.rounds.local import Learner, Vectorise, Workload, local_train
from thinwire.rounds.method import Method
from thinwire.rounds.state import ClientState, Contract, Public, ServerState, device_of
from thinwire.schedules.base import Plan


class Reply(NamedTuple):
    """What a chunk of clients gives back."""

    messages: list[bytes]
    states: list[ClientState]
    loss: Tensor  # (clients,)


# -- before the first round --------------------------------------------------------------------------------------------


def agree(method: Method, weights: Tree, buffers: Tree, key: Key) -> tuple[Contract, Public]:
    """The contract and the public state of version 0, which every party derives from method, model and seed.

    Args:
        method: the method.
        weights: initial trainable weights of the model.
        buffers: initial floating-point buffers of the model.
        key: the root of the run's randomness.
    """
    spec = Spec.of(weights)
    if not spec.blocks:
        raise ConfigError("the model has no trainable weights; at least one parameter must have requires_grad=True")
    method.check(spec)
    device = next(iter(weights.values())).device
    frame = method.space.frame(spec, key.fold("frame", 0), device)
    coords = method.space.init(weights, frame, key.fold("init", 0))
    if not coords:
        raise ConfigError(f"{method.space!r} trains no weight of this model; let it train at least one")
    never = method.schedule.never(Spec.of(coords))  # a selector that matches nothing is found now, not after a round
    if never and method.space.fresh_every:
        raise _held_in_lost_frame(method, never)
    shared = method.correction.init_shared({name: block for name, block in coords.items() if name not in never})
    specs = (spec, Spec.of(coords), Spec.of(shared), Spec.of(buffers))
    h = hashlib.blake2b(repr(method).encode(), digest_size=8)
    for part in specs:
        h.update(part.digest())
    h.update(key.value.to_bytes(8, "little"))  # another seed draws other frames: its messages are not ours
    contract = Contract(method, *specs, key, wire.Schema(h.digest(), specs[1].names))
    return contract, Public(0, weights, coords, shared, buffers)


def begin(contract: Contract, public: Public) -> ServerState:
    """The server before the first round."""
    method = contract.method
    return ServerState(
        public,
        opt=method.server_opt.init(contract.code.zeros(device_of(public))),
        correction=method.correction.init_server(restrict(public.coords, contract.sendable.names)),
        schedule=method.schedule.init(contract.coords),
        codec=method.down.init(contract.code),
        ledger=Ledger(first=public.version),
    )


def plan_round(contract: Contract, server: ServerState) -> Plan:
    """Which blocks the next round synchronises."""
    method = contract.method
    plan = method.schedule.plan(server.schedule, contract.coords, server.public.version)
    silent = frozenset(contract.coords.names) - plan.names
    if silent and method.space.fresh_every:
        raise _held_in_lost_frame(method, silent)
    alike = set(method.sketch.spec(contract.coords.restrict(plan.names))) <= set(contract.code)
    if not alike and (server.opt or server.codec or method.up.init(contract.code)):
        raise IncompatibleParts(
            f"{method.sketch!r} makes other codes when some blocks are silent, as {method.schedule!r} wants, but an "
            "optimiser or a codec remembers codes from round to round. Take a sketch that codes each block by itself, "
            "or parts without memory"
        )
    return plan


def _held_in_lost_frame(method: Method, silent: frozenset[str]) -> IncompatibleParts:
    return IncompatibleParts(
        f"{method.schedule!r} lets clients hold back {min(silent)!r}, but {method.space!r} redraws its frame, "
        "and what was held back means nothing in the next one. Write fresh_every = 0, or a schedule in which every "
        "block always speaks"
    )


# -- on the clients ----------------------------------------------------------------------------------------------------


def fresh_client(contract: Contract, public: Public) -> ClientState:
    """The state of a client that was never asked before: it knows version 0 from the seed."""
    method = contract.method
    return ClientState(
        version=0,
        correction=method.correction.init_client(restrict(public.coords, contract.sendable.names)),
        codec=method.up.init(contract.code),
    )


def forget(state: ClientState, touched: frozenset[str]) -> ClientState:
    """Drop what a client held back of blocks that were synchronised without it."""
    if not state.held or not touched & state.held.keys():
        return state
    return replace(state, held={name: block for name, block in state.held.items() if name not in touched})


def cohort_round(
    contract: Contract,
    learner: Learner,
    public: Public,
    frame: Tree,
    plan: Plan,
    clients: Sequence[int],
    states: Sequence[ClientState],
    work: Workload,
    how: Vectorise,
) -> Reply:
    """Train a chunk of clients and let each say what the method lets it say.

    Args:
        contract: the contract.
        learner: the model and its loss.
        public: the public state that these clients received.
        frame: the frame of this round.
        plan: which blocks speak.
        clients: their numbers.
        states: their states, with outdated held blocks forgotten.
        work: their examples.
        how: all in one program, or one after another.
    """
    method = contract.method
    start = _starts(public.coords, states)
    mine = stack([state.correction for state in states]) if states[0].correction else {}
    trained = local_train(method, learner, public, frame, start, mine, work, how)
    messages, after = [], []
    for i, (client, state) in enumerate(zip(clients, states, strict=True)):
        end, buffers = unstack(trained.coords, i), unstack(trained.buffers, i)
        moved = restrict(sub(end, unstack(start, i)), contract.sendable.names)
        memory, report = method.correction.finish(
            moved, trained.steps[i], method.client_opt.lr, state.correction, public.shared
        )
        delta = sub(end, public.coords)
        spoken = restrict(delta if method.say == "delta" else end, plan.names)
        code = method.privacy.bound(
            method.sketch.encode(spoken, contract.sketch_key(public.version)),
            contract.key.fold("privacy", public.version, client),
        )
        noted = method.schedule.report(restrict(delta, plan.names), plan)
        # before the codec: what it makes of a NaN is not defined, and the server refuses one
        if not all(all_finite(tree) for tree in (code, buffers, report, noted)):
            raise Diverged(f"client {client} trained to a number that is not finite; try a smaller learning rate")
        peer = contract.peer(public.version, client)
        payload, codec = method.up.encode(code, state.codec, peer)
        lanes = {wire.COORDS: payload}
        if method.weigh.sent:
            lanes[wire.WEIGHT] = raw({"weight": torch.tensor(method.weigh.weight(work.samples[i]))})
        if buffers:
            lanes[wire.BUFFERS] = raw(buffers)
        if report:
            lanes[wire.SHARED] = raw(report)
        if noted:
            lanes[wire.REPORT] = raw(noted)
        body = wire.pack_body(wire.Body(plan.names, lanes), contract.schema)
        messages.append(wire.pack(wire.UP, public.version, [body], contract.schema))
        held = {name: block for name, block in delta.items() if name not in plan.names}
        after.append(ClientState(public.version, held, memory, codec))
    return Reply(messages, after, trained.loss)


def _starts(coords: Tree, states: Sequence[ClientState]) -> Tree:
    """Stacked coordinates to start from: the public ones, plus what each client held back."""
    start = repeat(coords, len(states))
    for name in {name for state in states for name in state.held}:
        zero = torch.zeros_like(coords[name])
        start[name] = start[name] + torch.stack([state.held.get(name, zero) for state in states])
    return start


# -- up, and the next version ------------------------------------------------------------------------------------------


def close_round(
    contract: Contract, server: ServerState, plan: Plan, messages: Mapping[int, bytes], registered: int
) -> ServerState:
    """Average what the clients said and make the next version.

    Args:
        contract: the contract.
        server: the server's state.
        plan: the plan that the round was opened with.
        messages: one message a client, not trusted.
        registered: how many clients there are in all.
    """
    method, public = contract.method, server.public
    device = device_of(public)
    if not messages:
        raise WireError(f"no client answered in the round from version {public.version}; ask again, or ask others")
    said = [unpack_up(contract, plan, public.version, client, messages[client]) for client in sorted(messages)]
    weights = [one.weight for one in said]
    mean = to_device(weighted_mean([one.code for one in said], weights), device)
    mean = method.privacy.release(mean, len(said), contract.key.fold("release", public.version))
    if method.say == "value":
        mean = sub(mean, restrict(public.coords, plan.names))
    schedule = method.schedule.observe(
        server.schedule,
        plan,
        method.sketch.decode(mean, contract.coords.restrict(plan.names), contract.sketch_key(public.version)),
        weighted_mean([one.noted for one in said], weights),
    )
    fraction = len(said) / registered
    # memories of server and optimiser belong to blocks; those that did not speak keep theirs as they were
    silent = frozenset(contract.code.names) - mean.keys()
    mine = _of_blocks(server.correction, silent)
    mean, shared, mine = method.correction.server(
        mean, weighted_mean([one.report for one in said], weights), fraction, mine
    )
    opt = _of_blocks(server.opt, silent)
    change, opt = method.server_opt.update(scale(mean, -1.0), opt, restrict(public.coords, plan.names))
    step = Step(plan.names, change, shared, weighted_mean([one.buffers for one in said], weights))
    codec = server.codec
    body = b""
    if method.link == "ledger":
        body, codec = pack_step(contract, step, public.version, server.codec)
        step = unpack_step(contract, body, public.version, device)
    after = advance(contract, public, step._replace(buffers=to_device(step.buffers, device)))
    if not (all_finite(after.coords) and (after.base is public.base or all_finite(after.base))):
        raise Diverged(f"the weights of version {after.version} are not finite; try a smaller learning rate")
    # entries longer than a full state serve nobody; where the space merges, that state holds the whole base
    limit = contract.coords.nbytes + contract.shared.nbytes + contract.buffers.nbytes
    limit += contract.weights.nbytes if method.space.fresh_every else 0
    limit = limit if method.link == "ledger" else -1  # a snapshot replaces all entries: keep none but the last
    merge = contract.window(after.version) != contract.window(public.version)
    ledger = server.ledger.append(body, plan.names, limit=limit, merge=merge)
    return ServerState(
        after,
        opt={**server.opt, **opt},
        correction={**server.correction, **mine},
        schedule=schedule,
        codec=codec,
        ledger=ledger,
    )


def _of_blocks(state: Tree, silent: frozenset[str]) -> Tree:
    """A state without what belongs to silent blocks: `fc.weight`, or `momentum/fc.weight`."""
    return {name: value for name, value in state.items() if not {name, name.split("/", 1)[-1]} & silent}
