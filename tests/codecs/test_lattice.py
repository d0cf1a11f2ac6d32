"""Tests of rounding to a lattice and of exact sums on it."""

import numpy as np
import pytest
import torch

from thinwire.codecs import Lattice, LatticeSum, Peer, TopK
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import ConfigError, WireError

PEER = Peer(Key(1))


def sent(codec, tree, peer=PEER):
    data, _ = codec.encode(tree, {}, peer)
    return data, codec.decode(data, Spec.of(tree), peer)


@pytest.mark.parametrize(("step", "size"), [(0.05, 1e-20), (0.5, 1.0), (1.0, 1e20), (3.0, 1.0)])
def test_values_are_multiples_of_a_power_of_two_near_the_step(step, size):
    x = Key(3).normal(2000) * size
    _, back = sent(Lattice(step), {"x": x})
    rms = float(x.double().square().mean().sqrt())
    unit = back["x"].double().abs()
    unit = float(unit[unit > 0].min())
    assert np.frexp(unit)[0] == 0.5  # a power of two
    assert step * rms / 1.42 <= unit <= step * rms * 1.42
    assert float((back["x"].double() - x.double()).abs().max()) <= unit / 2 * (1 + 1e-6)


def test_every_block_has_its_own_step():
    tree = {"large": Key(1).normal(50) * 1e6, "small": Key(2).normal(50) * 1e-6}
    _, back = sent(Lattice(0.1), tree)
    for name, block in tree.items():
        assert float((back[name] - block).norm() / block.norm()) < 0.1


def test_stochastic_rounding_is_unbiased():
    x = Key(5).normal(300)
    mean = torch.stack([sent(Lattice(2.0, stochastic=True), {"x": x}, Peer(Key(i)))[1]["x"] for i in range(600)]).mean(
        0
    )
    assert float((mean - x).abs().mean()) < 0.08


def test_dither_is_unbiased_with_half_the_variance_and_as_many_bytes():
    x, variance, size = Key(5).normal(300), {}, {}
    for name in ("stochastic", "dither"):
        found = [sent(Lattice(2.0, **{name: True}), {"x": x}, Peer(Key(i))) for i in range(600)]
        values = torch.stack([back["x"] for _, back in found])
        assert float((values.mean(0) - x).abs().mean()) < 0.08
        variance[name], size[name] = float(values.var(0).mean()), sum(len(data) for data, _ in found)
    assert 0.4 < variance["dither"] / variance["stochastic"] < 0.6
    assert 0.97 < size["dither"] / size["stochastic"] < 1.03


def test_dither_keeps_zero_blocks_and_refuses_a_second_way_to_round():
    _, back = sent(Lattice(3.0, dither=True), {"x": torch.zeros(20), "y": Key(1).normal(20)})
    assert float(back["x"].abs().max()) < 1e-37
    with pytest.raises(ConfigError, match="leave one of them out"):
        Lattice(stochastic=True, dither=True)


def test_one_step_takes_about_two_bits_a_value():
    data, _ = sent(Lattice(1.0, stochastic=True), {"x": Key(1).normal(4000)})
    assert 8 * len(data) / 4000 < 2.6


def test_sums_of_many_messages_are_exact_and_short():
    total, each = torch.zeros(500), []
    for i in range(20):
        data, back = sent(Lattice(1.0), {"x": Key(i).normal(500)})
        total, each = total + back["x"], [*each, len(data)]
    data, back = sent(LatticeSum(), {"x": total})
    assert torch.equal(back["x"], total)
    assert len(data) < 0.2 * sum(each)
    in_double = sum(sent(Lattice(1.0), {"x": Key(i).normal(500)})[1]["x"].double() for i in range(20))
    assert torch.equal(total.double(), in_double)


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([0.1, 0.2, 0.3]),
        torch.tensor([1e30, 1e-30]),
        torch.tensor([float("inf"), 1.0]),
        torch.tensor([-0.0, 1.0]),
        torch.tensor([2.0**-149, 1.0]),
        torch.zeros(7),
        torch.zeros(0),
        torch.tensor([2.0**23 + 1, -1.0]),
        torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([1, 2, 3]),
    ],
    ids=str,
)
def test_sums_keep_the_bits_of_any_values(x):
    _, back = sent(LatticeSum(), {"x": x})
    assert back["x"].dtype == x.dtype
    assert torch.equal(back["x"].view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("data", [b"", b"\2", b"\3", b"\1", b"\1\x7f\0", b"\0abc", b"\2\0\3\0", b"\2\0\1\2\0"])
def test_damaged_sums_are_refused(data):
    with pytest.raises(WireError):
        LatticeSum().decode(data, Spec.of({"x": torch.zeros(2)}), PEER)


@pytest.mark.parametrize("step", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_must_be_a_number_above_zero(step):
    with pytest.raises(ConfigError, match="step must be above 0"):
        Lattice(step)


def test_sums_of_few_large_values_are_short():
    """Positions and values of what is not 0: within a tenth of the entropy of single values."""
    total = torch.zeros(20_000)
    for i in range(10):
        tree = {"x": Key(i).normal(20_000) * torch.exp(Key(99).normal(20_000))}
        total += sent(TopK(0.02, inner=Lattice(1.0)), tree)[1]["x"]
    data, back = sent(LatticeSum(), {"x": total})
    assert torch.equal(back["x"], total)
    counts = np.unique(total.numpy(), return_counts=True)[1]
    assert data[0] == 2
    assert len(data) < 1.1 * float(counts @ np.log2(len(total) / counts)) / 8
