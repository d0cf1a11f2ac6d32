"""Before the first round: contract and version 0, and the server's initial state.

Parts that cannot work together are found here, before anything is trained.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.codecs.base import check_fits
from thinwire.core.key import Key
from thinwire.core.tree import Spec, State, Tree, restrict, tmap, to_device
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.protocol.compatibility import check_method
from thinwire.protocol.contract import Contract
from thinwire.protocol.ledger import Ledger
from thinwire.protocol.method import Method
from thinwire.protocol.state import PublicState, ServerState
from thinwire.protocol.upload import raw
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire

_MANTISSA = {torch.float32: 24, torch.float64: 53}
_SPARE = 4  # bits by which coordinates can grow beyond the largest one of their block at the start
UNRECOVERED = "unrecovered"  # the slot of the server optimizer's state for codes that were not broadcast yet


def make_contract(method: Method, weights: Tree, buffers: Tree, key: Key) -> tuple[Contract, PublicState]:
    """The contract and the public state of version 0, which every party derives from method, model and seed.

    Args:
        method: the method.
        weights: initial trainable weights of the model.
        buffers: initial floating-point buffers of the model.
        key: the root of the run's randomness.
    """
    contract, public = _one_stage(method, weights, buffers, key)
    if method.next_stage is None:
        return contract, public
    later, _ = _one_stage(method.later, weights, buffers, key)
    # one schema for both, so that a message can be read before its version is known
    digest = hashlib.blake2b(contract.schema.digest + later.schema.digest, digest_size=8)
    digest.update(method.next_stage.at.to_bytes(8, "little"))
    names = tuple(dict.fromkeys((*contract.coords.names, *later.coords.names)))
    schema = wire.Schema(digest.digest(), names)
    later = replace(later, schema=schema, since=method.next_stage.at)
    return replace(contract, schema=schema, later=later), public


def _one_stage(method: Method, weights: Tree, buffers: Tree, key: Key) -> tuple[Contract, PublicState]:
    """Contract and version 0 of a method with one stage."""
    spec = Spec.of(weights)
    if not spec.blocks:
        raise ConfigError("the model has no trainable weights; at least one parameter must have requires_grad=True")
    check_method(method, spec)
    basis = method.space.basis_from(weights, key.fold("frame", 0), next(iter(weights.values())).device)
    coords = method.space.init(weights, basis, key.fold("init", 0))
    if not coords:
        raise ConfigError(f"{method.space!r} trains no weight of this model; at least one must be trained")
    if method.sends_sums:
        coords = on_grid(coords)
    method.penalty.check(spec, Spec.of(coords))
    private = method.schedule.never(Spec.of(coords))  # a selector that matches nothing is found now
    _check_unsent(method, private, frozenset(coords))
    shared = method.correction.init_shared({name: block for name, block in coords.items() if name not in private})
    specs = (spec, Spec.of(coords), Spec.of(shared), Spec.of(buffers))
    schema = wire.Schema(_digest(method, specs, (*weights.values(), *buffers.values()), key), specs[1].names)
    contract = Contract(method, *specs, key, schema, initial=weights if method.space.reads_base else {})
    contract.keep_basis(basis, next(iter(weights.values())).device)
    for up, down in zip(method.ups, method.downs, strict=True):
        check_fits(up, contract.code)
        check_fits(down, contract.step if method.download == "incremental" else contract.sendable)
    check_fits(method.merge_codec, contract.coords)
    if method.secure_aggregation:
        _check_secure_aggregation(contract)
    if method.privacy.bounds:
        _check_bounded(contract)
    return contract, PublicState(0, weights, coords, shared, buffers)


def on_grid(coords: Tree) -> Tree:
    """Initial coordinates as multiples of a power of two, so that steps on a lattice are added to them exactly.

    The power of two of a block is 2^-20 times that above its largest value (float32): its values can grow sixteenfold.
    Blocks of short types are not rounded; their steps are not exact either.

    >>> on_grid({"w": torch.tensor([0.1, 1.0])})["w"].tolist()
    [0.10000038146972656, 1.0]
    """
    return tmap(_rounded, coords)


def _rounded(block: Tensor) -> Tensor:
    largest = float(block.abs().max()) if block.numel() else 0.0
    if block.dtype not in _MANTISSA or not 0 < largest < math.inf:
        return block
    grid = math.ldexp(1.0, max(-1000, math.frexp(largest)[1] + _SPARE - _MANTISSA[block.dtype]))
    return (torch.round(block.double() / grid) * grid).to(block.dtype)


def _digest(method: Method, specs: tuple[Spec, ...], blocks: tuple, key: Key) -> bytes:
    """Eight bytes that differ wherever server and client would disagree."""
    h = hashlib.blake2b(repr(method).encode(), digest_size=8)
    if method.mask.active:
        h.update(repr(method.mask).encode())
    if method.opt_lifetime != "window":
        h.update(method.opt_lifetime.encode())
    for spec in specs:
        h.update(spec.digest())
    for block in blocks:  # initial weights must match, or replaying updates gives another model
        h.update(raw({"": block}))
    h.update(key.value.to_bytes(8, "little"))  # another seed draws another basis
    return h.digest()


def _check_unsent(method: Method, private: frozenset[str], coords: frozenset[str]) -> None:
    """Unsent changes need coordinates that are kept."""
    unsent = private or (coords if not method.schedule.resamples(1) else frozenset())
    if unsent and method.space.redraw_every:
        raise unsent_in_old_basis(method, unsent)
    if unsent and method.next_stage is not None:
        raise IncompatibleParts(
            f"{method.schedule!r} keeps changes of {min(unsent)!r} on clients, but next_stage replaces the coordinates "
            "of the first stage. Write schedule = 'all-blocks', or remove next_stage"
        )


def _check_bounded(contract: Contract) -> None:
    """Raise IncompatibleParts if clients would send something that the privacy mechanism does not bound."""
    method = contract.method
    report = contract.sent(Plan(contract.sendable.named)).report
    weight = f"{method.client_weight!r}, which gives clients different weights"
    for clash, part, instead in (
        (method.upload == "weights", "upload = 'weights', which is no update", "Write upload = 'delta'"),
        (method.client_weight.sent, weight, "Write client_weight = 'uniform'"),
        (
            method.secure_aggregation and method.privacy.masked is None,
            "secure_aggregation = true, which hides each of them",
            "Write secure_aggregation = false",
        ),
        (contract.report.blocks, f"reports of {method.correction!r}", "Use a correction that reports nothing"),
        (report.blocks, f"reports of {method.schedule!r}", "Use a schedule that reports nothing"),
        (contract.buffers.blocks, "running statistics", "Use a model without them, for example with group norm"),
    ):
        if clash:
            raise IncompatibleParts(f"{method.privacy!r} bounds each client's update, but not {part}. {instead}")


def _check_secure_aggregation(contract: Contract) -> None:
    """Raise IncompatibleParts, with what to write instead, if uploads of this method cannot be summed under masks."""
    method = contract.method
    if any(up != method.ups[0] for up in method.ups):
        raise IncompatibleParts(
            "secure_aggregation = true sums uploads of one size, but tiers of the budget have different upload codecs. "
            "Remove up from the tiers, or write secure_aggregation = false"
        )
    if not method.ups[0].summable:
        raise IncompatibleParts(
            f"secure_aggregation = true sums uploads value by value, but those of {method.ups[0]!r} cannot be summed. "
            'Write up = "raw" or up = { kind = "randomk", shared = true }, or secure_aggregation = false'
        )
    if odd := [block.name for block in contract.code if block.dtype is not torch.float32]:
        raise IncompatibleParts(
            f"secure_aggregation = true sums float32 values, but {odd[0]!r} has another type. Train it in float32, "
            "make it private (schedule.private), or write secure_aggregation = false"
        )
    report = contract.sent(Plan(contract.sendable.named)).report
    for sent, part, instead in (
        (contract.report.blocks, method.correction, "Use a correction that reports nothing"),
        (report.blocks, method.schedule, "Use a schedule that reports nothing"),
        (contract.buffers.blocks, "a model with running statistics", "Use one without, for example with group norm"),
    ):
        if sent:
            raise IncompatibleParts(
                f"secure_aggregation = true masks the update, but with {part!s} clients send more than it. "
                f"{instead}, or write secure_aggregation = false"
            )
    if method.correction.active and method.correction.factor({}) != 1.0:
        raise IncompatibleParts(
            f"{method.correction!s} scales each client's update, but secure_aggregation = true hides it. "
            "Use a correction that scales nothing, or write secure_aggregation = false"
        )


def initial_optimizer_state(contract: Contract) -> State:
    """The state of the server optimizer before its first step, and what a sketch that recovers has left: nothing."""
    opt = contract.method.server_opt.init(contract.code.zeros())
    return {**opt, UNRECOVERED: contract.code.zeros()} if contract.method.sketch.recovers else opt


def initial_server_state(contract: Contract, public: PublicState) -> ServerState:
    """The server's state before the first round of a stage."""
    method = contract.method
    server = ServerState(
        public,
        opt=initial_optimizer_state(contract),
        correction=to_device(method.correction.init_server(restrict(public.coords, contract.sendable.names)), "cpu"),
        schedule=method.schedule.init(contract.coords),
        codec=method.down.init(contract.step),
        ledger=Ledger(public.version, public.version),
    )
    if not method.schedule.resamples(public.version + 1):  # some blocks are sent later: check now what that breaks
        for names in (frozenset[str](), frozenset(contract.sendable.names[:1])):
            check_codes(contract, server, names)
    return server


def check_codes(contract: Contract, server: ServerState, names: frozenset[str]) -> None:
    """Refuse states of codes that have another shape when only these blocks are synchronized."""
    method = contract.method
    alike = set(method.sketch.spec(contract.coords.restrict(names))) <= set(contract.code)
    if not alike and (server.opt or server.codec or any(up.init(contract.code) for up in method.ups)):
        raise IncompatibleParts(
            f"{method.sketch!r} makes other codes when some blocks are not sent, as with {method.schedule!r}, but an "
            "optimizer or a codec keeps a state of codes from round to round. Use a sketch that codes each block "
            "separately, or parts without state"
        )


def unsent_in_old_basis(method: Method, unsent: frozenset[str]) -> IncompatibleParts:
    """The refusal of blocks that are not sent while the basis is redrawn."""
    return IncompatibleParts(
        f"{method.schedule!r} keeps changes of {min(unsent)!r} on clients, but {method.space!r} redraws its basis, in "
        "which they have no meaning. Write redraw_every = 0, or a schedule that sends all blocks in every round"
    )
