"""What released values say about who took part: what their likelihood says, and nothing more."""

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
from thinwire.protocol.entries import read_step
from thinwire.protocol.round import plan_round
from thinwire.protocol.upload import decode_upload
from thinwire.wire import message as wire

PART = tw.DP(clip=0.5, sigma=1.0)
TRUE, WRONG = (0, 1, 2), (0, 1, 3)


def seen() -> tuple[torch.Tensor, dict[int, Tree]]:
    """What a round of the first cohort broadcasts, and what each of four clients would have sent, as an attacker who
    knows all of them does."""
    federation = Federation(tw.Method(client_weight=tw.Uniform(), privacy=PART, server_opt=tw.SGD(1.0)))
    contract, plan = federation.contract, plan_round(federation.contract, federation.server)
    for client in (0, 1, 2, 3):
        federation.download(client)
    up = {client: federation.upload(client) for client in (0, 1, 2, 3)}
    said = {client: decode_upload(contract, plan, 0, client, data).code for client, data in up.items()}
    federation.close(plan, {client: up[client] for client in TRUE})
    body = wire.unpack_body(federation.server.ledger.entries[-1], contract.schema)
    return flatten(read_step(contract, body, 0, torch.device("cpu")).code), said


def on_the_float_grid(released: torch.Tensor, cohort: list[Tree]) -> float:
    """The share of released values that mean + spread g is, bit for bit, with a g that `Key.normal` can draw."""
    mean = flatten(scale(weighted_mean([PART.accept(code) for code in cohort], [1.0] * 3), 1 / PART.clip))
    spread = PART.sigma / len(cohort)
    nearest = torch.round((released - mean).double() / (spread * NORMAL_SCALE))
    found = torch.zeros(len(released), dtype=torch.bool)
    for off in range(-3, 4):
        found |= mean + spread * ((nearest + off).float() * NORMAL_SCALE) == released
    return float(found.double().mean())


def test_bits_do_not_tell_the_true_cohort_from_another():
    """Noise in floating-point numbers lies on a grid around the true mean: it explained all values, a wrong one few."""
    released, said = seen()
    true, wrong = (on_the_float_grid(released, [said[i] for i in cohort]) for cohort in (TRUE, WRONG))
    assert abs(true - wrong) < 0.1, f"the true cohort explains {true:.0%} of the values, another one {wrong:.0%}"


def sum_of(cohort, said, lattice) -> np.ndarray:
    steps = lattice.most / PART.clip
    return sum(onto_lattice(flatten(said[i]), steps, lattice.most).numpy() for i in cohort)


def test_both_cohorts_explain_every_value_equally_well():
    """Every value is one whole number; from either cohort's sum noise leads there, about as likely."""
    released, said = seen()
    lattice = PART.lattice(3)
    unit = 3 * lattice.most
    total = np.rint(released.numpy().astype(np.float64) * unit)
    assert np.array_equal((total / unit).astype(np.float32), released.numpy())  # a function of one whole number
    true, wrong = (total - sum_of(cohort, said, lattice) for cohort in (TRUE, WRONG))
    for noise in (true, wrong):  # nothing that a discrete Gaussian could not draw, in size or in spread
        assert np.abs(noise).max() < 6 * math.sqrt(lattice.variance)
        assert (noise**2).mean() / lattice.variance == pytest.approx(1, abs=5 * math.sqrt(2 / len(noise)))
    ratio = float((wrong**2 - true**2).sum() / (2 * lattice.variance))
    assert abs(ratio) <= epsilon(2 / PART.sigma, 1.0, 1, 1e-5)  # one client less, and another more: twice the clip


def test_the_best_guess_is_as_good_as_the_noise_allows():
    """Who compares likelihoods over many releases is right as often as under exact Gaussian noise, and no more."""
    part = replace(PART, sigma=3.0)
    codes = {i: {"w": Key(i).normal(40)} for i in (0, 1, 2, 3)}  # all are clipped
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


def test_what_is_released_is_a_function_of_the_sum():
    """Two cohorts whose changes add up to the same are the same to the last bit, whoever said what, in any order."""
    part, mean = tw.DP(clip=1.0, sigma=0.5), partial(weighted_mean, weights=[1.0, 1.0])
    step = 2.0**-24  # more than one step of the lattice
    one, two = ({"w": torch.tensor([a * step, b * step])} for a, b in ((1000.0, -3.0), (77.0, 50.0)))
    three, four = ({"w": torch.tensor([a * step, b * step])} for a, b in ((1077.0, 40.0), (0.0, 7.0)))
    first = part.aggregate([one, two], mean, 2, Key(1))["w"]
    assert torch.equal(first, part.aggregate([three, four], mean, 2, Key(1))["w"])
    assert torch.equal(first, part.aggregate([two, one], mean, 2, Key(1))["w"])
