"""Low-rank weights: Tucker-2, Pufferfish and Factorized-FL."""

import pytest
import torch
from torch.nn import functional as F

import thinwire as tw
from tests.federation import perceptron
from tests.spaces.test_fedpara import CONVOLUTIONS, KEY, composed, size, weights_of
from thinwire.core.tree import Spec, same
from thinwire.errors import ConfigError
from thinwire.models.lstm import lstm80
from thinwire.models.mlp import two_fc
from thinwire.models.vgg import vgg16_gn
from thinwire.protocol.setup import make_contract
from thinwire.spaces.fedpara import fedpara_rank, fedpara_size
from thinwire.spaces.lowrank import lowrank_rank, lowrank_size
from thinwire.testing import check_space


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize(
    "space", [tw.spaces.LowRank(rank=2), tw.spaces.Pufferfish(first_dense=0), tw.spaces.FactorizedFL()], ids=repr
)
def test_convolutions_of_other_dimensions_are_factorized(space, dims):
    check_space(space, {"conv.weight": torch.zeros(8, 5, *(3,) * dims)}, starts_at_base=False)


@pytest.mark.parametrize(
    "space", [tw.spaces.LowRank(rank=5), tw.spaces.Pufferfish(first_dense=0), tw.spaces.FactorizedFL()], ids=repr
)
@pytest.mark.parametrize("shape", [(200, 300), (64, 48, 3, 3)])
def test_initial_weights_have_the_std_of_he(space, shape):
    he = (2 / torch.Size(shape[1:]).numel()) ** 0.5
    assert 0.7 < float(composed(space, *shape).std()) / he < 1.4


# -- Tucker-2 ----------------------------------------------------------------------------------------------------------


def test_weights_have_the_given_rank():
    assert int(torch.linalg.matrix_rank(composed(tw.spaces.LowRank(rank=5), 40, 30))) == 5
    kernel = composed(tw.spaces.LowRank(rank=4), 12, 10, 3, 3)
    assert int(torch.linalg.matrix_rank(kernel.reshape(12, -1))) == 4
    assert int(torch.linalg.matrix_rank(kernel.transpose(0, 1).reshape(10, -1))) == 4


def test_tucker_kernel_equals_three_consecutive_convolutions():
    space, base = tw.spaces.LowRank(rank=3), {"w": torch.zeros(6, 5, 3, 3)}
    coords = space.init(base, {}, KEY)
    t, x, y = (coords[f"w/{part}"] for part in "txy")
    image = KEY.fold("image").normal(2, 5, 8, 8)
    thin = F.conv2d(F.conv2d(image, y.T[..., None, None]), t, padding=1)
    whole = F.conv2d(image, space.expand(base, {}, coords)["w"], padding=1)
    torch.testing.assert_close(whole, F.conv2d(thin, x[..., None, None]), rtol=1e-5, atol=1e-5)


def test_vgg16_has_about_the_size_of_fedpara():
    weights = weights_of(vgg16_gn)
    space = tw.spaces.LowRank(like_gamma=0.1, target_modules=CONVOLUTIONS)
    assert list(space.ranks(Spec.of(weights)).values()) == [4, 18, 22, 30, 37, 50, 50, 61, *[87] * 5]
    assert size(space, weights) == 1562217
    assert round(1562217 / Spec.of(weights).size, 4) == 0.1024


def test_rank_is_the_least_with_as_many_parameters_as_fedpara():
    for shape in [(64, 3, 3, 3), (100, 30), (16, 8, 5, 5), (7, 9, 1, 1), (256, 784), (2, 64)]:
        for gamma in (0.0, 0.1, 0.7, 1.0):
            goal, rank = fedpara_size(shape, fedpara_rank(shape, gamma)), lowrank_rank(shape, gamma)
            assert rank == next(r for r in range(1000) if lowrank_size(shape, r) >= goal)


@pytest.mark.parametrize(("rank", "share"), [(25, 0.158), (26, 0.163)])
def test_size_of_the_lstm(rank, share):
    weights = weights_of(lstm80)
    large = size(tw.spaces.LowRank(rank=rank, target_modules=("lstm.weight*",), modules_to_save=("*ih_l0",)), weights)
    small = lowrank_size((1024, 8), 8) - 1024 * 8  # of the one matrix that is too small for the rank
    assert round((large + small) / Spec.of(weights).size, 3) == share


# -- Pufferfish --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "share"), [(5, 0.332), (8, 0.441)])
def test_pufferfish_sizes_of_vgg16(first, share):
    weights = weights_of(vgg16_gn)
    assert round(size(tw.spaces.Pufferfish(first_dense=first), weights) / Spec.of(weights).size, 3) == share


def test_pufferfish_kernel_equals_a_thin_and_a_1x1_convolution():
    space, base = tw.spaces.Pufferfish(first_dense=0, ratio=0.5), {"w": torch.zeros(6, 5, 3, 3)}
    coords = space.init(base, {}, KEY)
    image = KEY.fold("image").normal(2, 5, 8, 8)
    thin = F.conv2d(image, coords["w/v"], padding=1)
    whole = F.conv2d(image, space.expand(base, {}, coords)["w"], padding=1)
    torch.testing.assert_close(whole, F.conv2d(thin, coords["w/u"][..., None, None]), rtol=1e-5, atol=1e-5)


def test_pufferfish_without_convolutions_factorizes_all_matrices_except_the_last():
    assert list(tw.spaces.Pufferfish(first_dense=0).ranks(Spec.of(weights_of(two_fc)))) == ["fc1.weight"]


# -- Factorized-FL -----------------------------------------------------------------------------------------------------


def test_factorized_weight_is_a_product_of_vectors_plus_the_residual():
    space = tw.spaces.FactorizedFL()
    base = {"fc.weight": torch.zeros(6, 5), "conv.weight": torch.zeros(4, 3, 5, 5)}
    coords = space.init(base, {}, KEY)
    made = space.expand(base, {}, coords)
    u, v, mu = (coords[f"fc.weight/{part}"] for part in ("u", "v", "mu"))
    torch.testing.assert_close(made["fc.weight"], torch.outer(u, v).T + mu)
    u, v, mu = (coords[f"conv.weight/{part}"] for part in ("u", "v", "mu"))
    matrix = torch.outer(u, v.flatten())  # kernel positions times outputs and inputs
    torch.testing.assert_close(made["conv.weight"], matrix.T.reshape(4, 3, 5, 5) + mu)


def test_factorized_sends_all_coordinates_or_one_vector_for_each_weight():
    weights = {name: p.detach() for name, p in two_fc().named_parameters()}
    space = tw.spaces.FactorizedFL()
    whole, _ = make_contract(tw.Method(space=space), weights, {}, KEY)
    assert whole.sendable.size == Spec.of(weights).size + (784 + 256) + (256 + 10)
    personal = tw.Method(space=space, schedule=tw.schedules.AllBlocks(private=("*/v", "*/mu")))
    some, _ = make_contract(personal, weights, {}, KEY)
    assert some.sendable.size == (784 + 256) + (256 + 10)  # u and bias of both layers


def test_factorized_evaluation_weights_are_pruned_and_training_weights_are_not():
    space, plain = (
        tw.spaces.FactorizedFL(prune=0.1, modules_to_save=("head*",)),
        tw.spaces.FactorizedFL(modules_to_save=("head*",)),
    )
    base = {"fc.weight": torch.zeros(6, 5), "fc.bias": torch.full((6,), 0.01), "head.weight": torch.full((2, 6), 0.01)}
    coords = space.init(base, {}, KEY)
    coords["fc.weight/mu"] = KEY.fold("mu").normal(6, 5) * 0.1
    coords["fc.weight/mu"][0, 0] = 0.1  # a value equal to the threshold is kept
    mu = coords["fc.weight/mu"]
    kept = torch.where(mu.abs() >= 0.1, mu, torch.zeros(()))
    assert 0 < int(kept.count_nonzero()) < mu.numel()
    assert kept[0, 0] == mu[0, 0]
    used, trained = space.evaluation_weights(base, {}, coords), space.expand(base, {}, coords)
    u, v = coords["fc.weight/u"], coords["fc.weight/v"]
    torch.testing.assert_close(used["fc.weight"], torch.outer(v, u) + kept)
    assert same(trained, plain.expand(base, {}, coords))
    assert all(torch.equal(used[name], coords[name]) for name in ("fc.bias", "head.weight"))  # only mu is pruned
    assert same(plain.evaluation_weights(base, {}, coords), trained)
    routed = tw.spaces.Route((("fc.*", space), ("*", tw.spaces.Full())))
    assert same(routed.evaluation_weights(base, {}, coords), used)
    assert same(routed.expand(base, {}, coords), trained)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.spaces.LowRank(rank=-2), "rank must be 0 or more"),
        (lambda: tw.spaces.LowRank(like_gamma=2.0), "like_gamma must be from 0 to 1"),
        (lambda: tw.spaces.Pufferfish(ratio=0.0), "ratio must be above 0"),
        (lambda: tw.spaces.Pufferfish(ratio=1.5), "ratio must be above 0 and at most 1"),
        (lambda: tw.spaces.Pufferfish(first_dense=-1), "first_dense must be 0 or more"),
        (lambda: tw.spaces.FactorizedFL(prune=-0.1), "prune must be 0 or more"),
        (lambda: tw.spaces.FactorizedFL(prune=float("nan")), "prune must be 0 or more"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (tw.spaces.LowRank(rank=50), r"rank = 50 is above 12, the largest rank of 0.weight \[12, 64\]"),
        (tw.spaces.LowRank(target_modules=("fc*",)), "target_modules 'fc.' matches no block"),
        (tw.spaces.Pufferfish(), "first_dense = 5 leaves nothing to factorize of 1 weights"),
        (tw.spaces.Pufferfish(ratio=1.0, first_dense=0), "none of these weights smaller"),
        (tw.spaces.FactorizedFL(target_modules=("fc*",)), "target_modules 'fc.' matches no block"),
    ],
    ids=repr,
)
def test_models_that_do_not_fit_are_refused(space, message):
    with pytest.raises(ConfigError, match=message):
        space.check(Spec.of(dict(perceptron().named_parameters())))


@pytest.mark.parametrize("space", [tw.spaces.LowRank(), tw.spaces.Pufferfish(), tw.spaces.FactorizedFL()], ids=repr)
def test_a_model_without_matrices_is_refused(space):
    with pytest.raises(ConfigError, match=r"but the weights are gain \[3\]"):
        space.check(Spec.of({"gain": torch.ones(3)}))
