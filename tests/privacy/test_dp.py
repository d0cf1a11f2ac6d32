"""Tests of differential privacy with a trusted server."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task, perceptron
from thinwire.core.key import Key
from thinwire.core.tree import flatten, same, scale, weighted_mean
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.simulation import make_simulation
from thinwire.privacy.discrete import discrete_gaussian
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve, update
from thinwire.runs.execute import execute
from thinwire.runs.presets import preset

PLAIN = tw.Method(client_weight=tw.aggregators.Uniform(), server_opt=tw.optimizers.Adam(0.01, eps=1e-30))


def uniform_mean(codes):
    return weighted_mean(codes, [1.0] * len(codes))


def after(method, rounds=3):
    federation = Federation(method)
    for _ in range(rounds):
        federation.round((0, 1, 2))
    return federation


@pytest.mark.parametrize("up", [tw.codecs.Raw(), tw.codecs.TopK(0.25)])
def test_without_noise_and_with_a_large_clip_it_equals_fedadam(up):
    plain = after(replace(PLAIN, up=up))
    private = after(replace(PLAIN, up=up, privacy=tw.privacy.DP(clip=1024.0, sigma=0.0)))  # a power of two: no rounding
    # 1 / clip^2 of a tiny square can underflow to zero, and Adam then divides by eps only
    near = torch.isclose(flatten(plain.server.public.coords), flatten(private.server.public.coords), atol=1e-6)
    assert float(near.float().mean()) > 0.999


def test_updates_are_clipped():
    part = tw.privacy.DP(clip=0.5, sigma=0.0)
    long = {"a": Key(1).normal(40, 3), "b": Key(2).normal(7)}
    assert flatten(part.accept(long)).norm().item() == pytest.approx(0.5, rel=1e-5)
    short = {name: block * 1e-3 for name, block in long.items()}
    assert same(part.accept(short), short)
    # the mean of a real round, in units of the clip, has a norm of at most 1
    federation = Federation(
        tw.Method(client_weight=tw.aggregators.Uniform(), privacy=tw.privacy.DP(clip=1e-3, sigma=0.0))
    )
    before = flatten(federation.server.public.coords)
    federation.round((0, 1))
    assert 0.1 < (flatten(federation.server.public.coords) - before).norm().item() <= 1 + 1e-4


@pytest.mark.parametrize(("cohort", "spread"), [(0, 3.0 / 10), (1000, 3.0 / 1000)])
def test_noise_is_that_of_the_simulated_cohort(cohort, spread):
    part, zeros = tw.privacy.DP(clip=2.0, sigma=3.0, cohort=cohort), [{"w": torch.zeros(200, 100)}] * 10
    out = part.aggregate(zeros, uniform_mean, 10, Key(5))["w"]
    assert out.std().item() == pytest.approx(spread, rel=0.03)
    assert abs(out.mean().item()) < 5 * spread / math.sqrt(out.numel())
    assert not torch.equal(out, part.aggregate(zeros, uniform_mean, 10, Key(6))["w"])
    assert torch.equal(out, part.aggregate(zeros, uniform_mean, 10, Key(5))["w"])


def test_the_released_value_is_the_clipped_mean_plus_lattice_noise():
    part = tw.privacy.DP(clip=0.5, sigma=0.3)
    codes = [{"a": Key(i).normal(40, 3), "b": Key(i).normal(7) * 1e-4} for i in range(5)]
    exact = scale(uniform_mean([part.accept(code) for code in codes]), 1 / part.clip)
    lattice = part.lattice(5)
    noise = discrete_gaussian(127, lattice.variance, Key(8)) / (5 * lattice.most)
    out = part.aggregate(codes, uniform_mean, 5, Key(8))
    assert [block.dtype for block in out.values()] == [torch.float32] * 2
    assert torch.allclose(flatten(out), flatten(exact) + torch.from_numpy(noise).float(), atol=1e-6)


@pytest.mark.parametrize("sigma", [1e-9, 0.01, 0.34, 1.0, 100.0, 1e5])
@pytest.mark.parametrize("clients", [1, 3, 10_000])
def test_the_noise_variance_is_never_below_the_setting(sigma, clients):
    """In steps of the lattice, exactly: variances are integers, rounded up."""
    for cohort in (0, 5000):
        part = tw.privacy.DP(sigma=sigma, cohort=cohort)
        lattice = part.lattice(clients)
        wanted = (Fraction(sigma) * clients / (cohort or clients) * lattice.most) ** 2
        assert wanted <= lattice.variance < wanted + 1
        assert clients * lattice.most + 12 * math.isqrt(lattice.variance) < 1 << 62  # no sum overflows 64 bits


def test_a_client_with_huge_values_is_clipped():
    part, zeros = tw.privacy.DP(clip=1.0, sigma=1e-3), {"w": torch.zeros(100)}
    for huge in (1e10, 3e38):
        out = part.aggregate([zeros, {"w": torch.full((100,), huge)}], uniform_mean, 2, Key(0))["w"]
        assert out.norm().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client_weight": tw.aggregators.BySamples()}, "Write client_weight = 'uniform'"),
        ({"upload": "weights"}, "Write upload = 'delta'"),
        ({"correction": tw.optimizers.Scaffold()}, "Use a correction that reports nothing"),
        ({"schedule": tw.schedules.FedLAMA(phi=2)}, "Use a schedule that reports nothing"),
    ],
)
def test_uploads_besides_the_update_are_refused(changes, words):
    with pytest.raises(IncompatibleParts, match=words):
        Federation(replace(PLAIN, privacy=tw.privacy.DP(), **changes))
    with pytest.raises(IncompatibleParts, match="without them"):
        Federation(replace(PLAIN, privacy=tw.privacy.DP()), digits_task(perceptron(norm=True)))


def test_dp_combines_with_other_methods():
    flasc = update(tw.Method(), preset("methods", "flasc").table["method"])
    private = resolve("flasc+dp-fedadam", "digits", recipe="paper").method
    assert private == replace(flasc, privacy=tw.privacy.DP(clip=0.1, sigma=0.34), server_opt=tw.optimizers.Adam(0.01))
    federation = Federation(private)
    federation.round((0, 1, 2))
    assert math.isfinite(federation.losses[-1])


def test_epsilon_equals_that_of_the_accountant():
    part = tw.privacy.DP(sigma=1.1)
    known = part.epsilon(100, 10_000, 1000, 1e-5)
    assert known == pytest.approx(15.5658, abs=1e-4)
    assert tw.privacy.DP(sigma=1.1, cohort=100).epsilon(10, 10_000, 1000, 1e-5) == known
    assert part.epsilon(100, 10_000, 2000, 1e-5) > known
    assert tw.privacy.DP(sigma=0.0).epsilon(100, 10_000, 1, 1e-5) == math.inf
    assert tw.privacy.DP(sigma=1.1, population=10_000).epsilon(100, 100, 1000) == known
    assert part.epsilon(100, 10_000, 1000, 1e-3) < known
    with pytest.raises(ConfigError, match=r"write for example privacy\.population = 1000"):
        tw.privacy.DP().epsilon(100, 99, 1, 1e-5)


def test_epsilon_counts_participating_clients_only():
    """About one client in four is in a participating tier: two of these give a larger epsilon than two of all."""
    experiment = resolve("highest-tier+dp-fedadam", "digits", {"cohort.size": 2, "method.privacy.sigma": 1.1})
    simulation = make_simulation(experiment.engine, build_job(experiment))
    eligible = len(simulation.eligible)
    assert 2 < eligible < 10
    part = experiment.method.privacy
    epsilon, reason = simulation.epsilon(200)
    assert not reason
    assert epsilon == part.epsilon(2, eligible, 200) > 1.5 * part.epsilon(2, 20, 200)


@pytest.mark.parametrize("name", ["ffa-lora", "full", "flasc", "lora"])
def test_epsilon_is_reported_each_round_and_in_the_summary(name, tmp_path):
    small = {"rounds": 2, "cohort.size": 2, "local.epochs": 1, "method.privacy.sigma": 2.0}
    experiment = resolve(f"{name}+dp-fedadam", "digits", small)
    records = []
    summary = execute(experiment, tmp_path / "run", on_round=records.append)
    expected = [experiment.method.privacy.epsilon(2, 20, rounds) for rounds in (1, 2)]
    assert [record.epsilon for record in records] == expected
    assert (summary["epsilon"], summary["delta"]) == (expected[-1], 1e-5)
    assert "epsilon_unknown" not in summary
    assert "replace-one" in summary["neighbors"]
    assert expected[0] < expected[1]


def test_the_summary_gives_the_reason_if_epsilon_is_unknown(tmp_path):
    small = {"rounds": 1, "cohort.size": 2, "local.epochs": 1}
    simulated = resolve("full+dp-fedadam", "digits", {**small, "method.privacy.cohort": 1000})
    summary = execute(simulated, tmp_path / "simulated")
    assert summary["epsilon"] is None
    assert "privacy.population = 10000" in summary["epsilon_unknown"]
    noiseless = resolve("full+dp-fedadam", "digits", {**small, "method.privacy.sigma": 0.0})
    assert "adds no noise" in execute(noiseless, tmp_path / "noiseless")["epsilon_unknown"]
    assert "epsilon" not in execute(resolve("fedavg", "digits", small), tmp_path / "none")


def test_invalid_settings_are_refused():
    for changes, words in (
        ({"clip": 0.0}, "clip"),
        ({"sigma": -1.0}, "sigma"),
        ({"cohort": -1}, "cohort"),
        ({"delta": 0.0}, "delta"),
    ):
        with pytest.raises(ConfigError, match=words):
            tw.privacy.DP(**changes)
    with pytest.raises(ConfigError, match="above the limit"):
        tw.privacy.DP(sigma=1e9).lattice(1)
