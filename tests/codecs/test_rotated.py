"""EDEN: error, bias, sizes; and PowerSGD: exact at full rank, close to the best approximation."""

import tracemalloc

import pytest
import torch

from thinwire.codecs import Eden, ErrorFeedback, Peer, PowerSGD, TopK
from thinwire.codecs.eden import LONGEST, codebook, hadamard, pieces
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import ConfigError, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve

ERRORS = {1: 0.571, 2: 0.133, 3: 0.0358, 4: 0.0096}  # D / (1 - D) of the best scalar quantizer of N(0, 1)


def sent(codec, x, seed=0):
    tree, peer = {"x": x}, Peer(Key(seed))
    return codec.decode(codec.encode(tree, {}, peer)[0], Spec.of(tree), peer)["x"]


def error(codec, x, seed=0):
    return float((sent(codec, x, seed).double() - x).square().sum() / x.double().square().sum())


@pytest.fixture(scope="module")
def update():
    """The update of one client after one round of FedAvg on the digits: a real, heavy-tailed vector."""
    wide = {"cohort.size": 1, "local.steps": 5, "task.model": {"kind": "two-fc", "inputs": 64, "hidden": 896}}
    simulation = make_simulation(Engine(), build_job(resolve("fedavg", "digits", wide)))
    before = simulation.start()
    after, _ = simulation.round(before)
    new, old = after.server.public.coords, before.server.public.coords
    return torch.cat([(new[name] - old[name]).reshape(-1) for name in old])


@pytest.mark.parametrize("bits", ERRORS)
def test_the_error_is_that_of_the_best_quantizer_on_normal_and_on_real_values(bits, update):
    normal = Key(3).normal(200_000)
    assert error(Eden(bits), normal) == pytest.approx(ERRORS[bits], rel=0.02)
    real = sum(error(Eden(bits), update, seed) for seed in range(5)) / 5
    assert real == pytest.approx(ERRORS[bits], rel=0.02)
    assert error(Eden(bits, unbiased=False), normal) < error(Eden(bits), normal)


@pytest.mark.parametrize("bits", [0.2, 1.5])
def test_it_is_unbiased(bits, update):
    x = update[:512]
    runs = torch.stack([sent(Eden(bits), x, seed) for seed in range(200)])
    standard_error = runs.std(0) / 200**0.5
    off = ((runs.mean(0) - x) / standard_error).abs()
    assert off.max() < 5.5  # 512 values at once: the largest of as many normal ones is below 4.8 with 99.9 %
    assert off.square().mean() < 1.2
    along = runs @ x / x.square().sum()
    assert along.tolist() == pytest.approx([1.0] * 200, abs=1e-5), "the scale makes it exact along x"


def test_the_size_is_constant_and_follows_the_bits():
    spec = Spec.of({"x": torch.zeros(11_274)})
    assert Eden(2).size(spec) == (8192 + 2048 + 1024 + 16) // 4 + 4 * 4
    assert Eden(0.1).size(spec) < Eden(0.5).size(spec) < Eden(1).size(spec) < Eden(1.5).size(spec) < Eden(2).size(spec)
    for n in (0, 1, 2, 63, 64, 65, LONGEST + 1):
        tree = {"x": Key(n).normal(n)}
        data, _ = Eden(1.5).encode(tree, {}, Peer(Key(1)))
        assert len(data) == Eden(1.5).size(Spec.of(tree))
        assert sum(piece.values for piece in pieces(n)) == n


def test_the_rotation_keeps_lengths_and_is_its_own_inverse():
    x = Key(5).normal(256).numpy()
    assert hadamard(hadamard(x.copy())) / 256 == pytest.approx(x, abs=1e-5)
    assert float((hadamard(x.copy()) ** 2).sum()) == pytest.approx(256 * float((x**2).sum()), rel=1e-5)


@pytest.mark.parametrize("bits", [2.5])
def test_a_decoder_of_one_piece_needs_less_than_four_times_the_model(bits):
    """One piece is the worst case: of longer vectors only one piece at a time is rotated."""
    tree, peer = {"x": Key(1).normal(LONGEST)}, Peer(Key(2))
    data, _ = Eden(bits).encode(tree, {}, peer)
    tracemalloc.start()
    Eden(bits).decode(data, Spec.of(tree), peer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4 * LONGEST


def test_levels_are_those_of_lloyd_and_max():
    """Max, 1960, table I: the output levels of 2, 4 and 8 levels."""
    assert codebook(1)[1:].tolist() == pytest.approx([0.7980], abs=2e-4)
    assert codebook(2)[2:].tolist() == pytest.approx([0.4528, 1.510], abs=6e-4)
    assert codebook(3)[4:].tolist() == pytest.approx([0.2451, 0.7560, 1.344, 2.152], abs=6e-4)
    for bits in range(1, 9):
        levels = codebook(bits)
        assert len(levels) == 2**bits
        assert (levels[1:] > levels[:-1]).all()


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e20, 3e38])
def test_values_of_any_size_stay_finite(scale):
    x = Key(2).normal(500).clamp(-1, 1) * scale
    back = sent(Eden(4), x)
    assert back.isfinite().all()
    if 1e-30 < scale < 1e30:
        assert error(Eden(4), x / scale) == pytest.approx(error(Eden(4), x), rel=1e-3)
    assert not sent(Eden(2), torch.zeros(100)).any()


def test_a_scale_that_is_not_finite_is_refused():
    tree, peer = {"x": torch.ones(64)}, Peer(Key(0))
    data, _ = Eden(1).encode(tree, {}, peer)
    for wrong in (float("nan"), float("inf"), -1.0):
        forged = torch.tensor([wrong]).numpy().tobytes() + data[4:]
        with pytest.raises(WireError, match="scale"):
            Eden(1).decode(forged, Spec.of(tree), peer)


def test_bad_settings_get_one_line():
    for make, words in (
        (lambda: Eden(0), r"^bits must be above 0 and at most 8, not 0; write for example bits = 2.0$"),
        (lambda: Eden(9), r"^bits must be above 0 and at most 8, not 9"),
        (lambda: PowerSGD(0), r"^rank must be 1 or more, not 0"),
        (lambda: TopK(0.1, "chunk", chunk=0), r"^chunk must be 1 or more, not 0"),
        (lambda: ErrorFeedback(TopK(0.1), decay=0.0), r"^decay must be above 0 and at most 1, not 0.0"),
        (lambda: ErrorFeedback(Eden(1)), r"^Eden scales values up to be unbiased"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()


# -- PowerSGD ----------------------------------------------------------------------------------------------------------


def test_full_rank_is_exact_and_a_low_one_is_near_the_best():
    m = Key(7).normal(40, 60)
    assert torch.equal(sent(PowerSGD(40), m), m), "factors as long as the matrix: it is sent whole"
    low = Key(8).normal(40, 5) @ Key(9).normal(5, 60)
    torch.testing.assert_close(sent(PowerSGD(5), low), low, rtol=1e-4, atol=1e-4)
    u, s, v = torch.linalg.svd(m)
    best = (m - u[:, :4] * s[:4] @ v[:4]).square().sum()
    ours = (m - sent(PowerSGD(4, iterations=8), m)).square().sum()
    assert best <= ours < 1.02 * best


def test_other_blocks_are_sent_whole_and_convolutions_are_matrices():
    tree = {"conv": Key(1).normal(8, 3, 3, 3), "bias": Key(2).normal(8), "tiny": Key(3).normal(2, 2)}
    codec, peer = PowerSGD(1), Peer(Key(0))
    data, _ = codec.encode(tree, {}, peer)
    assert len(data) == codec.size(Spec.of(tree)) == 4 * (8 + 27 + 8 + 4)
    back = codec.decode(data, Spec.of(tree), peer)
    assert torch.equal(back["bias"], tree["bias"])
    assert torch.equal(back["tiny"], tree["tiny"])
    assert back["conv"].shape == tree["conv"].shape


# -- error feedback with decay, top-k in chunks ------------------------------------------------------------------------


def test_decay_forgets_old_errors():
    tree, peer = {"x": torch.tensor([4.0, 1.0])}, Peer(Key(0))
    for decay, second in ((1.0, 2.0), (0.5, 1.5)):
        codec = ErrorFeedback(TopK(0.5), decay)
        _, state = codec.encode(tree, codec.init(Spec.of(tree)), peer)
        quiet = {"x": torch.tensor([0.0, 1.0])}
        data, _ = codec.encode(quiet, state, peer)
        assert codec.decode(data, Spec.of(quiet), peer)["x"].tolist() == [0.0, second]


def test_chunks_keep_the_largest_of_each():
    x = torch.tensor([9.0, 8.0, 7.0, 6.0, 0.1, 0.2, 0.3, 0.4, 5.0])
    back = sent(TopK(0.5, "chunk", chunk=4), x)
    assert back.nonzero().flatten().tolist() == [0, 1, 6, 7, 8]


@pytest.mark.parametrize("name", ["eden", "drive", "stc", "powersgd"])
def test_presets_learn(name):
    quick = {"local.steps": 4, "cohort.size": 4, "method.client_opt.lr": 0.2}
    simulation = make_simulation(Engine(backend="loop"), build_job(resolve(name, "digits", quick, "paper")))
    state, first = simulation.round(simulation.start())
    for _ in range(5):
        state, last = simulation.round(state)
    assert last.loss < first.loss
