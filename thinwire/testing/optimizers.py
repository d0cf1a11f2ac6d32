"""Do an optimiser and a correction keep their contracts?"""

from __future__ import annotations

from functools import partial

from torch.func import vmap

from thinwire.core.spec import Spec
from thinwire.core.tree import add, repeat, restrict, same, stack, unstack
from thinwire.optimizers.base import Correction, Optimizer
from thinwire.optimizers.lr_schedules import LRSchedule
from thinwire.testing.common import (
    COORDS,
    KEY,
    check_close,
    check_part,
    check_spec,
    check_tree,
    hands_off,
    nudge,
    numbers,
    repeatable,
)


def check_optimizer(opt: Optimizer) -> None:
    """Check that an optimiser is a pure function which serves one client, many under vmap, and a part of the blocks.

    Names in its state end in the name of a block (`momentum/fc.weight`), or hold no '/' where they belong to all.

    >>> from thinwire.optimizers import SGD
    >>> check_optimizer(SGD(0.1, momentum=0.9, nesterov=True))
    """
    check_part(opt)
    assert opt.lr > 0, f"lr must be above 0, not {opt.lr}"
    clients = [numbers(COORDS, KEY.fold("coords", i)) for i in range(3)]
    grads = [[numbers(COORDS, KEY.fold("grads", step, i)) for i in range(3)] for step in range(3)]
    spec = Spec.of(clients[0])
    with hands_off("init", clients[0]):
        state = repeatable("init", lambda: opt.init(clients[0]))
    check_tree("init", state)
    for name in state:
        owned = "/" not in name or name.split("/", 1)[1] in COORDS
        assert owned, f"state {name!r} must be named 'what/block', or hold no '/' where it belongs to all blocks"

    states, coords = [state] * 3, clients
    many, held = stack(clients), repeat(state, 3)
    for step in grads:
        for i in range(3):
            with hands_off("update", step[i], states[i], coords[i]):
                once, again = (opt.update(step[i], states[i], coords[i]) for _ in range(2))
            assert all(map(same, once, again)), "update gives another answer the second time"
            check_spec("the change", once[0], spec)
            check_spec("the state after update", once[1], Spec.of(state))
            coords[i], states[i] = add(coords[i], once[0]), once[1]
        change, held = vmap(opt.update)(stack(step), held, many)
        many = add(many, change)
        for i in range(3):
            check_close("update under vmap", unstack(many, i), coords[i])
            check_close("the state after update under vmap", unstack(held, i), states[i])

    some = ("fc.weight/b", "scale")
    part = {name: block for name, block in states[0].items() if "/" not in name or name.split("/", 1)[1] in some}
    change, after = opt.update(restrict(grads[0][0], some), part, restrict(coords[0], some))
    check_spec("the change of some blocks", change, spec.restrict(some))
    check_spec("the state after an update of some blocks", after, Spec.of(part))


def check_lr_schedule(rate: LRSchedule) -> None:
    """Check that a rate is a pure function of the round, finite and above 0 for ever.

    >>> from thinwire.optimizers import CosineLR
    >>> check_lr_schedule(CosineLR(rounds=5))
    """
    check_part(rate)
    for version in (0, 1, 2, 10, 99, 100, 10**6):
        with hands_off("factor"):
            once, again = rate.factor(version), rate.factor(version)
        assert once == again, f"factor gives {once}, then {again}, for version {version}"
        assert 0 < once < float("inf"), f"the factor of version {version} is {once}; expected a number above 0"


def check_correction(correction: Correction) -> None:
    """Check that a correction is pure, keeps the shapes of its memories, and bends gradients alone or under vmap.

    What a client reports must be known from shapes alone, because the server learns the size of that lane by calling
    `finish` on tensors without numbers. The server must also stand a round in which only some blocks speak.

    >>> from thinwire.optimizers import NoCorrection
    >>> check_correction(NoCorrection())
    """
    check_part(correction)
    coords = [numbers(COORDS, KEY.fold("coords", i)) for i in range(3)]
    start, grads = ([numbers(COORDS, KEY.fold(what, i)) for i in range(3)] for what in ("start", "grads"))
    spec = Spec.of(coords[0])
    with hands_off("init", coords[0]):
        mine = repeatable("init_client", lambda: correction.init_client(coords[0]))
        shared = repeatable("init_shared", lambda: correction.init_shared(coords[0]))
        server = repeatable("init_server", lambda: correction.init_server(coords[0]))
    memory, known = ([nudge(tree, KEY.fold("memory", i), 0.5) for i in range(3)] for tree in (mine, shared))

    bent = []
    for i in range(3):
        args = (grads[i], coords[i], start[i], memory[i], known[0])
        with hands_off("gradient", *args):
            bent.append(repeatable("gradient", partial(correction.gradient, *args)))
        check_spec("gradient", bent[i], spec)
    many = vmap(correction.gradient, in_dims=(0, 0, 0, 0 if mine else None, None))(
        stack(grads), stack(coords), stack(start), stack(memory), known[0]
    )
    for i in range(3):
        check_close("gradient under vmap", unstack(many, i), bent[i])

    with hands_off("finish", coords[0], memory[0], known[0]):
        once, again = (correction.finish(coords[0], 5, 0.1, memory[0], known[0]) for _ in range(2))
    assert all(map(same, once, again)), "finish gives another answer the second time"
    after, report = once
    check_spec("the client's memory after finish", after, Spec.of(mine))
    shapes = spec.shapes()
    _, announced = correction.finish(shapes, 1, 0.1, correction.init_client(shapes), Spec.of(shared).shapes())
    check_spec("the report", report, Spec.of(announced))
    assert 0 < correction.factor(report) < float("inf"), "factor must give a number above 0 for an honest report"

    for names in (spec.names, ("fc.weight/b", "scale")):
        silent = set(spec.names) - set(names)
        state = {name: block for name, block in server.items() if not {name, name.split("/", 1)[-1]} & silent}
        delta = restrict(coords[0], names)
        with hands_off("server", delta, report, state):
            out, twin = (correction.server(delta, report, 0.5, state) for _ in range(2))
        assert all(map(same, out, twin)), "server gives another answer the second time"
        check_spec("the corrected change", out[0], Spec.of(delta))
        check_spec("the change of the shared memory", out[1], Spec.of(shared))
        check_spec("the server's memory", out[2], Spec.of(state))
