"""Tests of secure aggregation."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task, perceptron
from tests.parts import Clip, Half, Turns
from thinwire.aggregators import Uniform
from thinwire.codecs import ByBlock, Chain, ErrorFeedback, Quantize, RandomK, Raw, TopK
from thinwire.errors import ConfigError, Diverged, IncompatibleParts, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.protocol import Budget, Method, Tier
from thinwire.protocol.round import Round
from thinwire.runs.check import check
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.secure.masks import fixed_point, hidden_size, hide, reveal
from thinwire.sketches import EvoFed

COHORT = (2, 5, 11, 40)


def secret(i, j):
    return f"{i} and {j}".encode()


def hidden(values, weights, version=3):
    words = [fixed_point(x, w, client, 4) for x, w, client in zip(values, weights, COHORT, strict=True)]
    return [hide(one, client, COHORT, version, secret) for one, client in zip(words, COHORT, strict=True)]


def mean_of(messages, count):
    total, weight = reveal(messages, count)
    return total / weight / 2**16


def test_reveal_returns_the_weighted_mean_up_to_rounding():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(4, 1000)), (3, 50, 1, 17)
    mean = mean_of(hidden(values, weights), 1000)
    exact = np.average(values, axis=0, weights=weights)
    assert np.abs(mean - exact).max() <= 4 * 0.5 / 2**16 / sum(weights) + 1e-12


def test_a_single_message_is_uniformly_random():
    """Masked equal values are uniform words: each bit is fair."""
    x = np.full(20_000, 0.25)
    one, two = hidden([x] * 4, (1,) * 4)[:2]
    for data in (one, two):
        bits = np.unpackbits(np.frombuffer(data, np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5
        assert len(np.unique(np.frombuffer(data, "<u4"))) > 19_990
    later = hidden([x] * 4, (1,) * 4, version=4)[0]
    assert (np.frombuffer(one, "<u4") != np.frombuffer(later, "<u4")).mean() > 0.999  # masks are not reused


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_sum_without_all_clients_is_refused(left):
    messages = hidden(np.ones((4, 10)), (1,) * 4)
    with pytest.raises(WireError, match="masks do not cancel"):
        reveal(messages[:left] + messages[left + 1 :], 10)
    with pytest.raises(WireError, match="masked values"):
        reveal([*messages[1:], messages[0][:-1]], 10)


def test_values_that_overflow_the_ring_are_refused():
    with pytest.raises(Diverged, match="does not fit into 32 bits"):
        fixed_point(np.array([40_000.0]), 1, 2, 4)
    most = ((1 << 31) - 1) // 4
    edge = np.array([most / 2**16, -most / 2**16])
    assert np.allclose(mean_of(hidden([edge] * 4, (1,) * 4), 2), edge)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"client_weight": Uniform()},
        {"space": tw.spaces.MAPO(k=64), "client_opt": tw.optimizers.SGD(1.0)},
        {"sketch": EvoFed(16)},
        {"up": RandomK(0.2, shared=True)},
        {"up": ErrorFeedback(RandomK(0.2, unbiased=False, shared=True)), "down": Half()},
        {"up": Chain((RandomK(0.3, shared=True), Raw())), "privacy": Clip(norm=1.0, noise=0.0)},
        {"upload": "weights"},
        {"lr_schedule": tw.optimizers.ExponentialLR(0.5), "correction": tw.optimizers.FedProx()},
    ],
    ids=repr,
)
def test_a_secure_round_equals_an_open_one_up_to_rounding(options):
    plain, masked = Federation(Method(**options)), Federation(Method(**options, secure_aggregation=True))
    for cohort in ([0, 1, 2], [3, 5]):
        plain.round(cohort)
        up = masked.round(cohort)
        payload = plain.contract.up(0).size(plain.contract.code)
        assert all(hidden_size(payload // 4) < len(data) < hidden_size(payload // 4) + 40 for data in up.values())
    # each value is off by at most half a step of 2^-16 per client, and the second round continues from there
    a, b = plain.server.public.coords, masked.server.public.coords
    assert all(torch.allclose(a[name], b[name], atol=1e-3, rtol=0) for name in a)


def test_a_missing_client_stops_the_round():
    federation = Federation(Method(secure_aggregation=True))
    plan = Round.open(federation.contract, federation.server).plan
    for client in (0, 1, 2):
        federation.download(client)
    federation.cohort = (0, 1, 2)
    up = {client: federation.upload(client) for client in (0, 1, 2)}
    with pytest.raises(WireError, match="masks do not cancel"):
        federation.close(plan, {client: up[client] for client in (0, 1)})
    federation.close(plan, up)
    assert federation.server.public.version == 1


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_engine_runs_secure_aggregation(chunk):
    runs = []
    for secure in (False, True):
        job = Job(digits_task(), Method(secure_aggregation=secure), rounds=3, cohort=4)
        simulation = make_simulation(Engine(chunk=chunk), job)
        state = simulation.start()
        for _ in range(3):
            state, record = simulation.round(state)
        runs.append((simulation.weights(state.server.public), record))
    assert all(torch.allclose(runs[0][0][name], runs[1][0][name], atol=1e-3) for name in runs[0][0])
    assert runs[1][1].accuracy == pytest.approx(runs[0][1].accuracy, abs=0.02)


@dataclass(frozen=True)
class Doubled(tw.Correction):
    """A correction that scales without a report."""

    @property
    def active(self):
        return True

    def factor(self, report):
        return 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"up": TopK(0.1)}, 'Write up = "raw" or up = { kind = "randomk", shared = true }'),
        ({"up": RandomK(0.1)}, "shared = true"),
        ({"up": Quantize(8)}, 'Write up = "raw"'),
        ({"up": ErrorFeedback(TopK(0.1))}, 'Write up = "raw"'),
        ({"up": ByBlock()}, 'Write up = "raw"'),
        ({"budget": Budget((Tier(), Tier(up=RandomK(0.1, shared=True))))}, "Remove up from the tiers"),
        ({"correction": tw.optimizers.Scaffold()}, "Use a correction that reports nothing"),
        ({"correction": tw.optimizers.FedNova()}, "Use a correction that reports nothing"),
        ({"correction": Doubled()}, "Use a correction that scales nothing"),
        ({"schedule": Turns()}, "Use a schedule that reports nothing"),
        ({"schedule": tw.schedules.FedLAMA(phi=2)}, "Use a schedule that reports nothing"),
    ],
    ids=repr,
)
def test_incompatible_parts_are_refused_before_training(options, message):
    with pytest.raises(IncompatibleParts) as error:
        Federation(Method(**options, secure_aggregation=True))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_running_statistics_and_single_clients_are_refused():
    with pytest.raises(IncompatibleParts, match="group norm"):
        Federation(Method(secure_aggregation=True), digits_task(perceptron(norm=True)))
    with pytest.raises(ConfigError, match="a cohort of 2 or more"):
        Job(digits_task(), Method(secure_aggregation=True), cohort=1)
    with pytest.raises(IncompatibleParts, match="two or more"):
        Federation(Method(secure_aggregation=True)).round([0])


def test_secure_aggregation_can_be_set_in_a_file():
    experiment = resolve("mapo", overrides={"method.secure_aggregation": True})
    assert from_table(to_table(experiment)) == experiment
    facts, plain = check(experiment), check(resolve("mapo"))
    assert facts["bytes_up_per_client"] == plain["bytes_up_per_client"] - 1 + 8  # no weight, two more words
    with pytest.raises(IncompatibleParts, match="cannot be summed"):
        check(resolve("sparse", overrides={"method.secure_aggregation": True}))
