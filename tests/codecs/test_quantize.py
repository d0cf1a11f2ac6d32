"""Tests of quantization."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from thinwire.codecs import Peer, Quantize
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import ConfigError, WireError

PEER = Peer(Key(1))
SCHEMES = ("block", "uniform", "qsgd", "fp16", "bf16", "sign", "sign-magnitude")


def sent(codec, x, peer=PEER):
    tree = {"x": x}
    data, _ = codec.encode(tree, {}, peer)
    return data, codec.decode(data, Spec.of(tree), peer)["x"]


@pytest.mark.parametrize("bits", [2, 8, 16])
def test_block_error_is_at_most_half_a_step(bits):
    x = Key(3).normal(1000) * torch.logspace(-12, 8, 1000)
    _, back = sent(Quantize(bits, block=50), x)
    step = x.view(-1, 50).abs().amax(1) / ((1 << bits - 1) - 1) * (1 + 2**-7)  # scales are rounded up
    assert ((back - x).view(-1, 50).abs() <= step[:, None] * 0.5001 + 1e-40).all()


@pytest.mark.parametrize("bits", [1, 5, 16])
def test_uniform_error_is_at_most_half_a_step(bits):
    x = 3 + Key(4).normal(999)
    data, back = sent(Quantize(bits, "uniform"), x)
    step = float(x.max() - x.min()) / ((1 << bits) - 1)
    assert float((back - x).abs().max()) <= step / 2 + 1e-6
    assert back.min() == x.min()
    assert back.max() == pytest.approx(float(x.max()), rel=1e-6)
    assert len(data) <= math.ceil(999 * bits / 8) + 8


def test_uniform_is_exact_for_equal_values():
    x = torch.full((500,), -1.2345)
    data, back = sent(Quantize(8, "uniform"), x)
    assert torch.equal(back, x)
    assert len(data) < 90


@pytest.mark.parametrize("codec", [Quantize(3, "qsgd"), Quantize(4, "qsgd", per="tree"), Quantize(2, stochastic=True)])
def test_stochastic_rounding_is_unbiased(codec):
    x = torch.cat((Key(6).normal(40), torch.zeros(4), torch.tensor([0.05])))
    many = 1500
    total = torch.zeros(len(x), dtype=torch.float64)
    square = torch.zeros(len(x), dtype=torch.float64)
    for i in range(many):
        back = sent(codec, x, Peer(Key(i)))[1].double()
        total, square = total + back, square + back.square()
    mean = total / many
    error = ((square / many - mean.square()).clamp(min=0) / many).sqrt()
    assert ((mean - x).abs() <= 4.5 * error + 1e-6).all()


def test_stochastic_rounding_depends_on_the_peer_key_only():
    codec, x = Quantize(4, "qsgd"), Key(7).normal(300)
    assert sent(codec, x)[0] == sent(codec, x)[0] != sent(codec, x, Peer(Key(2)))[0]


def test_qsgd_with_one_scale_uses_few_of_eight_bits():
    x = Key(10).normal(200_000)
    data, back = sent(Quantize(8, "qsgd", per="tree"), x)
    levels = (back / back[back != 0].abs().min()).round()
    p = levels.unique(return_counts=True)[1].double() / len(x)
    assert len(data) < 1.05 * -float((p * p.log2()).sum()) * len(x) / 8
    assert len(data) < 0.2 * len(x)


def test_sign_sends_signs_and_the_mean_magnitude():
    data, back = sent(Quantize(scheme="sign"), torch.tensor([1.0, -2.0, -0.5, 0.5]))
    assert back.tolist() == [1.0, -1.0, -1.0, 1.0]
    assert len(data) == 2 + 1 + 1  # scale, no zeros, signs
    x = torch.tensor([1.0, -3.0, 0.5, 0.5])
    data, back = sent(Quantize(scheme="sign", block=2), x)
    assert back.tolist() == [2.0, -2.0, 0.5, 0.5]
    assert len(data) == 2 * 2 + 1 + 1
    data, _ = sent(Quantize(scheme="sign", block=2, per="tree"), x)
    assert len(data) == 2 + 1 + 1


def test_sign_magnitude_has_scales_for_more_groups_than_a_byte_counts():
    x = Key(5).normal(600)
    _, back = sent(Quantize(scheme="sign-magnitude", block=2), x)
    assert torch.equal(torch.sign(back), torch.sign(x))
    assert (back - x).abs().max() < 0.01 * x.abs().max(), "two values have two magnitudes"


@pytest.mark.parametrize("zeros", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("per", ["block", "tree"])
def test_sign_keeps_zeros(zeros, per):
    x = Key(5).normal(5000) * (Key(6).uniform(5000) >= zeros)
    data, back = sent(Quantize(scheme="sign", per=per), x)
    assert torch.equal(torch.sign(back), torch.sign(x))
    scales = 2 * (1 if per == "tree" else 20)
    bound = 5000 * (1 if zeros in (0.0, 1.0) else 2) / 8  # positions of zeros: at most one bit per value
    assert len(data) <= bound + scales + 8


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60))
def test_sign_error_is_never_larger_than_the_input(values):
    """|x - C(x)|^2 = |x|^2 - (1 - e^2) |x|_1^2 / nonzeros, e < 2^-7 for a scale that is rounded up to bfloat16."""
    x = torch.tensor(values, dtype=torch.float64)
    _, back = sent(Quantize(scheme="sign", per="tree"), x)
    lost, total = float((x - back).square().sum()), float(x.square().sum())
    kept = float(x.abs().sum()) ** 2 / max(1, int(x.count_nonzero()))
    tiny = 1e-9 * total + 1e-60
    assert total - kept - tiny <= lost <= total - (1 - 2**-14) * kept + tiny


@pytest.mark.parametrize(("scheme", "half"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_is_a_cast_that_stays_finite(scheme, half):
    x = torch.cat((Key(8).normal(5000), torch.tensor([0.0, -0.0, 1e-8, 3e4])))
    data, back = sent(Quantize(scheme=scheme), x)
    assert torch.equal(back, x.to(half).float())
    assert len(data) < 0.9 * 2 * len(x)
    _, large = sent(Quantize(scheme=scheme), torch.tensor([3.4e38, -3.4e38]))
    assert large.tolist() == [torch.finfo(half).max, torch.finfo(half).min]


@pytest.mark.parametrize(("scheme", "half"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_size_is_close_to_its_entropy(scheme, half):
    layers = torch.tensor([1e-2, 1e-3, 1e-4, 1e-6]).repeat_interleave(100_000)  # layers change at different rates
    x = Key(11).normal(400_000) * layers
    data, _ = sent(Quantize(scheme=scheme), x)
    p = x.to(half).view(torch.int16).unique(return_counts=True)[1].double() / len(x)
    assert len(data) < 1.03 * -float((p * p.log2()).sum()) * len(x) / 8


@pytest.mark.parametrize("scheme", SCHEMES)
def test_very_large_and_very_small_values_stay_finite(scheme):
    for x in (torch.tensor([3.4e38, -3.4e38, 1.0]), torch.tensor([1e-45, -1e-45]), torch.tensor([1e-39])):
        assert torch.isfinite(sent(Quantize(scheme=scheme), x)[1]).all()
    wide = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert torch.isfinite(sent(Quantize(scheme=scheme), wide)[1]).all()


@pytest.mark.parametrize("bits", [3, 10])
@pytest.mark.parametrize("n", [50_000, 400_000])
def test_size_is_close_to_the_entropy_of_the_levels(bits, n):
    x = Key(10).normal(n) * 1e-3
    data, back = sent(Quantize(bits), x)
    blocks = -(-n // 256)
    wide = torch.nn.functional.pad(back, (0, 256 * blocks - n)).view(blocks, 256)
    scale = torch.from_numpy(np.frombuffer(data[: 2 * blocks], "<u2").astype(np.int32) << 16).view(torch.float32)
    levels = (wide / scale[:, None]).round().flatten()[:n]
    p = levels.unique(return_counts=True)[1].double() / n
    entropy = -float((p * p.log2()).sum()) * n / 8
    assert len(data) <= 1.03 * (entropy + 2 * blocks)


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (Quantize(8), "823c fd7f4001"),  # the scale 2 / 127 is 0x3c8102.. as float32, so 0x3c82 when rounded up
        (Quantize(4), "933e 7e04"),
        (Quantize(2), "0040 16"),
        (Quantize(8, "uniform"), "000000c0 00000040 ff804000"),
        (Quantize(scheme="fp16"), "04 00010001 80007880"),
        (Quantize(scheme="bf16"), "04 00010001 80007f80"),
        (Quantize(scheme="sign"), "d63f 01 02 0102 01"),  # scale 5 / 3, one zero, its position in two bytes, signs
    ],
)
def test_bytes_of_a_small_message_are_fixed(codec, data):
    assert sent(codec, torch.tensor([2.0, 0.0, -1.0, -2.0]))[0] == bytes.fromhex(data)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEMES),
    st.integers(2, 32),
    st.integers(1, 40),
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=60),
)
def test_any_values_decode_to_finite_values_within_a_step(scheme, bits, block, values):
    x = torch.tensor(values, dtype=torch.float32)
    _, back = sent(Quantize(bits, scheme, block=block), x)
    assert back.shape == x.shape
    assert torch.isfinite(back).all()
    if len(x) and scheme in ("block", "uniform"):
        span = float(x.double().abs().max()) * (2 if scheme == "uniform" else 1)
        step = span / ((1 << bits - (scheme == "block")) - 1)
        assert float((back.double() - x.double()).abs().max()) <= 0.51 * step + span * 1e-6 + 1e-40


@pytest.mark.parametrize("codec", [Quantize(4), Quantize(8, "uniform"), Quantize(scheme="bf16")], ids=repr)
def test_damaged_bytes_decode_to_finite_values_or_are_refused(codec):
    tree = {"a": Key(11).normal(700), "b": Key(12).normal(20, 5).half()}
    spec = Spec.of(tree)
    data, _ = codec.encode(tree, {}, PEER)
    rng = np.random.default_rng(0)
    wrong = [data[: rng.integers(len(data))] for _ in range(300)]
    for i in range(1500):
        bad = bytearray(data)
        for _ in range(1 + i % 3):
            bad[rng.integers(len(bad) if i % 2 else 12)] = rng.integers(256)
        wrong.append(bytes(bad))
    refused = 0
    for bad in wrong:
        try:
            back = codec.decode(bad, spec, PEER)
        except WireError:
            refused += 1
            continue
        assert Spec.of(back) == spec
        assert all(torch.isfinite(block).all() for block in back.values())
    assert refused >= 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "1 to 32"),
        ({"bits": 33}, "1 to 32"),
        ({"bits": 1}, "scheme = 'sign'"),
        ({"bits": 1, "scheme": "qsgd"}, "scheme = 'sign'"),
        ({"block": 0}, "1 or more"),
        ({"scheme": "nf4"}, "one of block"),
        ({"per": "row"}, "one of block"),
        ({"scheme": "sign", "stochastic": True}, "stochastic = false"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Quantize(**options)


def test_integer_blocks_are_refused_before_training():
    with pytest.raises(ConfigError, match=r"block 'steps' is of type int64.*ByBlock"):
        Quantize().init(Spec.of({"steps": torch.zeros((), dtype=torch.int64)}))
