"""From one public version to a later one: the same functions on the server and on every client."""

from __future__ import annotations

from thinwire.core.tree import Tree, add, restrict
from thinwire.protocol.contract import Contract
from thinwire.protocol.entries import ServerStep
from thinwire.protocol.state import PublicState
from thinwire.spaces.base import Stack


def apply_step(contract: Contract, public: PublicState, step: ServerStep) -> Tree:
    """All coordinates after one entry, in the basis in which they were trained."""
    change, sketch = step.code, contract.method.sketch
    if not (sketch.is_identity or sketch.recovers):
        planned = contract.coords.restrict(step.names)
        change = sketch.decode(step.code, planned, contract.sketch_key(public.version))
    if not change:
        return public.coords
    moved = add(restrict(public.coords, change), change)
    return moved if list(moved) == list(public.coords) else {**public.coords, **moved}


def advance(
    contract: Contract, public: PublicState, coords: Tree, version: int, stack: Stack | None = None
) -> PublicState:
    """public(v) -> public(version) with these coordinates; the caller replaces shared state and buffers.

    The window must not end before `version`, but may end at it: then the stack of the entry, if it has one, is added to
    the base, the coordinates are merged into it, and new ones begin (`Space.merge`). Base and coordinates depend only
    on the coordinates at the end and on stacks, not on the way there.
    """
    space, base = contract.method.space, public.base
    if stack is not None and stack.blocks and space.stacking is not None:
        base = space.stacking.with_stack(base, stack.blocks)
    if space.redraw_every and contract.window(version) != contract.window(public.version):
        basis = contract.basis(public.version, public.device)
        base, coords = space.merge(base, basis, coords, contract.key.fold("init", version))
    return PublicState(version, base, coords, public.shared, public.buffers)


def switch_stage(contract: Contract, later: Contract, public: PublicState) -> PublicState:
    """The same version in the coordinates of the second stage, on the same base.

    Only the server does this: full downloads send the result to clients.
    """
    basis = contract.basis(public.version - 1, public.device)
    weights = contract.method.space.expand(public.base, basis, public.coords)
    coords = later.method.space.from_weights(public.base, weights, contract.key.fold("init", public.version))
    shared = later.method.correction.init_shared(coords)
    return public._replace(coords=coords, shared=shared)
