"""Conformance checks of spaces, sketches, schedules and privacy: correct parts pass, faulty ones fail."""

from dataclasses import dataclass, field

import pytest
import torch

from tests.parts import Clip, Drift, Product, Project, Turns
from thinwire.core.tree import scale, tmap
from thinwire.schedules import AllBlocks, Plan
from thinwire.sketches import Identity
from thinwire.spaces import Full
from thinwire.testing import (
    check_privacy,
    check_schedule,
    check_sketch,
    check_space,
)


def test_correct_spaces_pass():
    check_space(Full())
    check_space(Drift(k=4))
    check_space(Drift(k=4, redraw_every=0))
    check_space(Product(), starts_at_base=False)
    check_space(Drift(), {"w": torch.ones(3, 2), "b": torch.zeros(3)})


# -- faulty parts: each violates one requirement -----------------------------------------------------------------------


@dataclass
class NotFrozen:
    redraw_every: int = 0


@dataclass(frozen=True, eq=False)
class Unequal:
    redraw_every: int = 0


@dataclass(frozen=True)
class HiddenField(Full):
    k: int = field(default=1, repr=False)


@dataclass(frozen=True)
class GlobalGenerator(Drift):
    def basis(self, spec, key, device):
        return {b.name: torch.randn(b.numel, self.k) for b in spec}


@dataclass(frozen=True)
class OddNames(Drift):
    def init(self, base, basis, key):
        return {f"b/{name}": block.new_zeros(self.k) for name, block in base.items()}

    def expand(self, base, basis, coords):
        return {name: w + (basis[name] @ coords[f"b/{name}"]).reshape(w.shape) for name, w in base.items()}


@dataclass(frozen=True)
class InitFromBasis(Drift):
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


class _WrongBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


@dataclass(frozen=True)
class WrongGradient(Full):
    def expand(self, base, basis, coords):
        return tmap(_WrongBackward.apply, coords)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (NotFrozen(), "must be frozen"),
        (Unequal(), "equal by value"),
        (HiddenField(k=2), "repr of a part"),
        (GlobalGenerator(), "basis returns another result|not from torch's global generator"),
        (OddNames(), "named after a weight"),
        (InitFromBasis(), "must not depend on the values in it"),
        (Product(redraw_every=1), "differs from the base"),
        (InPlace(), "must not change its arguments|another result"),
        (Reordered(), "in this order"),
    ],
)
def test_faulty_spaces_fail(space, message):
    with pytest.raises(AssertionError, match=message):
        check_space(space)


def test_a_wrong_gradient_is_found_by_finite_differences():
    with pytest.raises(AssertionError, match="finite differences"):
        check_space(WrongGradient(), starts_at_base=False)


def test_a_part_that_is_not_a_dataclass_fails():
    class Plain:
        redraw_every = 0

    with pytest.raises(AssertionError, match="must be a dataclass"):
        check_space(Plain())


def test_a_part_defined_inside_a_function_fails():
    @dataclass(frozen=True)
    class Local(Full):
        pass

    with pytest.raises(AssertionError, match="at the top of a module"):
        check_space(Local())


@dataclass(frozen=True)
class Nonlinear(Identity):
    def encode(self, delta, key):
        return tmap(torch.sign, delta)

    def decode(self, code, coords, key):
        return tmap(lambda x: x**3, code)


@dataclass(frozen=True)
class LinearDecode(Identity):
    def encode(self, delta, key):
        return tmap(torch.sign, delta)


@dataclass(frozen=True)
class WrongSpec(Project):
    def spec(self, coords):
        return coords


def test_faulty_sketches_fail_and_one_linear_map_is_sufficient():
    check_sketch(LinearDecode())
    with pytest.raises(AssertionError, match="mean of codes"):
        check_sketch(Nonlinear())
    with pytest.raises(AssertionError, match="encode: expected the blocks"):
        check_sketch(WrongSpec())


@dataclass(frozen=True)
class PlansPrivate(AllBlocks):
    def plan(self, state, coords, version):
        return Plan(frozenset(coords.names) if version == 13 else frozenset())


@dataclass(frozen=True)
class PlansUnknown(AllBlocks):
    def plan(self, state, coords, version):
        return Plan(frozenset({"unknown"}))


@dataclass(frozen=True)
class ChangesState(Turns):
    def observe(self, state, plan, mean, report):
        state["rounds"] += 1
        return state


@dataclass(frozen=True)
class ReportByValue(Turns):
    def report(self, delta, plan):
        return {name: block.sum() for name, block in delta.items() if block.is_meta or block.sum() > 0}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (PlansPrivate(private=("fc.*",)), "private blocks are planned"),
        (PlansUnknown(), "do not exist"),
        (ChangesState(), "another result|must not change"),
        (ReportByValue(), "report: expected the blocks"),
    ],
)
def test_faulty_schedules_fail(schedule, message):
    with pytest.raises(AssertionError, match=message):
        check_schedule(schedule)


@dataclass(frozen=True)
class GlobalNoise(Clip):
    def release(self, mean, clients, key):
        return tmap(lambda x: x + torch.randn_like(x), mean)


@dataclass(frozen=True)
class DividesByZero(Clip):
    def bound(self, code, key):
        size = torch.stack([block.square().sum() for block in code.values()]).sum().sqrt() if code else 1.0
        return scale(code, 1 / size)


def test_faulty_privacy_mechanisms_fail():
    with pytest.raises(AssertionError, match=r"another result|torch's global generator"):
        check_privacy(GlobalNoise())
    with pytest.raises(AssertionError, match="not finite"):
        check_privacy(DividesByZero())
