"""Tests of differential privacy with secure aggregation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task
from tests.parts import Clip
from thinwire.codecs import RandomK
from thinwire.core.key import Key, SecretKey
from thinwire.core.tree import flatten
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.privacy import NoPrivacy
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.secure.masks import SecAggCohort, hide, reveal

METHOD = tw.Method(client_weight=tw.aggregators.Uniform(), server_opt=tw.optimizers.SGD(1.0), secure_aggregation=True)


def secret(i, j):
    return f"{i} {j}".encode()


@pytest.mark.parametrize("sigma", [0.0, 0.05, 1.0, 50.0])
@pytest.mark.parametrize("clients", [2, 17, 5000])
def test_sums_fit_into_32_bits_with_the_requested_noise(sigma, clients):
    part = tw.privacy.DP(sigma=sigma)
    lattice = part.masked_lattice(clients)
    assert clients * lattice.most + 12 * sigma * lattice.most <= 1 << 31
    assert 2 * (clients + 12 * sigma) * lattice.most > 1 << 30  # at most one bit is unused
    assert clients * lattice.variance >= (sigma * lattice.most) ** 2
    assert clients * (lattice.variance - 1) < (sigma * lattice.most) ** 2 or not sigma


def test_the_server_sees_the_sum_plus_noise():
    """With real masks: the sum is exact, so its noise is the sum of the discrete Gaussians of the clients."""
    part, cohort = tw.privacy.DP(clip=0.5, sigma=0.7), (2, 5, 11, 40)
    values = {i: Key(i).normal(3000).numpy() for i in cohort}
    added = {i: part.add_to_sum(values[i], 4, Key(7).fold(i)) for i in cohort}
    hidden = [hide(np.append(added[i], [1, 1]), i, cohort, 3, secret) for i in cohort]
    total, weight = reveal(hidden, 3000)
    assert weight == 4
    assert np.array_equal(total, sum(added.values()))
    lattice, noiseless = part.masked_lattice(4), replace(part, sigma=0.0)
    scaled = {i: values[i].astype(np.float64) / np.linalg.norm(values[i].astype(np.float64)) for i in cohort}
    noise = total - lattice.most * sum(scaled.values())
    assert noise.std() == pytest.approx(math.sqrt(4 * lattice.variance), rel=0.05)
    assert noiseless.masked_lattice(4).variance == 0
    released = part.of_sum(total, 4)
    assert np.allclose(released * 4 * lattice.most, total)


@pytest.mark.parametrize("huge", [1e3, 1e38])
def test_masked_updates_are_clipped(huge):
    part = tw.privacy.DP(clip=0.1, sigma=0.0)
    z = part.add_to_sum(np.full(50, huge, np.float32), 10, Key(0))
    most = part.masked_lattice(10).most
    assert 0.99 * most < math.sqrt(sum(int(value) ** 2 for value in z)) <= most


@pytest.mark.parametrize("up", [tw.codecs.Raw(), RandomK(0.3, shared=True)], ids=repr)
def test_a_masked_round_equals_an_unmasked_one_up_to_noise(up):
    """Without noise both release the same up to a lattice step; with noise, noise of the same variance."""
    ends = {}
    for sigma in (0.0, 0.5):
        for secure in (False, True):
            part = tw.privacy.DP(clip=0.5, sigma=sigma)
            federation = Federation(replace(METHOD, privacy=part, secure_aggregation=secure, up=up))
            federation.round((0, 1, 2))
            ends[sigma, secure] = flatten(federation.server.public.coords) - flatten(federation.first.coords)
    if isinstance(up, tw.codecs.Raw):  # the open round clips decoded updates, the masked one payloads
        assert torch.allclose(ends[0.0, False], ends[0.0, True], atol=1e-6)
    sent = ends[0.0, True] != 0
    noise = {secure: (ends[0.5, secure] - ends[0.0, secure])[sent] for secure in (False, True)}
    assert noise[True].std().item() > 0.9 * 0.5 / 3
    if isinstance(up, tw.codecs.Raw):
        assert noise[True].std().item() == pytest.approx(noise[False].std().item(), rel=0.2)


def test_a_client_can_draw_its_noise_from_a_secret_key():
    """By default from the seed, for reproducible simulations; a deployed client uses a secret key."""
    contract = Federation(replace(METHOD, privacy=tw.privacy.DP(sigma=1.0))).contract
    payload = np.zeros(contract.code.size, "<f4").tobytes()

    def hidden(noise):
        return SecAggCohort((0, 1), secret, noise).mask(contract, payload, 1.0, 0, 0)

    assert hidden(None) == hidden(None) != hidden(SecretKey(5)) != hidden(SecretKey.draw())


@pytest.mark.parametrize(("sigma", "clients"), [(1e-9, 10), (0.1, 3_000_000), (1e12, 3)])
def test_noise_that_does_not_fit_into_32_bits_is_refused_before_training(sigma, clients):
    with pytest.raises(ConfigError, match=r"have 32 bits.*Sample fewer clients.*secure_aggregation = false") as error:
        tw.privacy.DP(sigma=sigma).check_clients(clients)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="have 32 bits"):
        Job(digits_task(), replace(METHOD, privacy=tw.privacy.DP(sigma=1e-9)), cohort=3)


def test_bounding_mechanisms_without_masked_support_are_refused():
    class Bounding(Clip):
        bounds = True

    assert tw.privacy.DP().masked == tw.privacy.DP()
    assert NoPrivacy().masked is None
    with pytest.raises(IncompatibleParts, match="Write secure_aggregation = false"):
        Federation(replace(METHOD, privacy=Bounding()))


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_engine_runs_masked_dp_in_any_chunks(chunk):
    job = Job(digits_task(), replace(METHOD, privacy=tw.privacy.DP(clip=1.0, sigma=0.3)), rounds=2, cohort=4)
    simulation = make_simulation(Engine(chunk=chunk, backend="loop"), job)
    state = simulation.start()
    for _ in range(2):
        state, record = simulation.round(state)
    assert record.epsilon == job.method.privacy.epsilon(4, 6, 2)
    assert math.isfinite(record.loss)


def test_the_ddg_preset_learns(tmp_path):
    small = {"rounds": 6, "eval.every": 6, "local.epochs": 1, "cohort.size": 5, "engine.backend": "vmap"}
    small |= {"method.privacy.sigma": 0.1, "method.server_opt.lr": 0.03}
    masked = execute(resolve("ddg", "digits", small), tmp_path / "masked")
    opened = execute(resolve("dp-fedadam", "digits", small), tmp_path / "open")
    assert masked["epsilon"] == opened["epsilon"]
    assert masked["final_accuracy"] == pytest.approx(opened["final_accuracy"], abs=0.1)
    assert masked["final_accuracy"] > 0.3
