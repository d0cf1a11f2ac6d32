"""From one public version to the next: the same function on the server and on every client."""

from __future__ import annotations

from thinwire.core.tree import add, restrict
from thinwire.rounds.lanes import Step
from thinwire.rounds.state import Contract, Public, device_of


def advance(contract: Contract, public: Public, step: Step) -> Public:
    """public(v) -> public(v + 1): the same function on the server and on every client."""
    method = contract.method
    planned = contract.coords.restrict(step.names)
    change = method.sketch.decode(step.code, planned, contract.sketch_key(public.version))
    coords = {**public.coords, **add(restrict(public.coords, step.names), change)}
    shared = {**public.shared, **add(restrict(public.shared, step.shared), step.shared)}
    base, version = public.base, public.version + 1
    if contract.window(version) != contract.window(public.version):
        frame = contract.frame(public.version, device_of(public))
        base = method.space.expand(base, frame, coords)
        coords = method.space.init(base, frame, contract.key.fold("init", version))
    return Public(version, base, coords, shared, step.buffers or public.buffers)
