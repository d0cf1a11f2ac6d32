"""From one public version to a later one: the same functions on the server and on every client."""

from __future__ import annotations

from typing import Any

from thinwire.core.tree import Tree, add, restrict
from thinwire.protocol.fields import Step
from thinwire.protocol.state import Contract, Public, device_of


def moved(contract: Contract, public: Public, step: Step) -> Tree:
    """All coordinates after one entry, still in the basis in which they were trained."""
    planned = contract.coords.restrict(step.names)
    change = contract.method.sketch.decode(step.code, planned, contract.sketch_key(public.version))
    return {**public.coords, **add(restrict(public.coords, step.names), change)}


def advance(contract: Contract, public: Public, coords: Tree, version: int) -> Public:
    """public(v) -> public(version), which ends in these coordinates; shared memory and buffers stay for the caller.

    No basis ends between the two, but one may end at `version`: then the coordinates are merged into the base and
    begin anew. Base and coordinates are a function of where the coordinates ended, whichever way they came there.
    """
    space, base = contract.method.space, public.base
    if contract.window(version) != contract.window(public.version):
        basis = contract.basis(public.version, device_of(public))
        base = space.expand(base, basis, coords)
        coords = space.init(base, basis, contract.key.fold("init", version))
    return Public(version, base, coords, public.shared, public.buffers)


def switched(contract: Contract, later: Contract, public: Public) -> Public:
    """The same version in the coordinates of the next stage, on the same base.

    The server alone does this: on full download clients are sent what comes of it.
    """
    basis = contract.basis(public.version - 1, device_of(public))
    weights = contract.method.space.expand(public.base, basis, public.coords)
    space: Any = later.method.space  # `Method.check` has seen to it that it can
    coords = space.from_weights(public.base, weights, contract.key.fold("init", public.version))
    shared = later.method.correction.init_shared(coords)
    return public._replace(coords=coords, shared=shared)
