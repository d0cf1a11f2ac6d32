"""FedPM and FedMRN: probabilities and masks, and the bits that are sent."""

import math

import pytest
import torch
from torch.func import grad

import thinwire as tw
from tests.federation import Federation, decoded, same_public, workload
from thinwire.core.key import Key
from thinwire.core.tree import Spec, flatten, restrict, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.optimizers import BetaPosterior
from thinwire.protocol.client import Group, training_inputs
from thinwire.spaces import FedMRN, FedPM, Full, Route
from thinwire.training.backends import VmapTrainer

BASE = {"fc.weight": Key(1).normal(30, 20), "fc.bias": Key(2).normal(30)}


def bits_of(up):
    """The entropy of the share of ones, in bits."""
    p = float(up.float().mean()) if len(up) else 0.0
    return 0.0 if p in (0, 1) else -len(up) * (p * math.log2(p) + (1 - p) * math.log2(1 - p))


def basis_of(space, base=BASE):
    return space.basis(Spec.of(base), Key(3), "cpu")


def test_sampled_weights_are_frozen_ones_or_zero_and_have_the_gradient_of_the_mean():
    space, p = FedPM(), torch.full((30, 20), 0.3)
    scores = space.to_trained(BASE, {}, {"fc.weight/p": p})
    torch.manual_seed(0)
    w = space.unmerged().expand(BASE, {}, scores)["fc.weight"]
    size = math.sqrt(2 / 20)
    kept = w != 0
    assert torch.allclose(w[kept], torch.sign(BASE["fc.weight"])[kept] * size)
    assert abs(float(kept.float().mean()) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 600)
    towards = Key(4).normal(30, 20)

    def value(point):
        return (space.unmerged().expand(BASE, {}, point)["fc.weight"] * towards).sum()

    slope = grad(value)(scores)["fc.weight/p"]
    assert torch.allclose(slope, torch.sign(BASE["fc.weight"]) * size * towards * 0.3 * 0.7, atol=1e-6)


@pytest.mark.parametrize("test", ["sample", "mean", "round"])
def test_the_tested_model(test):
    space = FedPM(test=test)
    coords = {"fc.weight/p": Key(5).uniform(30, 20)}
    made = space.evaluation_weights(BASE, basis_of(space), coords)
    share = made["fc.weight"] / torch.where(BASE["fc.weight"] < 0, -1, 1) / math.sqrt(2 / 20)
    if test == "mean":
        assert torch.allclose(share, coords["fc.weight/p"])
    else:
        assert set(share.round(decimals=4).unique().tolist()) == {0.0, 1.0}
    if test == "round":
        assert torch.equal(share > 0.5, coords["fc.weight/p"] > 0.5)
    assert torch.equal(made["fc.bias"], BASE["fc.bias"])


def test_scores_and_probabilities_are_inverse_up_to_the_least_probability():
    p = {"fc.weight/p": torch.tensor([0.0, 0.01, 0.2, 0.5, 1.0])}
    back = FedPM().from_trained({}, {}, FedPM().to_trained({}, {}, p))
    assert torch.allclose(back["fc.weight/p"], torch.tensor([0.01, 0.01, 0.2, 0.5, 0.99]))


@pytest.mark.parametrize(("signed", "low"), [(True, -1.0), (False, 0.0)])
def test_sampled_updates_are_noise_times_a_mask(signed, low):
    space = FedMRN(noise=0.1, signed=signed, progressive=False)
    basis = basis_of(space)
    share = {f"{name}/c": torch.full_like(w, 0.4) for name, w in BASE.items()}
    updates = space.to_trained(BASE, basis, share)
    back = space.from_trained(BASE, basis, updates)
    assert torch.allclose(back["fc.weight/c"], share["fc.weight/c"])
    torch.manual_seed(0)
    made = space.unmerged().expand(BASE, basis, updates)
    mask = (made["fc.weight"] - BASE["fc.weight"]) / basis["fc.weight"]
    large = basis["fc.weight"].abs() > 1e-3
    assert set(mask[large].round(decimals=2).abs().unique().tolist()) <= {abs(low), 1.0}
    assert abs(float(mask[large].mean()) - 0.4) < 0.2
    slope = grad(lambda point: space.unmerged().expand(BASE, basis, point)["fc.weight"].sum())(updates)
    assert torch.equal(slope["fc.weight/c"], torch.ones(30, 20))  # that of the update


def test_the_mode_of_a_beta_posterior():
    opt, p = BetaPosterior(prior=2.0, masks=10, reset_every=2), {"p": torch.tensor([0.5])}
    state = opt.init(p)
    for mean, alpha, beta in ((0.2, 4, 10), (0.6, 10, 14), (1.0, 12, 2)):  # the third round begins anew
        change, state = opt.update({"p": p["p"] - mean}, state, p)
        p = {"p": p["p"] + change["p"]}
        assert float(p["p"]) == pytest.approx((alpha - 1) / (alpha + beta - 2), abs=1e-6)


def test_with_a_uniform_prior_and_resets_in_every_round_the_posterior_is_the_mean():
    coords, grads = {"w": Key(1).normal(9)}, {"w": Key(2).normal(9)}
    opt = BetaPosterior()
    state = opt.init(coords)
    for _ in range(3):
        change, state = opt.update(grads, state, coords)
        assert torch.allclose(change["w"], -grads["w"], atol=1e-6)


@pytest.mark.parametrize("name", ["fedpm", "fedmrn"])
def test_uploads_are_bits_at_their_entropy_and_clients_follow_the_server(name):
    federation = Federation(getattr(tw.methods, name)())
    for cohort in ((0, 1, 2), (1, 3), (0, 1)):
        server, public = federation.server, federation.server.public
        plan = federation.contract.method.schedule.plan({}, federation.contract.coords, public.version)
        messages = federation.round(cohort)
        for client, upload in decoded(federation.contract, server, plan, messages).items():
            levels, given = federation.method.up.levels, flatten(restrict(public.coords, upload.code))
            up = flatten(upload.code) == levels[1]
            assert set(flatten(upload.code).unique().tolist()) <= set(levels)
            of = ((given - levels[0]) * 16 / (levels[1] - levels[0])).long().clamp(0, 15)
            entropy = sum(bits_of(up[of == one]) for one in range(16)) / 8
            assert len(messages[client]) <= 1.01 * entropy + 24 + 2 * 16
            assert len(messages[client]) <= len(up) / 8 + 24 + 2 * 16
    federation.download(2)
    assert same_public(federation.public[2], federation.server.public)
    assert same(federation.server.public.base, federation.first.base) == (name == "fedpm")


def test_coordinates_that_training_did_not_change_stay_the_same():
    """Pixels that are always 0 give no gradient: their probabilities have the same bits after training."""
    federation = Federation(tw.Method(space=FedPM(start=0.3), client_opt=tw.optimizers.SGD(0.5)))
    federation.round((0,))
    moved = federation.server.public.coords["0.weight/p"] != federation.first.coords["0.weight/p"]
    assert bool(moved.any())
    assert not bool(moved[:, 0].any())


def test_vmap_trains_clients_on_different_samples():
    federation = Federation(tw.methods.fedpm())
    for client in (0, 1):
        federation.download(client)
    # the batches of both are those of the first client
    work = workload(federation.task, (0, 0), [Key(0), Key(0)], federation.local)
    states = federation.states[0], federation.states[1]
    group = Group(federation.public[0], federation.requested[0], (0, 1), states)
    outcome = VmapTrainer().train(training_inputs(federation.contract, federation.model, group, work))
    block = outcome.coords["0.weight/p"]
    assert not torch.equal(block[0], block[1])


def test_a_route_converts_the_coordinates_of_its_spaces():
    route = Route((("0.*", FedPM()), ("*", Full())))
    federation = Federation(tw.Method(space=route, client_opt=tw.optimizers.SGD(0.3)))
    federation.round((0, 1))
    p = federation.server.public.coords["0.weight/p"]
    assert bool((p != 0.5).any())
    assert bool(((p > 0) & (p < 1)).all())
    assert bool((federation.server.public.coords["2.weight"] != federation.first.coords["2.weight"]).any())


@pytest.mark.parametrize(("name", "least"), [("fedpm", 0.7), ("fedmrn", 0.5)])
def test_presets_learn_the_digits(name, least):
    run = tw.run(name, on="digits", rounds=8, eval_every=8, backend="vmap")
    assert run.history[-1].accuracy > least
    assert run.history[-1].bytes_up < 4810 * 10 / 8 + 600  # at most a bit a weight


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedPM(weights="random"), "signed, base"),
        (lambda: FedPM(start=0.0), "start must be from 0.01 to 0.99"),
        (lambda: FedPM(gain=0.0), "gain"),
        (lambda: FedPM(test="mode"), "mean, sample, round"),
        (lambda: FedMRN(noise=0.0), "noise"),
        (lambda: FedMRN(redraw_every=-1), "redraw_every"),
        (lambda: BetaPosterior(prior=0.5), "prior must be 1 or more"),
        (lambda: BetaPosterior(reset_every=0), "reset_every must be 1 or more"),
        (lambda: BetaPosterior(lr=0.0), "lr must be above 0"),
    ],
)
def test_invalid_options(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_corrections_with_a_state_are_refused():
    with pytest.raises(IncompatibleParts, match="clients train other values"):
        Federation(tw.Method(space=FedPM(), correction=tw.optimizers.Scaffold()))
    Federation(tw.Method(space=FedPM(), correction=tw.optimizers.FedProx())).round((0, 1))


def test_a_model_without_matrices_is_refused():
    with pytest.raises(ConfigError, match="two axes"):
        FedPM().check(Spec.of({"b": torch.zeros(3)}))
