"""Tests of what released values reveal about the cohort: their likelihood, and nothing else."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.federation import Federation
from thinwire.core.key import NORMAL_SCALE, Key
from thinwire.core.tree import Tree, flatten, scale, weighted_mean
from thinwire.privacy.accountant import epsilon
from thinwire.privacy.lattice import onto_lattice
from thinwire.protocol.download import read_step
from thinwire.protocol.round import Round
from thinwire.protocol.upload import decode_upload
from thinwire.wire import message as wire

PART = tw.privacy.DP(clip=0.5, sigma=1.0)
TRUE, WRONG = (0, 1, 2), (0, 1, 3)


def seen() -> tuple[torch.Tensor, dict[int, Tree]]:
    """The broadcast of a round of the true cohort, and the updates of all four clients, which the attacker knows."""
    federation = Federation(
        tw.Method(client_weight=tw.aggregators.Uniform(), privacy=PART, server_opt=tw.optimizers.SGD(1.0))
    )
    contract, plan = federation.contract, Round.open(federation.contract, federation.server).plan
    for client in (0, 1, 2, 3):
        federation.download(client)
    up = {client: federation.upload(client) for client in (0, 1, 2, 3)}
    updates = {client: decode_upload(contract, plan, 0, client, data).code for client, data in up.items()}
    federation.close(plan, {client: up[client] for client in TRUE})
    body = wire.unpack_body(federation.server.ledger.entries[-1], contract.schema)
    return flatten(read_step(contract, body, 0, torch.device("cpu")).code), updates


def on_the_float_grid(released: torch.Tensor, cohort: list[Tree]) -> float:
    """The fraction of released values that equal mean + spread g, bit for bit, for a g that `Key.normal` can draw."""
    mean = flatten(scale(weighted_mean([PART.accept(code) for code in cohort], [1.0] * 3), 1 / PART.clip))
    spread = PART.sigma / len(cohort)
    nearest = torch.round((released - mean).double() / (spread * NORMAL_SCALE))
    found = torch.zeros(len(released), dtype=torch.bool)
    for off in range(-3, 4):
        found |= mean + spread * ((nearest + off).float() * NORMAL_SCALE) == released
    return float(found.double().mean())


def test_bits_of_released_values_do_not_identify_the_cohort():
    """Floating-point noise would lie on a grid around the true mean, which matches all values; another mean few."""
    released, updates = seen()
    true, wrong = (on_the_float_grid(released, [updates[i] for i in cohort]) for cohort in (TRUE, WRONG))
    assert abs(true - wrong) < 0.1, f"the true cohort matches {true:.0%} of the values, another one {wrong:.0%}"


def sum_of(cohort, updates, lattice) -> np.ndarray:
    steps = lattice.most / PART.clip
    return sum(onto_lattice(flatten(updates[i]), steps, lattice.most).numpy() for i in cohort)


def test_both_cohorts_are_equally_likely():
    """Each value is an integer that noise can reach from the sum of either cohort, with about equal likelihood."""
    released, updates = seen()
    lattice = PART.lattice(3)
    unit = 3 * lattice.most
    total = np.rint(released.numpy().astype(np.float64) * unit)
    assert np.array_equal((total / unit).astype(np.float32), released.numpy())  # a function of one integer
    true, wrong = (total - sum_of(cohort, updates, lattice) for cohort in (TRUE, WRONG))
    for noise in (true, wrong):  # plausible for a discrete Gaussian, in magnitude and variance
        assert np.abs(noise).max() < 6 * math.sqrt(lattice.variance)
        assert (noise**2).mean() / lattice.variance == pytest.approx(1, abs=5 * math.sqrt(2 / len(noise)))
    ratio = float((wrong**2 - true**2).sum() / (2 * lattice.variance))
    assert abs(ratio) <= epsilon(2 / PART.sigma, 1.0, 1, 1e-5)  # one client removed and another added: twice the clip


def test_a_likelihood_attack_is_no_better_than_the_noise_allows():
    """A likelihood ratio test over many releases is right as often as under exact Gaussian noise, and no more."""
    part = replace(PART, sigma=3.0)
    codes = {i: {"w": Key(i).normal(40)} for i in (0, 1, 2, 3)}  # all of them are clipped
    lattice, tries = part.lattice(3), 300
    sums = [sum_of(cohort, codes, lattice) for cohort in (TRUE, WRONG)]
    c = float(np.linalg.norm(sums[0] - sums[1])) / math.sqrt(lattice.variance)
    mean, right = partial(weighted_mean, weights=[1.0] * 3), 0
    for i in range(tries):
        released = part.aggregate([codes[i] for i in TRUE], mean, 3, Key(9).fold(i))["w"].numpy()
        total = released.astype(np.float64) * 3 * lattice.most
        right += ((total - sums[0]) ** 2).sum() < ((total - sums[1]) ** 2).sum()
    allowed = 0.5 * (1 + math.erf(c / 2 / math.sqrt(2)))
    assert 0.55 < allowed < 0.75
    assert right / tries == pytest.approx(allowed, abs=4 * math.sqrt(0.25 / tries))


def test_the_released_value_depends_on_the_sum_only():
    """Two cohorts whose updates have the same sum give the same bits, in any order."""
    part, mean = tw.privacy.DP(clip=1.0, sigma=0.5), partial(weighted_mean, weights=[1.0, 1.0])
    step = 2.0**-24  # more than one step of the lattice
    one, two = ({"w": torch.tensor([a * step, b * step])} for a, b in ((1000.0, -3.0), (77.0, 50.0)))
    three, four = ({"w": torch.tensor([a * step, b * step])} for a, b in ((1077.0, 40.0), (0.0, 7.0)))
    first = part.aggregate([one, two], mean, 2, Key(1))["w"]
    assert torch.equal(first, part.aggregate([three, four], mean, 2, Key(1))["w"])
    assert torch.equal(first, part.aggregate([two, one], mean, 2, Key(1))["w"])
