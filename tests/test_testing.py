"""The conformance suite: it lets good parts pass, and names what is wrong with bad ones."""

from dataclasses import dataclass, field

import pytest
import torch

from tests.parts import Clip, Drift, Half, Pool, Product, Project, Remember, Turns
from thinwire.codecs import RandomK, Raw
from thinwire.core.spec import Spec
from thinwire.core.tree import scale, tmap
from thinwire.errors import ConfigError, WireError
from thinwire.optimizers import SGD, FedDyn, NoCorrection, Scaffold
from thinwire.privacy import NoPrivacy
from thinwire.schedules import AllBlocks, Plan
from thinwire.sketches import Identity
from thinwire.spaces import Full
from thinwire.testing import (
    check_codec,
    check_correction,
    check_optimizer,
    check_privacy,
    check_schedule,
    check_sketch,
    check_space,
)


def test_good_spaces_pass():
    check_space(Full())
    check_space(Drift(k=4))
    check_space(Drift(k=4, redraw_every=0))
    check_space(Product(), starts_at_base=False)
    check_space(Drift(), {"w": torch.ones(3, 2), "b": torch.zeros(3)})


def test_other_good_parts_pass():
    for sketch in (Identity(), Project(0.5), Project(0.1), Pool()):
        check_sketch(sketch)
    for schedule in (AllBlocks(), AllBlocks(private=("norm.*", "scale")), Turns(3), Turns(2, private=("fc.weight",))):
        check_schedule(schedule)
    check_schedule(AllBlocks(private=("w",)), Spec.of({"w": torch.zeros(1), "v": torch.zeros(2)}))
    for codec in (Half(), Remember()):
        check_codec(codec)
    check_codec(Raw(), lossless=True)
    for correction in (NoCorrection(), Scaffold(), FedDyn()):
        check_correction(correction)
    for privacy in (NoPrivacy(), Clip()):
        check_privacy(privacy)


# -- bad parts: each breaks one promise --------------------------------------------------------------------------------


@dataclass
class Thawed:
    redraw_every: int = 0


@dataclass(frozen=True, eq=False)
class Unequal:
    redraw_every: int = 0


@dataclass(frozen=True)
class Secretive(Full):
    k: int = field(default=1, repr=False)


@dataclass(frozen=True)
class GlobalDice(Drift):
    def basis(self, spec, key, device):
        return {b.name: torch.randn(b.numel, self.k) for b in spec}


@dataclass(frozen=True)
class OddNames(Drift):
    def init(self, base, basis, key):
        return {f"b/{name}": block.new_zeros(self.k) for name, block in base.items()}

    def expand(self, base, basis, coords):
        return {name: w + (basis[name] @ coords[f"b/{name}"]).reshape(w.shape) for name, w in base.items()}


@dataclass(frozen=True)
class FromFrame(Drift):
    def init(self, base, basis, key):
        return {f"{name}/b": 0 * block.new_zeros(self.k) + basis[name][0] for name, block in base.items()}


@dataclass(frozen=True)
class InPlace(Full):
    def expand(self, base, basis, coords):
        for block in coords.values():
            block.mul_(2)
        return coords


@dataclass(frozen=True)
class Reordered(Full):
    def expand(self, base, basis, coords):
        return dict(reversed(coords.items()))


class _Wrong(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return 3 * slope


@dataclass(frozen=True)
class WrongSlope(Full):
    def expand(self, base, basis, coords):
        return tmap(_Wrong.apply, coords)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (Thawed(), "must be frozen"),
        (Unequal(), "equal by value"),
        (Secretive(k=2), "repr of a part"),
        (GlobalDice(), "basis gives another answer|not from torch's generator"),
        (OddNames(), "named after a weight"),
        (FromFrame(), "must not depend on the numbers in it"),
        (Product(redraw_every=1), "differs from the base"),
        (InPlace(), "must not change what it is given|another answer"),
        (Reordered(), "in this order"),
    ],
)
def test_bad_spaces_are_named(space, says):
    with pytest.raises(AssertionError, match=says):
        check_space(space)


def test_a_wrong_gradient_is_found_by_finite_differences():
    with pytest.raises(AssertionError, match="finite differences"):
        check_space(WrongSlope(), starts_at_base=False)


def test_a_part_that_is_no_dataclass_is_named():
    class Plain:
        redraw_every = 0

    with pytest.raises(AssertionError, match="must be a dataclass"):
        check_space(Plain())


def test_a_part_defined_inside_a_function_is_named():
    @dataclass(frozen=True)
    class Local(Full):
        pass

    with pytest.raises(AssertionError, match="at the top of a module"):
        check_space(Local())


@dataclass(frozen=True)
class Curved(Identity):
    def encode(self, delta, key):
        return tmap(torch.sign, delta)

    def decode(self, code, coords, key):
        return tmap(lambda x: x**3, code)


@dataclass(frozen=True)
class LinearDecode(Identity):
    def encode(self, delta, key):
        return tmap(torch.sign, delta)


@dataclass(frozen=True)
class Misannounced(Project):
    def spec(self, coords):
        return coords


def test_bad_sketches_are_named_and_one_linear_map_is_enough():
    check_sketch(LinearDecode())
    with pytest.raises(AssertionError, match="mean of codes"):
        check_sketch(Curved())
    with pytest.raises(AssertionError, match="encode: expected the blocks"):
        check_sketch(Misannounced())


@dataclass(frozen=True)
class Leaky(AllBlocks):
    def plan(self, state, coords, version):
        return Plan(frozenset(coords.names) if version == 13 else frozenset())


@dataclass(frozen=True)
class Phantom(AllBlocks):
    def plan(self, state, coords, version):
        return Plan(frozenset({"nowhere"}))


@dataclass(frozen=True)
class Rewriting(Turns):
    def observe(self, state, plan, mean, report):
        state["rounds"] += 1
        return state


@dataclass(frozen=True)
class ByValue(Turns):
    def report(self, delta, plan):
        return {name: block.sum() for name, block in delta.items() if block.is_meta or block.sum() > 0}


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (Leaky(private=("fc.*",)), "private blocks are planned"),
        (Phantom(), "do not exist"),
        (Rewriting(), "another answer|must not change"),
        (ByValue(), "report: expected the blocks"),
    ],
)
def test_bad_schedules_are_named(schedule, says):
    with pytest.raises(AssertionError, match=says):
        check_schedule(schedule)


@dataclass(frozen=True)
class Boastful(Raw):
    def size(self, spec):
        return spec.nbytes + 1


@dataclass(frozen=True)
class Crashing(Raw):
    def decode(self, data, spec, peer):
        if len(data) < spec.nbytes:
            raise IndexError("out of bytes")
        return super().decode(data, spec, peer)


@dataclass(frozen=True)
class Trusting(Raw):
    def decode(self, data, spec, peer):
        return Raw().decode(data, spec, peer) if len(data) == spec.nbytes else {}


@dataclass(frozen=True)
class Forgetful(Remember):
    def encode(self, tree, state, peer):
        data, after = super().encode(tree, state, peer)
        return data, {f"rest/{name}": after[f"rest/{name}"] for name in tree}


@dataclass(frozen=True)
class Overwriting(Remember):
    def encode(self, tree, state, peer):
        data, after = super().encode(tree, state, peer)
        for name in tree:
            state[f"rest/{name}"].copy_(after[f"rest/{name}"])
        return data, state


@dataclass(frozen=True)
class Picky(Raw):
    def encode(self, tree, state, peer):
        if any(block.dtype is torch.float32 for block in tree.values()):
            raise ConfigError("no")
        return super().encode(tree, state, peer)


@dataclass(frozen=True)
class Unshared(RandomK):
    adds = True


@dataclass(frozen=True)
class Refusing(Raw):
    def decode(self, data, spec, peer):
        if not spec.blocks:
            raise WireError("nothing here")
        return super().decode(data, spec, peer)


@pytest.mark.parametrize(
    ("codec", "says"),
    [
        (Boastful(), "size says"),
        (Crashing(), "must raise WireError .* not IndexError"),
        (Trusting(), "decode of damaged bytes"),
        (Forgetful(), "state after a message of some blocks"),
        (Overwriting(), "other bytes the second time|must not change"),
        (Picky(), "must take float32"),
        (Unshared(), "says that its messages add up"),
    ],
)
def test_bad_codecs_are_named(codec, says):
    with pytest.raises(AssertionError, match=says):
        check_codec(codec)


def test_a_codec_must_take_a_tree_without_blocks():
    with pytest.raises(WireError, match="nothing here"):
        check_codec(Refusing())


def test_a_lossy_codec_is_not_lossless():
    with pytest.raises(AssertionError, match="bit for bit"):
        check_codec(Half(), lossless=True)


@dataclass(frozen=True)
class Branching(SGD):
    def update(self, grads, state, coords):
        way = {name: g if bool((g > -9).all()) else -g for name, g in grads.items()}
        return super().update(way, state, coords)


@dataclass(frozen=True)
class Misnamed(SGD):
    def init(self, coords):
        return {"momentum": {f"momentum/{name}": torch.zeros_like(block) for name, block in coords.items()}}


@dataclass(frozen=True)
class Rushing(SGD):
    def update(self, grads, state, coords):
        return tmap(lambda g: g.mul_(-self.lr), grads), state


def test_bad_optimisers_are_named():
    with pytest.raises(AssertionError, match="name of a block"):
        check_optimizer(Misnamed())
    with pytest.raises(AssertionError, match="must not change"):
        check_optimizer(Rushing())
    with pytest.raises(RuntimeError, match="vmap"):
        check_optimizer(Branching())


@dataclass(frozen=True)
class Weighing(Scaffold):
    def finish(self, moved, steps, lr, mine, shared):
        new, report = super().finish(moved, steps, lr, mine, shared)
        return new, {name: block for name, block in report.items() if block.is_meta or block.sum() > 0}


@dataclass(frozen=True)
class Greedy(FedDyn):
    def factor(self, report):
        return 1.0

    def server(self, delta, report, fraction, state):
        return {name: delta.get(name, h) for name, h in self.init_server(_ALL).items()}, {}, state


@dataclass(frozen=True)
class Swollen(Scaffold):
    def finish(self, moved, steps, lr, mine, shared):
        return {**mine, "extra": torch.zeros(1)}, {}


_ALL = {"fc.weight/a": torch.zeros(2, 3), "fc.weight/b": torch.zeros(3, 2), "head.bias": torch.zeros(4)}


@pytest.mark.parametrize(
    ("correction", "says"),
    [
        (Weighing(), "the report: expected the blocks"),
        (Greedy(), "the corrected update: expected the blocks"),
        (Swollen(), "the client state after finish"),
    ],
)
def test_bad_corrections_are_named(correction, says):
    with pytest.raises(AssertionError, match=says):
        check_correction(correction)


@dataclass(frozen=True)
class Dicing(Clip):
    def release(self, mean, clients, key):
        return tmap(lambda x: x + torch.randn_like(x), mean)


@dataclass(frozen=True)
class Dividing(Clip):
    def bound(self, code, key):
        size = torch.stack([block.square().sum() for block in code.values()]).sum().sqrt() if code else 1.0
        return scale(code, 1 / size)


def test_bad_privacy_is_named():
    with pytest.raises(AssertionError, match=r"another answer|torch's generator"):
        check_privacy(Dicing())
    with pytest.raises(AssertionError, match="not finite"):
        check_privacy(Dividing())
