"""What the author of a part runs on it: each check asks whether a part keeps its contract, and says where it does not.

    check_space   check_sketch   check_schedule   check_codec   check_optimiser   check_correction   check_privacy

A check returns nothing, or raises an AssertionError that says what was expected. It needs no test framework, no data
and about a second. All of them also ask that a part is its own configuration: a frozen dataclass, equal by value, whose
repr evaluates to an equal part; and that it draws randomness from the key that it is given and from nowhere else.

>>> from thinwire.spaces import Full
>>> check_space(Full())
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from thinwire.codecs.base import Codec, Peer
from thinwire.core.rng import Key
from thinwire.core.spec import DTYPES, Spec
from thinwire.core.tree import Tree, add, repeat, restrict, same, scale, stack, sub, tmap, unstack, weighted_mean
from thinwire.errors import ConfigError, WireError
from thinwire.optim.base import Correction, Optimiser
from thinwire.privacy.base import Privacy
from thinwire.schedules.base import Plan, Schedule
from thinwire.sketches.base import Sketch
from thinwire.spaces.base import Space

_KEY = Key(2026)
_SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 2, 3, 3),
    "norm.weight": (4,),
    "norm.bias": (4,),
    "fc.weight": (6, 4),
    "fc.bias": (6,),
    "head.weight": (3, 6),
    "scale": (),
}
_COORDS: dict[str, tuple[int, ...]] = {"fc.weight/a": (2, 3), "fc.weight/b": (3, 2), "head.bias": (4,), "scale": ()}


# -- spaces and sketches -----------------------------------------------------------------------------------------------


def check_space(space: Space, weights: Tree | None = None, *, starts_at_base: bool = True) -> None:
    """Check that a space turns coordinates into weights as the rounds expect.

    The frame and the first coordinates are functions of the key; `expand` is pure, gives every weight its name, shape
    and type, has the gradient that finite differences show, and under vmap does what it does alone.

    Args:
        space: the part.
        weights: the weights of a model; by default a small one with a convolution, a norm, two matrices and a scalar.
        starts_at_base: whether the first coordinates make the base itself; a space that redraws its frame must.

    >>> from thinwire.spaces import Full
    >>> check_space(Full())
    """
    _check_part(space)
    base = weights if weights is not None else _numbers(_SHAPES, _KEY.fold("weights"))
    spec = Spec.of(base)
    every = space.fresh_every
    assert type(every) is int, f"fresh_every must be a number of rounds, not {every!r}"
    assert every >= 0, f"fresh_every must be 0 (never) or a number of rounds, not {every!r}"
    with _hands_off("check, frame and init", base):
        space.check(spec)
        frame = _repeatable("frame", lambda: space.frame(spec, _KEY.fold("frame"), "cpu"))
        coords = _repeatable("init", lambda: space.init(base, frame, _KEY.fold("init")))
    _check_tree("init", coords)
    for name, block in coords.items():
        owner = name.split("/", 1)[0]
        assert name in base or owner in base or owner == "model", (
            f"coordinates {name!r} must be named after a weight, as 'weight/part', or after all, as 'model/part'"
        )
        assert block.is_floating_point(), (
            f"coordinates {name!r} are of type {block.dtype}; only real numbers are trained"
        )
    if space.fresh_every:
        assert starts_at_base, "a space that redraws its frame must start at the base: it merges and starts anew"
        other = space.frame(spec, _KEY.fold("other frame"), "cpu")
        again = space.init(base, other, _KEY.fold("init"))
        assert same(coords, again), "init of a space that redraws its frame must not depend on the numbers in it"

    with _hands_off("expand", base, frame, coords):
        made = _repeatable("expand", lambda: space.expand(base, frame, coords))
    _check_spec("expand", made, spec)
    if starts_at_base:
        for name in base:
            assert torch.equal(made[name], base[name]), (
                f"expand(base, frame, init(...)) differs from the base in {name!r}"
            )
    if coords:
        _check_gradient(space, base, frame, coords)


def _check_gradient(space: Space, base: Tree, frame: Tree, coords: Tree) -> None:
    """Gradient against finite differences, and vmap against a loop."""
    look = _numbers({name: tuple(block.shape) for name, block in base.items()}, _KEY.fold("look"))

    def value(point: Tree) -> Tensor:
        made = space.expand(base, frame, point)
        return torch.stack([(made[name].double() * look[name].double()).sum() for name in base]).sum()

    points = [_nudge(coords, _KEY.fold("point", i), 0.1) for i in range(3)]
    slopes = [grad(value)(point) for point in points]
    _check_spec("the gradient of expand", slopes[0], Spec.of(coords))
    reach = 1e-2
    for i, (point, slope) in enumerate(zip(points, slopes, strict=True)):
        way = _nudge(scale(coords, 0.0), _KEY.fold("way", i), 1.0)
        rise = float(value(add(point, scale(way, reach))) - value(sub(point, scale(way, reach)))) / (2 * reach)
        parts = [(slope[name].double() * way[name].double()).flatten() for name in coords]
        size = math.sqrt(sum(float(part.square().sum()) for part in parts))
        said = float(torch.cat(parts).sum())
        assert abs(rise - said) <= 1e-2 * (size + abs(said)) + 1e-3, (
            f"the gradient of expand gives a slope of {said:.5g} where finite differences give {rise:.5g}"
        )
    together: Tree = vmap(grad(value))(stack(points))
    weights: Tree = vmap(partial(space.expand, base, frame))(stack(points))
    for i, point in enumerate(points):
        _check_close("the gradient of expand under vmap", unstack(together, i), slopes[i])
        _check_close("expand under vmap", unstack(weights, i), space.expand(base, frame, point))


def check_sketch(sketch: Sketch) -> None:
    """Check that a sketch makes codes that may be averaged.

    The code is what `spec` announces, for all blocks, some and none. Averaging must commute with one of the two maps:
    mean of codes = code of the mean, or what the mean decodes to = mean of what the codes decode to.

    >>> from thinwire.sketches import Identity
    >>> check_sketch(Identity())
    """
    _check_part(sketch)
    deltas = [_numbers(_COORDS, _KEY.fold("delta", i)) for i in range(3)]
    for names in (tuple(_COORDS), tuple(_COORDS)[1:3], ()):
        some = [restrict(delta, names) for delta in deltas]
        coords, key = Spec.of(some[0]), _KEY.fold("sketch", len(names))
        with _hands_off("encode", *some):
            codes = [_repeatable("encode", partial(sketch.encode, delta, key)) for delta in some]
        _check_spec("encode", codes[0], sketch.spec(coords))
        mean = weighted_mean(codes, [1.0, 2.0, 3.0])
        with _hands_off("decode", mean):
            decoded = _repeatable("decode", partial(sketch.decode, mean, coords, key))
        _check_spec("decode", decoded, coords)
        direct = sketch.encode(weighted_mean(some, [1.0, 2.0, 3.0]), key)
        apart = weighted_mean([sketch.decode(code, coords, key) for code in codes], [1.0, 2.0, 3.0])
        assert _close(mean, direct) or _close(decoded, apart), (
            "the mean of codes is not a code of the mean: neither encode nor decode is linear"
        )


# -- schedules ---------------------------------------------------------------------------------------------------------


def check_schedule(schedule: Schedule, coords: Spec | None = None) -> None:
    """Check that a schedule plans blocks that exist, the same ones every time it is asked, and never a private one.

    Twenty rounds are played with made-up changes.

    Args:
        schedule: the part.
        coords: the blocks; by default some of a small model, so give your own where selectors name blocks.

    >>> from thinwire.schedules import Every
    >>> check_schedule(Every(private=("head.*",)))
    """
    _check_part(schedule)
    spec = coords if coords is not None else Spec.of(_numbers(_SHAPES, _KEY))
    never = schedule.never(spec)
    assert isinstance(never, frozenset), f"never must give a frozenset, not {type(never).__name__}"
    assert never <= set(spec.names), f"never names blocks that do not exist: {sorted(never - set(spec.names))}"
    state = _repeatable("init", lambda: schedule.init(spec))
    for version in range(20):
        with _hands_off("plan", state):
            plan = schedule.plan(state, spec, version)
            assert plan == schedule.plan(state, spec, version), f"version {version} has two different plans"
        assert isinstance(plan, Plan), f"plan must give a Plan, not {type(plan).__name__}"
        assert isinstance(plan.names, frozenset), (
            f"the names of a plan are a frozenset, not {type(plan.names).__name__}"
        )
        assert plan.names <= set(spec.names), f"planned blocks do not exist: {sorted(plan.names - set(spec.names))}"
        assert not plan.names & never, f"private blocks are planned: {sorted(plan.names & never)}"
        planned = spec.restrict(plan.names)
        shapes = {block.name: block.shape for block in planned}
        deltas = [_numbers(shapes, _KEY.fold("delta", version, i)) for i in range(2)]
        with _hands_off("report", *deltas):
            reports = [_repeatable("report", partial(schedule.report, delta, plan)) for delta in deltas]
        _check_spec("report", reports[0], Spec.of(schedule.report(planned.shapes(), plan)))
        mean, noted = weighted_mean(deltas, [1.0, 1.0]), weighted_mean(reports, [1.0, 1.0])
        with _hands_off("observe", state, mean, noted):
            observe = partial(schedule.observe, state, plan, mean, noted)
            state = _repeatable("observe", observe)
        _check_tree("observe", state)


# -- codecs ------------------------------------------------------------------------------------------------------------


def check_codec(codec: Codec, *, lossless: bool = False) -> None:
    """Check that a codec brings back a tree of the right shape, and stands whatever else it is given.

    All number types that it takes (it raises ConfigError for others; float32 it must take), scalars, empty blocks, no
    blocks at all, and some blocks only while its memory is of all. Every truncation and some hundred mutations of its
    bytes must decode to a tree of the right shape or raise WireError.

    Args:
        codec: the part.
        lossless: whether the numbers must come back bit for bit.

    >>> from thinwire.codecs import Raw
    >>> check_codec(Raw(), lossless=True)
    """
    _check_part(codec)
    taken = []
    for dtype in DTYPES:
        tree = {name: _typed(block, dtype) for name, block in _numbers(_COORDS, _KEY.fold("tree")).items()}
        try:
            _check_round_trip(codec, tree, lossless)
            taken.append(dtype)
        except ConfigError:
            assert dtype is not torch.float32, "a codec must take float32"
    whole = _numbers(_COORDS, _KEY.fold("tree"))
    turned = {**whole, "fc.weight/a": whole["fc.weight/a"].t().contiguous().t()}
    first, second = (codec.encode(tree, codec.init(Spec.of(tree)), Peer(_KEY))[0] for tree in (whole, turned))
    assert first == second, "the bytes depend on how a block lies in memory; make it contiguous first"
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3e38]
    for tree in (
        {},
        {"w": torch.tensor(1.5)},
        {"w": torch.zeros(0, 3), "v": torch.ones(2)},
        {name: torch.zeros_like(block) for name, block in whole.items()},
        {name: torch.full_like(block, -2.5) for name, block in whole.items()},
        *([{"w": torch.tensor(special)}] if lossless else []),
        *([{name: _typed(block, d) for (name, block), d in zip(whole.items(), taken, strict=False)}]),
    ):
        _check_round_trip(codec, tree, lossless)
    _check_some_blocks(codec, whole)
    _check_mutations(codec, whole)


def _check_round_trip(codec: Codec, tree: Tree, lossless: bool) -> None:
    spec, peer = Spec.of(tree), Peer(_KEY.fold("peer"))
    state = _repeatable("init", lambda: codec.init(spec))
    for _ in range(3):  # a codec with memory has one worth the name only after some messages
        with _hands_off("encode", tree, state):
            (data, after), (again, _) = codec.encode(tree, state, peer), codec.encode(tree, state, peer)
        assert isinstance(data, bytes), f"encode must give bytes, not {type(data).__name__}"
        assert data == again, "encode gives other bytes the second time"
        _check_spec("the state after encode", after, Spec.of(state))
        size = codec.size(spec)
        assert size is None or size == len(data), f"size says {size} bytes, encode makes {len(data)}"
        back = _repeatable("decode", partial(codec.decode, data, spec, peer))
        _check_spec("decode", back, spec)
        for name, block in back.items():
            assert block.device.type == "cpu", f"decode must give blocks on the CPU, {name!r} is on {block.device}"
        if lossless:
            assert same(back, tree), f"the numbers of {spec} do not come back bit for bit"
        state = after


def _check_some_blocks(codec: Codec, whole: Tree) -> None:
    """A round may let some blocks speak only: their state moves, that of the others must stay."""
    peer = Peer(_KEY.fold("some"))
    _, state = codec.encode(whole, codec.init(Spec.of(whole)), peer)
    some = restrict(whole, ("fc.weight/b", "scale"))
    with _hands_off("encode", some, state):
        data, after = codec.encode(some, state, peer)
    _check_spec("decode", codec.decode(data, Spec.of(some), peer), Spec.of(some))
    _check_spec("the state after a message of some blocks", after, Spec.of(state))
    for name in state:
        if any(name == block or name.endswith(f"/{block}") for block in whole.keys() - some.keys()):
            assert same({name: after[name]}, {name: state[name]}), f"state {name!r} of a silent block has changed"


def _check_mutations(codec: Codec, tree: Tree) -> None:
    """Bytes that encode did not make: refused with WireError, or decoded to a tree of the right shape."""
    spec, peer = Spec.of(tree), Peer(_KEY.fold("peer"))
    data, _ = codec.encode(tree, codec.init(spec), peer)
    wrong = [data[:n] for n in range(len(data))] + [data + b"\0", data + data, b"\xff" * len(data), b""]
    for i in range(400):
        key = _KEY.fold("mutation", i)
        broken = bytearray(data)
        for at, value in zip(
            key.fold("at").integers(1 + i % 4, max(1, len(data))).tolist(),
            key.fold("value").integers(1 + i % 4, 256).tolist(),
            strict=True,
        ):
            if at < len(broken):
                broken[at] = value
        wrong.append(bytes(broken))
    for bad in wrong:
        try:
            back = codec.decode(bad, spec, peer)
        except WireError:
            continue
        except Exception as error:
            raise AssertionError(
                f"decode must raise WireError for bytes that encode did not make, not {type(error).__name__}: {error} "
                f"(bytes {bad[:40].hex()})"
            ) from error
        _check_spec(f"decode of damaged bytes {bad[:40].hex()}", back, spec)


# -- optimisers, corrections, privacy ----------------------------------------------------------------------------------


def check_optimiser(opt: Optimiser) -> None:
    """Check that an optimiser is a pure function which serves one client, many under vmap, and a part of the blocks.

    Names in its state end in the name of a block (`momentum/fc.weight`), or hold no '/' where they belong to all.

    >>> from thinwire.optim import SGD
    >>> check_optimiser(SGD(0.1, momentum=0.9, nesterov=True))
    """
    _check_part(opt)
    assert opt.lr > 0, f"lr must be above 0, not {opt.lr}"
    clients = [_numbers(_COORDS, _KEY.fold("coords", i)) for i in range(3)]
    grads = [[_numbers(_COORDS, _KEY.fold("grads", step, i)) for i in range(3)] for step in range(3)]
    spec = Spec.of(clients[0])
    with _hands_off("init", clients[0]):
        state = _repeatable("init", lambda: opt.init(clients[0]))
    _check_tree("init", state)
    for name in state:
        owned = "/" not in name or name.split("/", 1)[1] in _COORDS
        assert owned, f"state {name!r} must be named 'what/block', or hold no '/' where it belongs to all blocks"

    states, coords = [state] * 3, clients
    many, held = stack(clients), repeat(state, 3)
    for step in grads:
        for i in range(3):
            with _hands_off("update", step[i], states[i], coords[i]):
                once, again = (opt.update(step[i], states[i], coords[i]) for _ in range(2))
            assert all(map(same, once, again)), "update gives another answer the second time"
            _check_spec("the change", once[0], spec)
            _check_spec("the state after update", once[1], Spec.of(state))
            coords[i], states[i] = add(coords[i], once[0]), once[1]
        change, held = vmap(opt.update)(stack(step), held, many)
        many = add(many, change)
        for i in range(3):
            _check_close("update under vmap", unstack(many, i), coords[i])
            _check_close("the state after update under vmap", unstack(held, i), states[i])

    some = ("fc.weight/b", "scale")
    part = {name: block for name, block in states[0].items() if "/" not in name or name.split("/", 1)[1] in some}
    change, after = opt.update(restrict(grads[0][0], some), part, restrict(coords[0], some))
    _check_spec("the change of some blocks", change, spec.restrict(some))
    _check_spec("the state after an update of some blocks", after, Spec.of(part))


def check_correction(correction: Correction) -> None:
    """Check that a correction is pure, keeps the shapes of its memories, and bends gradients alone or under vmap.

    What a client reports must be known from shapes alone, because the server learns the size of that lane by calling
    `finish` on tensors without numbers. The server must also stand a round in which only some blocks speak.

    >>> from thinwire.optim import NoCorrection
    >>> check_correction(NoCorrection())
    """
    _check_part(correction)
    coords = [_numbers(_COORDS, _KEY.fold("coords", i)) for i in range(3)]
    start, grads = ([_numbers(_COORDS, _KEY.fold(what, i)) for i in range(3)] for what in ("start", "grads"))
    spec = Spec.of(coords[0])
    with _hands_off("init", coords[0]):
        mine = _repeatable("init_client", lambda: correction.init_client(coords[0]))
        shared = _repeatable("init_shared", lambda: correction.init_shared(coords[0]))
        server = _repeatable("init_server", lambda: correction.init_server(coords[0]))
    memory, known = ([_nudge(tree, _KEY.fold("memory", i), 0.5) for i in range(3)] for tree in (mine, shared))

    bent = []
    for i in range(3):
        args = (grads[i], coords[i], start[i], memory[i], known[0])
        with _hands_off("gradient", *args):
            bent.append(_repeatable("gradient", partial(correction.gradient, *args)))
        _check_spec("gradient", bent[i], spec)
    many = vmap(correction.gradient, in_dims=(0, 0, 0, 0 if mine else None, None))(
        stack(grads), stack(coords), stack(start), stack(memory), known[0]
    )
    for i in range(3):
        _check_close("gradient under vmap", unstack(many, i), bent[i])

    with _hands_off("finish", coords[0], memory[0], known[0]):
        once, again = (correction.finish(coords[0], 5, 0.1, memory[0], known[0]) for _ in range(2))
    assert all(map(same, once, again)), "finish gives another answer the second time"
    after, report = once
    _check_spec("the client's memory after finish", after, Spec.of(mine))
    shapes = spec.shapes()
    _, announced = correction.finish(shapes, 1, 0.1, correction.init_client(shapes), Spec.of(shared).shapes())
    _check_spec("the report", report, Spec.of(announced))

    for names in (spec.names, ("fc.weight/b", "scale")):
        silent = set(spec.names) - set(names)
        state = {name: block for name, block in server.items() if not {name, name.split("/", 1)[-1]} & silent}
        delta = restrict(coords[0], names)
        with _hands_off("server", delta, report, state):
            out, twin = (correction.server(delta, report, 0.5, state) for _ in range(2))
        assert all(map(same, out, twin)), "server gives another answer the second time"
        _check_spec("the corrected change", out[0], Spec.of(delta))
        _check_spec("the change of the shared memory", out[1], Spec.of(shared))
        _check_spec("the server's memory", out[2], Spec.of(state))


def check_privacy(privacy: Privacy) -> None:
    """Check that a privacy mechanism keeps shapes, changes nothing in place and draws from its key alone.

    It says nothing about how private the mechanism is: that is for an accountant.

    >>> from thinwire.privacy import NoPrivacy
    >>> check_privacy(NoPrivacy())
    """
    _check_part(privacy)
    for code in (_numbers(_COORDS, _KEY.fold("code")), tmap(torch.zeros_like, _numbers(_COORDS, _KEY)), {}):
        for what, call in (
            ("bound", partial(privacy.bound, code, _KEY.fold("bound"))),
            ("release", partial(privacy.release, code, 7, _KEY.fold("release"))),
        ):
            with _hands_off(what, code):
                out = _repeatable(what, call)
            _check_spec(what, out, Spec.of(code))
            for name, block in out.items():
                assert bool(torch.isfinite(block).all()), f"{what} made a number in {name!r} that is not finite"


# -- what all checks ask -----------------------------------------------------------------------------------------------


def _check_part(part: Any) -> None:
    """A part is its own configuration."""
    kind = type(part)
    assert dataclasses.is_dataclass(kind), f"{kind.__name__} must be a dataclass"
    assert kind.__dataclass_params__.frozen, f"{kind.__name__} must be frozen: @dataclass(frozen=True)"  # type: ignore[attr-defined]
    twin = dataclasses.replace(part)
    assert twin == part, f"{kind.__name__} must be equal by value: two with the same settings differ"
    names: dict[str, Any] = {"__builtins__": {}, "inf": math.inf, "nan": math.nan}
    _collect_classes(part, names)
    try:
        again = eval(repr(part), names)
    except Exception as error:
        raise AssertionError(
            f"the repr of a part is its configuration, but {part!r} does not evaluate ({error}); "
            "define the class at the top of a module and do not hide fields from repr"
        ) from error
    assert again == part, f"the repr of a part is its configuration, but {part!r} evaluates to {again!r}"


def _collect_classes(value: Any, names: dict[str, Any]) -> None:
    """The classes of a part and of all parts inside it, by name."""
    if dataclasses.is_dataclass(type(value)):
        names[type(value).__name__] = type(value)
        for field in dataclasses.fields(value):
            _collect_classes(getattr(value, field.name), names)
    elif isinstance(value, Mapping):
        for inner in value.values():
            _collect_classes(inner, names)
    elif isinstance(value, tuple | list | frozenset):
        for inner in value:
            _collect_classes(inner, names)


@contextmanager
def _hands_off(what: str, *trees: Tree) -> Iterator[None]:
    """Whatever happens inside changes none of the trees and draws nothing from torch's own generator."""
    before = [tmap(torch.clone, tree) for tree in trees]
    generator = torch.get_rng_state()
    yield
    for tree, was in zip(trees, before, strict=True):
        assert same(tree, was), f"{what} must not change what it is given"
    assert torch.equal(torch.get_rng_state(), generator), f"{what} must draw from the key, not from torch's generator"


def _repeatable(what: str, call: Callable[[], Tree]) -> Tree:
    """The answer of a function that gives the same one twice."""
    first, second = call(), call()
    _check_tree(what, first)
    assert same(first, second), f"{what} gives another answer the second time"
    return first


def _check_tree(what: str, tree: Any) -> None:
    good = isinstance(tree, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tree.items())
    assert good, f"{what} must give a dictionary from names to tensors"


def _check_spec(what: str, tree: Tree, expected: Spec) -> None:
    _check_tree(what, tree)
    got = [(block.name, block.shape, block.dtype) for block in Spec.of(tree)]
    wanted = [(block.name, block.shape, block.dtype) for block in expected]
    assert got == wanted, f"{what}: expected the blocks {wanted}, in this order, got {got}"


def _check_close(what: str, got: Tree, wanted: Tree) -> None:
    assert _close(got, wanted), f"{what} differs from the same for one client alone"


def _close(a: Tree, b: Tree) -> bool:
    """Equal up to rounding, measured against the largest number of a block."""
    return list(a) == list(b) and all(
        torch.allclose(a[name], block, rtol=1e-4, atol=1e-5 * max([1e-3, *block.abs().flatten().tolist()]))
        for name, block in b.items()
    )


def _numbers(shapes: Mapping[str, tuple[int, ...]], key: Key) -> Tree:
    return {name: key.fold(name).normal(*shape) for name, shape in shapes.items()}


def _nudge(tree: Tree, key: Key, size: float) -> Tree:
    return {name: block + size * key.fold(name).normal(*block.shape).to(block.dtype) for name, block in tree.items()}


def _typed(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of another type with some life in them."""
    if dtype is torch.bool:
        return block > 0
    return (block * 10).abs().to(dtype) if dtype is torch.uint8 else (block * 10).to(dtype)
