"""Clipped changes and noise."""

import math
from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task, perceptron
from thinwire.core.rng import Key
from thinwire.core.tree import flatten, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.run.config import method_from, resolve
from thinwire.run.presets import preset
from thinwire.testing import check_privacy

PLAIN = tw.Method(weigh=tw.Uniform(), server_opt=tw.Adam(0.01, eps=1e-30))


@pytest.mark.parametrize("part", [tw.DP(), tw.DP(clip=1e-3, sigma=0.0), tw.DP(sigma=2.0, cohort=1000)], ids=repr)
def test_keeps_the_contract_of_a_privacy_mechanism(part):
    check_privacy(part)


def after(method, rounds=3):
    federation = Federation(method)
    for _ in range(rounds):
        federation.round((0, 1, 2))
    return federation


@pytest.mark.parametrize("up", [tw.Raw(), tw.TopK(0.25)])
def test_without_noise_and_with_a_large_clip_it_is_fedadam(up):
    plain = after(replace(PLAIN, up=up))
    private = after(replace(PLAIN, up=up, privacy=tw.DP(clip=1024.0, sigma=0.0)))  # a power of two: no rounding
    # 1 / clip^2 of a tiny square may fall below the smallest number, where Adam has nothing to divide by
    near = torch.isclose(flatten(plain.server.public.coords), flatten(private.server.public.coords), atol=1e-6)
    assert float(near.float().mean()) > 0.999


def test_no_client_counts_with_more_than_the_clip():
    part = tw.DP(clip=0.5, sigma=0.0)
    long = {"a": Key(1).normal(40, 3), "b": Key(2).normal(7)}
    assert flatten(part.accept(long)).norm().item() == pytest.approx(0.5, rel=1e-5)
    short = {name: block * 1e-3 for name, block in long.items()}
    assert same(part.accept(short), short)
    # the mean of a real round, in units of the clip, is no longer than 1
    federation = Federation(tw.Method(weigh=tw.Uniform(), privacy=tw.DP(clip=1e-3, sigma=0.0)))
    before = flatten(federation.server.public.coords)
    federation.round((0, 1))
    assert 0.1 < (flatten(federation.server.public.coords) - before).norm().item() <= 1 + 1e-4


@pytest.mark.parametrize(("cohort", "spread"), [(0, 3.0 / 10), (1000, 3.0 / 1000)])
def test_noise_is_that_of_the_cohort_that_is_played(cohort, spread):
    out = tw.DP(clip=2.0, sigma=3.0, cohort=cohort).release({"w": torch.zeros(200, 100)}, 10, Key(5))["w"]
    assert out.std().item() == pytest.approx(spread, rel=0.03)
    assert abs(out.mean().item()) < 5 * spread / math.sqrt(out.numel())
    again = tw.DP(clip=2.0, sigma=3.0, cohort=cohort).release({"w": torch.zeros(200, 100)}, 10, Key(6))["w"]
    assert not torch.equal(out, again)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weigh": tw.BySamples()}, "Write weigh = 'uniform'"),
        ({"say": "value"}, "Write say = 'delta'"),
        ({"secure": True}, "Write secure = false"),
        ({"correction": tw.Scaffold()}, "Take a correction that reports nothing"),
        ({"schedule": tw.FedLAMA(phi=2)}, "Take a schedule that reports nothing"),
    ],
)
def test_nothing_reaches_the_server_beside_it(changes, words):
    with pytest.raises(IncompatibleParts, match=words):
        Federation(replace(PLAIN, privacy=tw.DP(), **changes))
    with pytest.raises(IncompatibleParts, match="without them"):
        Federation(replace(PLAIN, privacy=tw.DP()), digits_task(perceptron(norm=True)))


def test_it_joins_other_methods():
    flasc = method_from(preset("methods", "flasc").table["method"])
    private = resolve("flasc+dp-fedadam", "digits").method
    assert private == replace(flasc, privacy=tw.DP(clip=0.1, sigma=0.34))
    federation = Federation(private)
    federation.round((0, 1, 2))
    assert math.isfinite(federation.losses[-1])


def test_epsilon_is_the_accountants():
    pytest.importorskip("dp_accounting")
    part = tw.DP(sigma=1.1)
    assert part.epsilon(100, 10_000, 1000, 1e-5) == pytest.approx(1.7118, abs=1e-3)
    assert tw.DP(sigma=1.1, cohort=100).epsilon(10, 10_000, 1000, 1e-5) == part.epsilon(100, 10_000, 1000, 1e-5)
    assert part.epsilon(100, 10_000, 2000, 1e-5) > part.epsilon(100, 10_000, 1000, 1e-5)
    assert tw.DP(sigma=0.0).epsilon(100, 10_000, 1, 1e-5) == math.inf
    with pytest.raises(ConfigError, match="cannot be"):
        part.epsilon(100, 99, 1, 1e-5)


def test_a_missing_accountant_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[dp\]'"):
        tw.DP().epsilon(10, 100, 1, 1e-5)


def test_settings_that_make_no_sense_are_refused():
    for changes, words in (({"clip": 0.0}, "clip"), ({"sigma": -1.0}, "sigma"), ({"cohort": -1}, "cohort")):
        with pytest.raises(ConfigError, match=words):
            tw.DP(**changes)
