"""Conformance checks of optimizers and corrections: faulty parts fail."""

from dataclasses import dataclass

import pytest
import torch

from thinwire.core.tree import tmap
from thinwire.optimizers import SGD, FedDyn, Scaffold
from thinwire.testing import check_correction, check_optimizer


@dataclass(frozen=True)
class DataDependent(SGD):
    def update(self, grads, state, coords):
        grads = {name: g if bool((g > -9).all()) else -g for name, g in grads.items()}
        return super().update(grads, state, coords)


@dataclass(frozen=True)
class WrongKey(SGD):
    def init(self, coords):
        return {"momentum": {f"momentum/{name}": torch.zeros_like(block) for name, block in coords.items()}}


@dataclass(frozen=True)
class ChangesGradients(SGD):
    def update(self, grads, state, coords):
        return tmap(lambda g: g.mul_(-self.lr), grads), state


def test_faulty_optimizers_fail():
    with pytest.raises(AssertionError, match="name of a block"):
        check_optimizer(WrongKey())
    with pytest.raises(AssertionError, match="must not change"):
        check_optimizer(ChangesGradients())
    with pytest.raises(RuntimeError, match="vmap"):
        check_optimizer(DataDependent())


@dataclass(frozen=True)
class ReportsByValue(Scaffold):
    def finish(self, moved, steps, lr, mine, shared):
        new, report = super().finish(moved, steps, lr, mine, shared)
        return new, {name: block for name, block in report.items() if block.is_meta or block.sum() > 0}


@dataclass(frozen=True)
class WrongBlocks(FedDyn):
    def factor(self, report):
        return 1.0

    def server(self, delta, report, fraction, state):
        return {name: delta.get(name, h) for name, h in self.init_server(_ALL).items()}, {}, state


@dataclass(frozen=True)
class ExtraState(Scaffold):
    def finish(self, moved, steps, lr, mine, shared):
        return {**mine, "extra": torch.zeros(1)}, {}


_ALL = {"fc.weight/a": torch.zeros(2, 3), "fc.weight/b": torch.zeros(3, 2), "head.bias": torch.zeros(4)}


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        (ReportsByValue(), "finish: expected the blocks"),
        (WrongBlocks(), "server: expected the blocks"),
        (ExtraState(), "finish: expected the blocks .* got .*extra"),
    ],
)
def test_faulty_corrections_fail(correction, message):
    with pytest.raises(AssertionError, match=message):
        check_correction(correction)
