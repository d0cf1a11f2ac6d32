"""Before a round: what everybody derives from method, model and seed, the server's first state, and which blocks speak.

What cannot work together is found here, before anything is trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from thinwire.codecs.base import check_fits
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, restrict, to_device
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.masks.masks import NoMask
from thinwire.privacy.base import MaskedPrivacy
from thinwire.protocol.fields import noted, raw
from thinwire.protocol.ledger import Ledger
from thinwire.protocol.method import Method
from thinwire.protocol.secagg import check_secure
from thinwire.protocol.state import Contract, Public, ServerState
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire


def agree(method: Method, weights: Tree, buffers: Tree, key: Key) -> tuple[Contract, Public]:
    """The contract and the public state of version 0, which every party derives from method, model and seed.

    Args:
        method: the method.
        weights: initial trainable weights of the model.
        buffers: initial floating-point buffers of the model.
        key: the root of the run's randomness.
    """
    contract, public = _agree(method, weights, buffers, key)
    if method.next_stage is None:
        return contract, public
    later, _ = _agree(method.later, weights, buffers, key)
    # one schema for both, so that a message can be read before its version is known
    digest = hashlib.blake2b(contract.schema.digest + later.schema.digest, digest_size=8)
    digest.update(method.next_stage.at.to_bytes(8, "little"))
    names = tuple(dict.fromkeys((*contract.coords.names, *later.coords.names)))
    schema = wire.Schema(digest.digest(), names)
    later = replace(later, schema=schema, since=method.next_stage.at)
    return replace(contract, schema=schema, later=later), public


def _agree(method: Method, weights: Tree, buffers: Tree, key: Key) -> tuple[Contract, Public]:
    """The same for one stage."""
    spec = Spec.of(weights)
    if not spec.blocks:
        raise ConfigError("the model has no trainable weights; at least one parameter must have requires_grad=True")
    method.check(spec)
    device = next(iter(weights.values())).device
    basis = method.space.basis(spec, key.fold("frame", 0), device)
    coords = method.space.init(weights, basis, key.fold("init", 0))
    if not coords:
        raise ConfigError(f"{method.space!r} trains no weight of this model; let it train at least one")
    method.penalty.check(spec, Spec.of(coords))
    never = method.schedule.never(Spec.of(coords))  # a selector that matches nothing is found now, not after a round
    waits = never or (frozenset(coords) if not method.schedule.resamples(1) else frozenset())
    if waits and method.space.redraw_every:
        raise _held_in_lost_frame(method, waits)
    if waits and method.next_stage is not None:
        raise IncompatibleParts(
            f"{method.schedule!r} lets clients hold back {min(waits)!r}, but then gives up the coordinates of the "
            "first stage. Write schedule = 'all-blocks', or leave then out"
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
    h.update(key.value.to_bytes(8, "little"))  # another seed draws other bases: its messages are not ours
    contract = Contract(method, *specs, key, wire.Schema(h.digest(), specs[1].names))
    for up, down in zip(method.ups, method.downs, strict=True):
        check_fits(up, contract.code)
        check_fits(down, contract.code if method.download == "incremental" else contract.sendable)
    check_fits(method.merge_codec, contract.coords)
    if method.secure_aggregation:
        check_secure(contract)
    if method.privacy.bounds:
        _check_bounded(contract)
    return contract, Public(0, weights, coords, shared, buffers)


def _check_bounded(contract: Contract) -> None:
    """Raise IncompatibleParts if clients would reach the server beside, or unseen by, what bounds them."""
    method = contract.method
    plan = Plan(contract.sendable.named)
    for clash, part, instead in (
        (method.upload == "weights", "upload = 'weights', which is no change", "Write upload = 'delta'"),
        (
            method.client_weight.sent,
            f"{method.client_weight!r}, by which some count more",
            "Write client_weight = 'uniform'",
        ),
        (
            method.secure_aggregation and not isinstance(method.privacy, MaskedPrivacy),
            "secure_aggregation = true, which hides each of them",
            "Write secure_aggregation = false",
        ),
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
    if silent and method.space.redraw_every:
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
        f"{method.schedule!r} lets clients hold back {min(silent)!r}, but {method.space!r} redraws its basis, "
        "and what was held back means nothing in the next one. Write redraw_every = 0, or a schedule in which every "
        "block always speaks"
    )
