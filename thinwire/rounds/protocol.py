"""The round, as every engine calls it: open, train and answer, close; and `advance`, which both sides compute alike.

    server                                    client
    open_round   ── steps or state ──►        receive        public(v), bit for bit (`down.py`)
                                              cohort_round   train, keep what is not sent, encode
    close_round  ◄── change ──────────
    advance: public(v) -> public(v + 1)       (the client does the same when it next hears)

The server applies the *decoded* broadcast to itself, so a lossy down link cannot make it drift from its clients. All
functions are pure: states go in and come out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import message as wire
from thinwire.codecs.base import check_fits
from thinwire.codecs.bits import Bytes
from thinwire.core.rng import Key
from thinwire.core.room import MOST, room
from thinwire.core.spec import Spec
from thinwire.core.threads import LEAST, each
from thinwire.core.tree import (
    Tree,
    add,
    all_finite,
    as_matrix,
    begin_to_bring,
    bring,
    cut,
    grand_total,
    repeat,
    restrict,
    scale,
    stack,
    sub,
    tmap,
    to_device,
    unstack,
)
from thinwire.errors import ConfigError, Diverged, IncompatibleParts, WireError
from thinwire.privacy.base import NoPrivacy
from thinwire.rounds.advance import advance, moved, switched
from thinwire.rounds.foresight import Foreseen, foresee
from thinwire.rounds.graphed import Recorder
from thinwire.rounds.lanes import (
    EVERYONE,
    Said,
    Step,
    Stretch,
    as_heard,
    noted,
    pack_end,
    pack_step,
    pack_weight,
    raw,
    read_step,
    read_stretch,
    unpack_up,
)
from thinwire.rounds.ledger import Ledger
from thinwire.rounds.local import Learner, Lesson, Trained, Vectorise, Workload, local_train
from thinwire.rounds.mask import NoMask
from thinwire.rounds.method import Method
from thinwire.rounds.secure import Circle, check_secure, hide_payload, secure_mean
from thinwire.rounds.state import ClientState, Contract, Public, ServerState, device_of
from thinwire.rounds.threaded import Crew
from thinwire.schedules.base import Plan
from thinwire.sketches.base import Identity


class Reply(NamedTuple):
    """What a chunk of clients gives back."""

    messages: list[Bytes]
    states: list[ClientState]
    loss: Tensor  # (clients,)
    foreseen: Foreseen | None = None


class Haste(NamedTuple):
    """What an engine does so that a GPU need not wait for the host."""

    meanwhile: Callable[[], None] | None = None  # is called once the GPU has been asked to train, and before a wait
    trained: Trained | None = None  # what was already trained, from the very same state
    work: Workload | None = None  # on what
    go_on: Callable[[Foreseen], None] | None = None  # trains the next cohort; only where the round is foreseeable


NO_HASTE = Haste()


# -- before the first round --------------------------------------------------------------------------------------------


def agree(method: Method, weights: Tree, buffers: Tree, key: Key) -> tuple[Contract, Public]:
    """The contract and the public state of version 0, which every party derives from method, model and seed.

    Args:
        method: the method.
        weights: initial trainable weights of the model.
        buffers: initial floating-point buffers of the model.
        key: the root of the run's randomness.
    """
    contract, public = _agree(method, weights, buffers, key)
    if method.then is None:
        return contract, public
    later, _ = _agree(method.later, weights, buffers, key)
    # one schema for both, so that a message can be read before its version is known
    digest = hashlib.blake2b(contract.schema.digest + later.schema.digest, digest_size=8)
    digest.update(method.then.at.to_bytes(8, "little"))
    names = tuple(dict.fromkeys((*contract.coords.names, *later.coords.names)))
    schema = wire.Schema(digest.digest(), names)
    later = replace(later, schema=schema, since=method.then.at)
    return replace(contract, schema=schema, later=later), public


def _agree(method: Method, weights: Tree, buffers: Tree, key: Key) -> tuple[Contract, Public]:
    """The same for one stage."""
    spec = Spec.of(weights)
    if not spec.blocks:
        raise ConfigError("the model has no trainable weights; at least one parameter must have requires_grad=True")
    method.check(spec)
    device = next(iter(weights.values())).device
    frame = method.space.frame(spec, key.fold("frame", 0), device)
    coords = method.space.init(weights, frame, key.fold("init", 0))
    if not coords:
        raise ConfigError(f"{method.space!r} trains no weight of this model; let it train at least one")
    method.penalty.check(spec, Spec.of(coords))
    never = method.schedule.never(Spec.of(coords))  # a selector that matches nothing is found now, not after a round
    waits = never or (frozenset(coords) if not method.schedule.resamples(1) else frozenset())
    if waits and method.space.fresh_every:
        raise _held_in_lost_frame(method, waits)
    if waits and method.then is not None:
        raise IncompatibleParts(
            f"{method.schedule!r} lets clients hold back {min(waits)!r}, but then gives up the coordinates of the "
            "first stage. Write schedule = 'every', or leave then out"
        )
    shared = method.correction.init_shared({name: block for name, block in coords.items() if name not in never})
    specs = (spec, Spec.of(coords), Spec.of(shared), Spec.of(buffers))
    h = hashlib.blake2b(repr(method).encode(), digest_size=8)
    if not isinstance(method.mask, NoMask):
        h.update(repr(method.mask).encode())
    for part in specs:
        h.update(part.digest())
    for block in (*weights.values(), *buffers.values()):  # whoever starts elsewhere would be elsewhere for ever
        h.update(raw({"": block}))
    h.update(key.value.to_bytes(8, "little"))  # another seed draws other frames: its messages are not ours
    contract = Contract(method, *specs, key, wire.Schema(h.digest(), specs[1].names))
    for up, down in zip(method.ups, method.downs, strict=True):
        check_fits(up, contract.code)
        check_fits(down, contract.code if method.link == "ledger" else contract.sendable)
    check_fits(method.settle, contract.coords)
    if method.secure:
        check_secure(contract)
    if method.privacy.bounds:
        _check_bounded(contract)
    return contract, Public(0, weights, coords, shared, buffers)


def _check_bounded(contract: Contract) -> None:
    """Raise IncompatibleParts if clients would reach the server beside, or unseen by, what bounds them."""
    method = contract.method
    plan = Plan(contract.sendable.named)
    for clash, part, instead in (
        (method.say == "value", "say = 'value', which is no change", "Write say = 'delta'"),
        (method.weigh.sent, f"{method.weigh!r}, by which some count more", "Write weigh = 'uniform'"),
        (method.secure, "secure = true, which hides each of them", "Write secure = false"),
        (contract.report.blocks, f"reports of {method.correction!r}", "Take a correction that reports nothing"),
        (noted(contract, plan).blocks, f"reports of {method.schedule!r}", "Take a schedule that reports nothing"),
        (contract.buffers.blocks, "running statistics", "Take a model without them, such as with group norm"),
    ):
        if clash:
            raise IncompatibleParts(f"{method.privacy!r} bounds each client's change, but not {part}. {instead}")


def begin(contract: Contract, public: Public) -> ServerState:
    """The server before the first round."""
    method = contract.method
    server = ServerState(
        public,
        opt=method.server_opt.init(contract.code.zeros()),
        correction=to_device(method.correction.init_server(restrict(public.coords, contract.sendable.names)), "cpu"),
        schedule=method.schedule.init(contract.coords),
        codec=method.down.init(contract.code),
        ledger=Ledger(public.version, public.version),
    )
    if not method.schedule.resamples(public.version + 1):  # blocks will wait: find out now what that breaks
        for names in (frozenset[str](), frozenset(contract.sendable.names[:1])):
            _check_codes(contract, server, names)
    return server


def plan_round(contract: Contract, server: ServerState) -> Plan:
    """Which blocks the next round synchronises."""
    contract = contract.at(server.public.version)
    method = contract.method
    plan = method.schedule.plan(server.schedule, contract.coords, server.public.version)
    silent = contract.coords.named - plan.names
    if silent and method.space.fresh_every:
        raise _held_in_lost_frame(method, silent)
    _check_codes(contract, server, plan.names)
    return plan


def _check_codes(contract: Contract, server: ServerState, names: frozenset[str]) -> None:
    """Refuse memories of codes that have another shape when only these blocks speak."""
    method = contract.method
    alike = set(method.sketch.spec(contract.coords.restrict(names))) <= set(contract.code)
    if not alike and (server.opt or server.codec or any(up.init(contract.code) for up in method.ups)):
        raise IncompatibleParts(
            f"{method.sketch!r} makes other codes when some blocks are silent, as {method.schedule!r} wants, but an "
            "optimiser or a codec remembers codes from round to round. Take a sketch that codes each block by itself, "
            "or parts without memory"
        )


def _held_in_lost_frame(method: Method, silent: frozenset[str]) -> IncompatibleParts:
    return IncompatibleParts(
        f"{method.schedule!r} lets clients hold back {min(silent)!r}, but {method.space!r} redraws its frame, "
        "and what was held back means nothing in the next one. Write fresh_every = 0, or a schedule in which every "
        "block always speaks"
    )


# -- on the clients ----------------------------------------------------------------------------------------------------


def fresh_client(contract: Contract, public: Public, client: int = EVERYONE) -> ClientState:
    """The state of a client that was never asked before: it knows version 0 from the seed.

    Args:
        contract: the contract.
        public: the public state of any version.
        client: the number of the client; needed where tiers of clients have codecs of their own.
    """
    contract = contract.at(public.version)
    method = contract.method
    return ClientState(
        version=0,
        correction=to_device(method.correction.init_client(restrict(public.coords, contract.sendable.names)), "cpu"),
        codec=contract.up(client).init(contract.code),
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
    recorder: Recorder | None = None,
    circle: Circle | None = None,
    crew: Crew | None = None,
    haste: Haste = NO_HASTE,
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
        how: all in one program, replayed from a recording or not, one after another, or some side by side in threads.
        recorder: keeps the recordings of earlier rounds.
        circle: who is added up in this round and their secrets; needed where the method is secure.
        crew: keeps the threads of earlier rounds.
        haste: what else a GPU and the host can do while one would wait for the other.

    Clients train on the device of `public`. Their states and all that becomes bytes lie on the CPU.
    """
    contract = contract.at(public.version)
    method, device = contract.method, device_of(public)
    lr = method.client_opt_at(public.version).lr
    states = [_in_this_frame(contract, *known, public.version) for known in zip(clients, states, strict=True)]
    mask = contract.trained(public)
    lesson = make_lesson(contract, learner, public, frame, plan, states, work, mask)
    if haste.trained is not None:
        trained = haste.trained
    elif how == "graph":
        trained = (recorder or Recorder()).train(lesson)
    elif how == "threads":
        trained = (crew or Crew()).train(lesson)
    else:
        trained = local_train(lesson, how)
    goes_on = not method.schedule.resamples(public.version + 1)
    delta = sub(trained.coords, public.coords)  # of all clients, as everything until the loop
    spoken = restrict(delta if method.say == "delta" else trained.coords, plan.names)
    all_codes, all_noted = spoken, {}
    if noted(contract, plan).blocks:
        planned = restrict(delta, plan.names)
        all_noted = stack([method.schedule.report(unstack(planned, i), plan) for i in range(len(clients))])
    if not (isinstance(method.sketch, Identity) and isinstance(method.privacy, NoPrivacy)):
        all_codes = stack([_code(contract, unstack(spoken, i), public.version, c) for i, c in enumerate(clients)])
    silent = {name: block for name, block in delta.items() if name not in plan.names}
    moved = restrict(sub(trained.coords, lesson.start), contract.sendable.names) if contract.remembers else {}
    if haste.meanwhile is not None:
        haste.meanwhile()
    opts = trained.opt if goes_on else {}
    names, like = list(all_codes), [block[0] for block in all_codes.values()]
    if (matrix := as_matrix(all_codes)) is not None:  # the codec finds each client's numbers in one piece
        all_codes = {"": matrix}
    sums = {"loss": trained.loss, "all": grand_total(all_codes, all_noted, trained.buffers)}
    foreseen = None
    if haste.go_on is not None and matrix is not None:
        foreseen = foresee(contract, public, clients, work.samples, matrix)
    ahead = {"step": foreseen.step, "total": foreseen.total} if foreseen else {}
    arrive = begin_to_bring(
        [all_codes, all_noted, silent, moved, trained.buffers, public.shared, sums, opts, ahead], "cpu"
    )
    if haste.go_on is not None and foreseen is not None:
        haste.go_on(foreseen)
    all_codes, all_noted, silent, moved, buffers, shared, sums, opts, ahead = arrive()
    if foreseen is not None:
        foreseen = foreseen._replace(step=ahead["step"], total=ahead["total"])
    finite = math.isfinite(sums["all"].item())
    where = partial(room, pinned=device.type == "cuda" and len(clients) * contract.code.nbytes <= MOST)
    blank = ClientState(public.version)  # one for all who keep nothing: a million of them weigh next to nothing

    def speak(i: int) -> tuple[Bytes, ClientState]:
        client, state = clients[i], states[i]
        code = unstack(all_codes, i) if matrix is None else cut(all_codes[""][i], names, like)
        memory = state.correction
        report: Tree = {}
        if contract.remembers:
            memory, report = method.correction.finish(unstack(moved, i), trained.steps[i], lr, memory, shared)
        # before the codec: what it makes of a NaN is not defined, and the server refuses one
        said = (report,) if finite else (report, code, unstack(all_noted, i), unstack(buffers, i))
        if not all(all_finite(tree) for tree in said if tree):
            raise Diverged(f"client {client} trained to a number that is not finite; try a smaller learning rate")
        payload, codec = contract.up(client).encode(code, state.codec, contract.peer(public.version, client, mask))
        weight = method.weigh.weight(work.samples[i])
        if method.secure:
            payload = hide_payload(payload, weight, public.version, client, circle)
        lanes = {wire.COORDS: payload}
        if method.weigh.sent and not method.secure:
            lanes[wire.WEIGHT] = pack_weight(weight)
        if buffers:
            lanes[wire.BUFFERS] = raw(unstack(buffers, i))
        if report:
            lanes[wire.SHARED] = raw(report)
        if all_noted:
            lanes[wire.REPORT] = raw(unstack(all_noted, i))
        body = wire.body_parts(wire.Body(plan.names, lanes), contract.schema)
        pieces = wire.pack_pieces(wire.UP, public.version, body, contract.schema)
        message = wire.laid_out(pieces, where if wire.length(pieces) >= LEAST else None)
        # of its own: a view would keep all clients' blocks alive
        held, opt = (tmap(torch.clone, unstack(tree, i)) for tree in (silent, opts))
        mine_after = ClientState(public.version, held, memory, codec, opt)
        return message, blank if mine_after.blank else mine_after

    messages, after = zip(*each(speak, range(len(clients)), contract.code.nbytes), strict=True)
    return Reply(list(messages), list(after), sums["loss"], foreseen)


def make_lesson(
    contract: Contract,
    learner: Learner,
    public: Public,
    frame: Tree,
    plan: Plan,
    states: Sequence[ClientState],
    work: Workload,
    mask: Tree,
) -> Lesson:
    """What some clients train, of all that is known of them and of the round."""
    method, device = contract.method, device_of(public)
    start = _starts(public.coords, states)
    mine = to_device(stack([state.correction for state in states]), device)
    kept = None if plan.resample else to_device(_optimisers(method, public, states), device)
    return Lesson(method, learner, public, frame, start, mine, work, kept, to_device(mask, device))


def _code(contract: Contract, spoken: Tree, version: int, client: int) -> Tree:
    """What one client lets go, as numbers."""
    code = contract.method.sketch.encode(spoken, contract.sketch_key(version))
    return contract.method.privacy.bound(code, contract.key.fold("privacy", version, client))


def _in_this_frame(contract: Contract, client: int, state: ClientState, version: int) -> ClientState:
    """A client whose codec starts anew if the frame was redrawn since: its memory is of coordinates that are gone."""
    gone = state.version < contract.since or contract.window(state.version) != contract.window(version)
    if not state.codec or not gone:
        return state
    return replace(state, codec=contract.up(client).init(contract.code))


def _starts(coords: Tree, states: Sequence[ClientState]) -> Tree:
    """Stacked coordinates to start from: the public ones, plus what each client held back."""
    start = repeat(coords, len(states))
    for name in {name for state in states for name in state.held}:
        zero = torch.zeros_like(coords[name], device="cpu")
        held = torch.stack([state.held.get(name, zero) for state in states])
        start[name] = start[name] + held.to(coords[name].device)
    return start


def _optimisers(method: Method, public: Public, states: Sequence[ClientState]) -> Tree:
    """Stacked optimisers within a window: as the round before left them, or fresh for clients that were not there."""
    fresh = to_device(method.client_opt.init(public.coords), "cpu")
    return stack([state.opt if state.opt and state.version == public.version - 1 else fresh for state in states])


# -- up, and the next version ------------------------------------------------------------------------------------------


def close_round(
    contract: Contract,
    server: ServerState,
    plan: Plan,
    messages: Mapping[int, Bytes],
    registered: int,
    noise: Key | None = None,
    foreseen: Foreseen | None = None,
) -> ServerState:
    """Average what the clients said and make the next version.

    Args:
        contract: the contract.
        server: the server's state.
        plan: the plan that the round was opened with.
        messages: one message a client, not trusted.
        registered: how many clients there are in all.
        noise: where privacy takes its noise from; by default the seed, which clients know.
        foreseen: the next version as the clients' device made it; taken if it is the one that their messages make.

    The mean and the server's own memories lie on the CPU, where messages are decoded; the next version is made on the
    device of the public state.
    """
    whole, contract = contract, contract.at(server.public.version)
    method, public = contract.method, server.public
    device = device_of(public)
    if not messages:
        raise WireError(f"no client answered in the round from version {public.version}; ask again, or ask others")
    coords = to_device(restrict(public.coords, plan.names), "cpu")
    if method.secure:
        mean, said = secure_mean(contract, plan, public.version, messages), [Said({}, 1.0, {}, {}, {})] * len(messages)
        weights = [1.0] * len(messages)
    else:
        masks = masks_of(contract, public, messages)
        said = each(
            lambda client: unpack_up(
                contract, plan, public.version, client, messages[client], masks[contract.tier(client)]
            ),
            sorted(messages),
            contract.code.nbytes,
        )
        factors = [method.correction.factor(one.report) for one in said]
        codes = [one.code if f == 1.0 else scale(one.code, f) for one, f in zip(said, factors, strict=True)]
        codes = [method.privacy.accept(code) for code in codes]
        codes, weights = method.mean.admit(codes, [one.weight for one in said])
        mean = method.mean.of(codes, weights)
    mean = method.privacy.release(mean, len(said), noise or contract.key.fold("release", public.version))
    if method.say == "value":
        mean = sub(mean, coords)
    planned, sketch_key = contract.coords.restrict(plan.names), contract.sketch_key(public.version)
    decoded = mean
    if not isinstance(method.sketch, Identity):
        decoded = to_device(method.sketch.decode(to_device(mean, device), planned, sketch_key), "cpu")
    schedule = method.schedule.observe(
        server.schedule, plan, decoded, method.mean.of([one.noted for one in said], weights)
    )
    fraction = len(said) / registered
    # memories of server and optimiser belong to blocks; those that did not speak keep theirs as they were
    silent = contract.code.named - mean.keys()
    mine = _of_blocks(server.correction, silent)
    mean, shared, mine = method.correction.server(
        mean, method.mean.of([one.report for one in said], weights), fraction, mine
    )
    moving = method.server_opt_at(public.version)
    change, opt = moving.update(scale(mean, -1.0), _of_blocks(server.opt, silent), coords)
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
    if method.link == "ledger":
        body, codec = pack_step(contract, step, public.version, server.codec)
        step = read_step(contract, wire.unpack_body(body, contract.schema), public.version, torch.device("cpu"))
    if foreseen is not None and not foreseen.confirmed(step.code):
        foreseen = None
    buffers = method.mean.of([one.buffers for one in said], weights)
    if foreseen is not None:
        reached = foreseen.coords
    else:
        code, shared, buffers = bring((step.code, shared, buffers), device)
        reached = moved(contract, public, Step(step.names, code))
    end = None
    if method.link == "ledger" and public.version + 1 == contract.window_end(public.version):
        values = to_device(restrict(reached, plan.names), "cpu")
        end = pack_end(contract, Stretch(plan.names, values), public.version + 1)
        if contract.settles:  # everybody merges what the codec leaves, also those who followed every entry
            settled = read_stretch(contract, wire.unpack_body(end, contract.schema), device, public.version + 1)
            reached, body = {**reached, **settled.values}, end
        elif method.space.fresh_every == 1:
            end = body  # one entry says it all
    after = advance(contract, public, reached, public.version + 1)._replace(
        shared={**public.shared, **add(restrict(public.shared, shared), shared)}, buffers=buffers or public.buffers
    )
    fine = foreseen is not None and math.isfinite(foreseen.total.item())
    if not fine and not (all_finite(after.coords) and (after.base is public.base or all_finite(after.base))):
        raise Diverged(f"the weights of version {after.version} are not finite; try a smaller learning rate")
    if (next_stage := whole.at(after.version)) is not contract:
        return begin(next_stage, switched(contract, next_stage, after))
    if contract.window(after.version) != contract.window(public.version):
        # what was remembered of the old coordinates means nothing in the new ones
        opt, codec = moving.init(contract.code.zeros()), method.down.init(contract.code)
    return ServerState(
        after,
        opt=opt,
        correction={**server.correction, **mine},
        schedule=schedule,
        codec=codec,
        ledger=_append(contract, server, plan, body, end),
    )


def _append(contract: Contract, server: ServerState, plan: Plan, body: bytes, end: bytes | None) -> Ledger:
    """The ledger with one more entry, and where its window ended if it did."""
    if contract.method.link == "snapshot":  # nobody replays: it only remembers when each block was synchronised
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
    return {tier: contract.trained(as_heard(contract, public, down)) for tier, down in downs.items()}


def _under(block: Tensor, mask: Tensor | None) -> Tensor:
    """An optimiser's memory without what belongs to numbers that are gone."""
    return block if mask is None or mask.shape != block.shape else torch.where(mask, block, 0)


def _of_blocks(state: Tree, silent: frozenset[str]) -> Tree:
    """A state without what belongs to silent blocks: `fc.weight`, or `momentum/fc.weight`."""
    return {name: value for name, value in state.items() if not {name, name.split("/", 1)[-1]} & silent}
