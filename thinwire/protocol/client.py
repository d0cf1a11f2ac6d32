"""On the clients: train from the public state, keep what is not sent, and say the rest in one message each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.pinned import MOST, pinned_empty
from thinwire.core.threads import LEAST, each
from thinwire.core.tree import (
    Tree,
    all_finite,
    as_matrix,
    begin_to_bring,
    cut,
    grand_total,
    repeat,
    restrict,
    stack,
    sub,
    tmap,
    to_device,
    unstack,
)
from thinwire.errors import Diverged
from thinwire.privacy.base import NoPrivacy
from thinwire.protocol.fields import EVERYONE, noted, pack_weight, raw
from thinwire.protocol.foresight import Foreseen, foresee
from thinwire.protocol.method import Method
from thinwire.protocol.secagg import SecAggCohort, hide_payload
from thinwire.protocol.state import ClientState, Contract, Public, device_of
from thinwire.schedules.base import Plan
from thinwire.sketches.base import Identity
from thinwire.training.cuda_graph import CudaGraphCache
from thinwire.training.local import Backend, Learner, TrainingInputs, TrainingOutcome, Workload, local_train
from thinwire.training.threads import ThreadPoolTrainer
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class Reply(NamedTuple):
    """What a chunk of clients gives back."""

    messages: list[Bytes]
    states: list[ClientState]
    loss: Tensor  # (clients,)
    foreseen: Foreseen | None = None


class Haste(NamedTuple):
    """What an engine does so that a GPU need not wait for the host."""

    meanwhile: Callable[[], None] | None = None  # is called once the GPU has been asked to train, and before a wait
    trained: TrainingOutcome | None = None  # what was already trained, from the very same state
    work: Workload | None = None  # on what
    go_on: Callable[[Foreseen], None] | None = None  # trains the next cohort; only where the round is foreseeable


NO_HASTE = Haste()


def initial_client_state(contract: Contract, public: Public, client: int = EVERYONE) -> ClientState:
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
    basis: Tree,
    plan: Plan,
    clients: Sequence[int],
    states: Sequence[ClientState],
    work: Workload,
    how: Backend,
    recorder: CudaGraphCache | None = None,
    circle: SecAggCohort | None = None,
    crew: ThreadPoolTrainer | None = None,
    haste: Haste = NO_HASTE,
) -> Reply:
    """Train a chunk of clients and let each say what the method lets it say.

    Args:
        contract: the contract.
        learner: the model and its loss.
        public: the public state that these clients received.
        basis: the basis of this round.
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
    lesson = make_training_inputs(contract, learner, public, basis, plan, states, work, mask)
    if haste.trained is not None:
        trained = haste.trained
    elif how == "graph":
        trained = (recorder or CudaGraphCache()).train(lesson)
    elif how == "threads":
        trained = (crew or ThreadPoolTrainer()).train(lesson)
    else:
        trained = local_train(lesson, how)
    goes_on = not method.schedule.resamples(public.version + 1)
    delta = sub(trained.coords, public.coords)  # of all clients, as everything until the loop
    spoken = restrict(delta if method.upload == "delta" else trained.coords, plan.names)
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
    where = partial(pinned_empty, pinned=device.type == "cuda" and len(clients) * contract.code.nbytes <= MOST)
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
        weight = method.client_weight.weight(work.samples[i])
        if method.secure_aggregation:
            payload = hide_payload(contract, payload, weight, public.version, client, circle)
        fields = {wire.COORDS: payload}
        if method.client_weight.sent and not method.secure_aggregation:
            fields[wire.WEIGHT] = pack_weight(weight)
        if buffers:
            fields[wire.BUFFERS] = raw(unstack(buffers, i))
        if report:
            fields[wire.SHARED] = raw(report)
        if all_noted:
            fields[wire.REPORT] = raw(unstack(all_noted, i))
        body = wire.body_parts(wire.Body(plan.names, fields), contract.schema)
        pieces = wire.pack_pieces(wire.UP, public.version, body, contract.schema.sent_by(client))
        message = wire.laid_out(pieces, where if wire.length(pieces) >= LEAST else None)
        # of its own: a view would keep all clients' blocks alive
        held, opt = (tmap(torch.clone, unstack(tree, i)) for tree in (silent, opts))
        mine_after = ClientState(public.version, held, memory, codec, opt)
        return message, blank if mine_after.blank else mine_after

    messages, after = zip(*each(speak, range(len(clients)), contract.code.nbytes), strict=True)
    return Reply(list(messages), list(after), sums["loss"], foreseen)


def make_training_inputs(
    contract: Contract,
    learner: Learner,
    public: Public,
    basis: Tree,
    plan: Plan,
    states: Sequence[ClientState],
    work: Workload,
    mask: Tree,
) -> TrainingInputs:
    """What some clients train, of all that is known of them and of the round."""
    method, device = contract.method, device_of(public)
    start = _starts(public.coords, states)
    mine = to_device(stack([state.correction for state in states]), device)
    kept = None if plan.resample else to_device(_optimisers(method, public, states), device)
    return TrainingInputs(method, learner, public, basis, start, mine, work, kept, to_device(mask, device))


def _code(contract: Contract, spoken: Tree, version: int, client: int) -> Tree:
    """What one client lets go, as numbers."""
    code = contract.method.sketch.encode(spoken, contract.sketch_key(version))
    return contract.method.privacy.bound(code, contract.key.fold("privacy", version, client))


def _in_this_frame(contract: Contract, client: int, state: ClientState, version: int) -> ClientState:
    """A client whose codec starts anew if the basis was redrawn since: its memory is of coordinates that are gone."""
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
