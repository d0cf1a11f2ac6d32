"""FedPara: elementwise products of two low-rank weights."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F

import thinwire as tw
from tests.federation import Federation, digits_task, perceptron
from thinwire.core.key import Key
from thinwire.core.tree import Spec, Tree, all_finite, same, stack, unstack
from thinwire.errors import ConfigError
from thinwire.models.cnn import cnn2
from thinwire.models.lstm import lstm80
from thinwire.models.mlp import two_fc
from thinwire.models.resnet import resnet18
from thinwire.models.vgg import vgg16_gn
from thinwire.protocol.setup import make_contract
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.runs.toml import dumps, loads
from thinwire.spaces.factors import GammaRule
from thinwire.spaces.fedpara import fedpara_bounds, fedpara_rank, fedpara_size
from thinwire.testing import check_space

KEY = Key(3)
CONVOLUTIONS = ("features.*",)  # of VGG16; linear layers stay dense in the paper


def weights_of(make, **options) -> Tree:
    """The weights of a model on the meta device: shapes only."""
    with torch.device("meta"):
        return {name: p.detach() for name, p in make(**options).named_parameters()}


def size(space, weights: Tree) -> int:
    return Spec.of(space.init(weights, {}, KEY)).size


def composed(space, *shape: int) -> torch.Tensor:
    base = {"w": torch.zeros(shape, dtype=torch.float64)}  # rounding has full rank: keep it small
    return space.expand(base, {}, space.init(base, {}, KEY))["w"]


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_any_dimension_are_factorized(dims):
    weights = {"conv.weight": torch.zeros(6, 5, *(3,) * dims), "conv.bias": torch.ones(6)}
    check_space(tw.spaces.FedPara(rank=2), weights, starts_at_base=False)
    assert tw.spaces.FedPara(rank=2).init(weights, {}, KEY)["conv.weight/t1"].shape == (2, 2, *(3,) * dims)


def test_coordinates_are_named_after_weights_and_factors():
    weights = {"conv.weight": torch.zeros(8, 8, 3, 3), "fc.weight": torch.zeros(8, 8), "fc.bias": torch.zeros(8)}
    names = list(tw.spaces.FedPara(rank=2).init(weights, {}, KEY))
    kernel = [f"conv.weight/{part}{j}" for j in "12" for part in "txy"]
    assert names == [*kernel, *(f"fc.weight/{part}{j}" for j in "12" for part in "xy"), "fc.bias"]


def test_initial_factors_depend_on_key_and_shapes_only_and_dense_weights_are_those_of_the_base():
    space = tw.spaces.FedPara(rank=2, modules_to_save=("head.*",))
    one = {"fc.weight": torch.zeros(6, 4), "head.weight": torch.ones(2, 6), "head.bias": torch.ones(2)}
    two = {"fc.weight": torch.randn(6, 4), "head.weight": torch.randn(2, 6), "head.bias": torch.full((2,), 2.0)}
    a, b = space.init(one, {}, KEY), space.init(two, {}, KEY)
    assert all(torch.equal(a[name], b[name]) for name in a if "/" in name)
    assert same({name: b[name] for name in ("head.weight", "head.bias")}, {n: two[n] for n in two if "head" in n})
    assert not torch.equal(a["fc.weight/x1"], space.init(one, {}, Key(4))["fc.weight/x1"])
    assert not torch.equal(a["fc.weight/x1"][:4], a["fc.weight/y1"])


def test_factors_of_float64_weights_are_float64():
    base = {"w": torch.zeros(6, 4, dtype=torch.float64)}
    coords = tw.spaces.FedPara(rank=2).init(base, {}, KEY)
    assert {block.dtype for block in coords.values()} == {torch.float64}


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "reached"), [(10, 100), (7, 49)])
def test_rank_of_the_product_is_the_square_of_the_rank(rank, reached):
    w = composed(tw.spaces.FedPara(rank=rank), 100, 100)
    assert int(torch.linalg.matrix_rank(w)) == reached


def test_gamma_zero_gives_full_rank():
    assert fedpara_rank((256, 256), 0.0) == 16
    assert int(torch.linalg.matrix_rank(composed(tw.spaces.FedPara(gamma=0.0), 256, 256))) == 256


@pytest.mark.parametrize(("o", "i", "rank", "ranks"), [(24, 10, 4, (16, 10)), (30, 30, 3, (9, 9))])
def test_unfoldings_of_a_kernel_have_at_most_the_square_of_the_rank(o, i, rank, ranks):
    w = composed(tw.spaces.FedPara(rank=rank), o, i, 3, 3)
    outs = int(torch.linalg.matrix_rank(w.reshape(o, -1)))
    ins = int(torch.linalg.matrix_rank(w.transpose(0, 1).reshape(i, -1)))
    assert (outs, ins) == ranks
    assert max(ranks) <= rank**2


def test_bounds_equal_those_of_an_exhaustive_search():
    for shape in [(64, 3, 3, 3), (100, 30), (16, 8, 5, 5), (7, 9, 1, 1), (5, 6, 3), (12, 12)]:
        numel = torch.Size(shape).numel()
        least, most = fedpara_bounds(shape)
        assert most == max(r for r in range(200) if fedpara_size(shape, r) <= numel)
        assert least**2 >= min(shape[:2]) > (least - 1) ** 2
        for gamma in (0.0, 0.3, 1.0):
            assert fedpara_size(shape, fedpara_rank(shape, gamma)) <= numel


# -- sizes, as published -----------------------------------------------------------------------------------------------

VGG10 = [1545442, 2325148, 3305162, 4439576, 5791250, 7331266, 9002116, 10895342, 12917850]
VGG100 = [1591612, 2371318, 3351332, 4485746, 5837420, 7377436, 9048286, 10941512, 12964020]


@pytest.mark.parametrize(("classes", "sizes"), [(10, VGG10), (100, VGG100)])
def test_size_of_vgg16(classes, sizes):
    weights = weights_of(vgg16_gn, classes=classes)
    built = [size(tw.spaces.FedPara(gamma=g / 10, target_modules=CONVOLUTIONS), weights) for g in range(1, 10)]
    assert built == sizes


def test_ranks_of_vgg16():
    spec = Spec.of(weights_of(vgg16_gn))
    ranks = {g: list(tw.spaces.FedPara(gamma=g, target_modules=CONVOLUTIONS).ranks(spec).values()) for g in (0.1, 0.5)}
    assert ranks[0.1] == [2, 11, 13, 18, 22, 30, 30, 36, *[52] * 5]
    assert ranks[0.5] == [4, 23, 31, 44, 60, 85, 85, 116, *[166] * 5]


@pytest.mark.parametrize(("gamma", "built"), [(0.1, 1000778), (0.6, 5303132), (0.9, 9432386)])
def test_size_of_resnet18_with_its_first_and_smallest_kernels_at_gamma_one(gamma, built):
    weights = weights_of(resnet18)
    kernels = [name for name, w in weights.items() if w.dim() == 4]
    large = {name for name in kernels if weights[name].shape[-1] == 1} | set(kernels[:2])
    one, some = tw.spaces.FedPara(gamma=1.0), tw.spaces.FedPara(gamma=gamma)
    ranks = {name: (one if name in large else some).ranks(Spec.of(weights))[name] for name in kernels}
    sizes = [fedpara_size(w.shape, ranks[name]) if name in ranks else w.numel() for name, w in weights.items()]
    assert sum(sizes) == built


def test_size_of_the_lstm_with_stacked_gates():
    weights, space = weights_of(lstm80), tw.spaces.FedPara(gamma=0.0, modules_to_save=("head.*",))
    assert list(space.ranks(Spec.of(weights)).values()) == [3, 16, 16, 16]  # the embedding stays dense
    assert size(space, weights) == 154368
    assert round(154368 / Spec.of(weights).size, 3) == 0.188


def test_an_embedding_is_factorized_only_if_a_selector_names_it():
    spec = Spec.of(weights_of(lstm80))
    assert "embedding.weight" not in tw.spaces.FedPara().ranks(spec)
    assert list(tw.spaces.FedPara(gamma=0.5, target_modules=("embedding.*",)).ranks(spec)) == ["embedding.weight"]


@pytest.mark.parametrize(("classes", "sent", "ratio"), [(62, 63646, 3.41), (10, 59570, 3.42)])
def test_personal_half_of_two_linear_layers_is_not_sent(classes, sent, ratio):
    method = tw.Method(
        space=tw.spaces.FedPara(gamma=0.5, personal=True), schedule=tw.schedules.AllBlocks(private=("*/[txy]2",))
    )
    weights = {name: p.detach() for name, p in two_fc(classes).named_parameters()}
    contract, _ = make_contract(method, weights, {}, KEY)
    assert contract.sendable.size == sent
    assert round(Spec.of(weights).size / sent, 2) == ratio


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_composed_kernel_equals_the_sum_in_the_paper(activation):
    space, base = tw.spaces.FedPara(rank=3, activation=activation), {"w": torch.zeros(6, 5, 3, 3)}
    coords = space.init(base, {}, KEY)
    halves = []
    for j in "12":
        t, x, y = (coords[f"w/{part}{j}"] for part in "txy")
        halves.append(sum(t[a, b] * torch.outer(x[:, a], y[:, b])[..., None, None] for a in range(3) for b in range(3)))
    if activation == "tanh":
        halves = [half.tanh() for half in halves]
    image = KEY.fold("image").normal(2, 5, 8, 8)
    made = F.conv2d(image, space.expand(base, {}, coords)["w"])
    torch.testing.assert_close(made, F.conv2d(image, halves[0] * halves[1]), rtol=1e-5, atol=1e-5)


def test_gradients_equal_the_corrected_equation_six():
    space, base = tw.spaces.FedPara(rank=3), {"w": torch.zeros(6, 5)}
    coords = space.init(base, {}, KEY)
    j = KEY.fold("J").normal(6, 5)  # the gradient of the loss with respect to W
    x1, y1, x2, y2 = (coords[f"w/{part}"] for part in ("x1", "y1", "x2", "y2"))
    slopes = grad(lambda c: (space.expand(base, {}, c)["w"] * j).sum())(coords)
    j1, j2 = j * (x2 @ y2.T), j * (x1 @ y1.T)
    for name, expected in {"x1": j1 @ y1, "y1": j1.T @ x1, "x2": j2 @ y2, "y2": j2.T @ x2}.items():
        torch.testing.assert_close(slopes[f"w/{name}"], expected)


@pytest.mark.parametrize("activation", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(60, 80), (24, 20, 3, 3)])
def test_a_step_of_isometric_factors_has_the_mean_and_the_start_that_of_the_dense_weight(shape, activation):
    """The component along G of a step of W is in expectation G, by Monte Carlo; std(W) is the dense one."""
    space = tw.spaces.FedPara(rank=6, activation=activation, start="composed", scale="isometric")
    fan_in = torch.Size(shape[1:]).numel()
    usual = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    base = {"w": usual / fan_in**0.5}  # as torch initializes layers
    gains, sizes = [], []
    for i in range(30):
        coords, g = space.init(base, {}, Key(i)), Key(100 + i).normal(*shape)
        made, back = torch.func.vjp(lambda c: space.expand(base, {}, c)["w"], coords)
        # a step of W is J J^T G, its component along G is |J^T G|^2
        gains.append(float(sum(block.square().sum() for block in back(g)[0].values()) / g.square().sum()))
        sizes.append(float(made.std() / base["w"].std()))
    gains, sizes = torch.tensor(gains), torch.tensor(sizes)
    assert float(gains.mean()) == pytest.approx(1, abs=0.15)
    assert float(sizes.mean()) == pytest.approx(1, abs=0.05)


def test_an_isometric_start_has_the_std_of_weights_that_are_not_initialized_by_torch():
    base = {"w": 0.2 * Key(1).normal(60, 80)}  # torch: 0.065
    space = tw.spaces.FedPara(rank=6, activation="tanh", start="composed", scale="isometric")
    assert float(space.expand(base, {}, space.init(base, {}, KEY))["w"].std()) == pytest.approx(0.2, rel=0.1)


def test_head_and_small_weights_stay_dense_by_option_and_check_says_so():
    net = nn.ModuleDict({"conv": nn.Conv1d(3, 16, 5), "gru": nn.GRU(16, 32), "head": nn.Linear(32, 5)})
    spec = Spec.of({name: p.detach() for name, p in net.named_parameters()})
    assert list(tw.spaces.FedPara(dense="auto").ranks(spec)) == ["gru.weight_ih_l0", "gru.weight_hh_l0"]
    assert tw.spaces.FedPara(dense="auto").note(spec) == "FedPara leaves dense: conv.weight, head.weight."
    assert list(tw.spaces.FedPara().ranks(spec)) == [
        "conv.weight",
        "gru.weight_ih_l0",
        "gru.weight_hh_l0",
        "head.weight",
    ]
    # a head with most of the weights is factorized
    assert list(tw.spaces.FedPara(dense="auto").ranks(Spec.of(dict(cnn2().named_parameters())))) == [
        "conv2.weight",
        "head.weight",
    ]
    assert tw.spaces.FedPara(dense="auto").ranks(Spec.of({"w": torch.zeros(2, 4)})) == {}


# -- rounds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroPersonalHalf(tw.spaces.FedPara):
    """pFedPara whose personal half is zero; its gradient is zero there, so it stays zero."""

    def init(self, base, basis, key):
        coords = super().init(base, basis, key)
        return {name: torch.zeros_like(b) if name.endswith("2") else b for name, b in coords.items()}


@dataclass(frozen=True)
class SharedHalf(tw.spaces.LowRank):
    """Low rank with the initial factors of the shared half of pFedPara."""

    def init(self, base, basis, key):
        twin = tw.spaces.FedPara(rank=self.rank, personal=True).init(base, basis, key)
        return {name.removesuffix("1"): b for name, b in twin.items() if not name.endswith("2")}


def test_pfedpara_with_a_zero_personal_half_equals_low_rank_averaging():
    task, rounds = digits_task(), 2
    one = Federation(
        tw.Method(space=ZeroPersonalHalf(rank=4, personal=True), schedule=tw.schedules.AllBlocks(private=("*/[xy]2",))),
        task,
    )
    two = Federation(tw.Method(space=SharedHalf(rank=4)), task)
    for _ in range(rounds):
        one.round([0, 1, 2])
        two.round([0, 1, 2])
    for name, w in one.weights().items():
        torch.testing.assert_close(w, two.weights()[name], rtol=1e-5, atol=1e-5)
    assert not torch.equal(one.weights()["0.weight"], one.weights(one.first)["0.weight"])


def test_the_server_averages_factors_not_weights():
    federation = Federation(tw.Method(space=tw.spaces.FedPara(rank=3), client_weight=tw.aggregators.Uniform()))
    ends = {}
    for client in (0, 1):
        alone = Federation(federation.method)
        alone.round([client])
        ends[client] = alone.server.public.coords
    federation.round([0, 1])
    after = federation.server.public.coords
    for name, block in after.items():
        torch.testing.assert_close(block, (ends[0][name] + ends[1][name]) / 2)
    space, base = federation.method.space, federation.first.base
    mean = sum(space.expand(base, {}, ends[i])["0.weight"] for i in (0, 1)) / 2
    assert not torch.allclose(federation.weights()["0.weight"], mean, atol=1e-4)


def test_private_factors_differ_between_clients_and_persist_over_rounds():
    schedule = tw.schedules.AllBlocks(private=("*/[txy]2",))
    federation = Federation(tw.Method(space=tw.spaces.FedPara(gamma=0.5, personal=True), schedule=schedule))
    federation.round([0, 1])
    private = {i: federation.states[i].unsent for i in (0, 1)}
    assert set(private[0]) == {f"{i}.weight/{part}2" for i in (0, 2) for part in "xy"}
    assert not same(private[0], private[1])
    federation.round([2, 3])
    federation.download(0)
    assert same(federation.states[0].unsent, private[0])
    for name in private[0]:  # the server never receives them
        assert torch.equal(federation.server.public.coords[name], federation.first.coords[name])


def test_expand_under_vmap_equals_single_calls_for_a_convolutional_network():
    model = cnn2(size=8)
    base = {name: p.detach() for name, p in model.named_parameters()}
    space = tw.spaces.FedPara(activation="tanh")
    points = [space.init(base, {}, Key(i)) for i in range(3)]
    together = torch.func.vmap(lambda c: space.expand(base, {}, c))(stack(points))
    for i, point in enumerate(points):
        for name, w in space.expand(base, {}, point).items():
            torch.testing.assert_close(unstack(together, i)[name], w)
    assert all_finite(together)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -0.1}, "gamma must be from 0 to 1"),
        ({"gamma": 1.5}, "gamma must be from 0 to 1"),
        ({"gamma": None}, "gamma must be a number"),
        ({"gamma": float("nan")}, "gamma must be from 0 to 1"),
        ({"rank": -1}, "rank must be 0 or more"),
        ({"rank": 2.5}, "rank must be a whole number"),
        ({"activation": "relu"}, "activation must be one of none, tanh"),
        ({"start": "zero"}, "start must be one of auto"),
        ({"personal": True, "activation": "tanh"}, "without an activation"),
        ({"scale": "paper"}, "scale must be one of unit, isometric, not 'paper'"),
        ({"dense": "head"}, "dense must be one of none, auto, not 'head'"),
        ({"scale": "isometric"}, "needs start = 'composed'"),
        ({"scale": "isometric", "start": "composed", "personal": True}, "personal = false"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as info:
        tw.spaces.FedPara(**options)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (tw.spaces.FedPara(rank=11), r"rank = 11 is above 10, the largest rank of 2.weight \[10, 12\]"),
        (
            tw.spaces.FedPara(target_modules=("conv*",)),
            "target_modules 'conv.' matches no block; the blocks are 0.weight, 2.weight",
        ),
        (tw.spaces.FedPara(modules_to_save=("head.*",)), "modules_to_save 'head.*' matches no block"),
        (tw.spaces.FedPara(modules_to_save=("*",)), "leave no weight to factorize"),
    ],
    ids=repr,
)
def test_models_that_do_not_fit_are_refused(space, message):
    with pytest.raises(ConfigError, match=message):
        tw.simulate(perceptron(), [(torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64))], tw.Method(space=space))


def test_a_model_without_matrices_is_refused():
    clients = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(ConfigError, match=r"the weights are weight \[3\], bias \[3\]"):
        tw.simulate(nn.LayerNorm(3), clients, tw.Method(space=tw.spaces.FedPara()))


def test_weights_that_no_rank_makes_smaller_stay_dense_and_a_model_of_only_such_weights_is_refused():
    assert fedpara_rank((2, 64), 0.5) == 0
    weights = {"fc.weight": torch.zeros(32, 64), "head.weight": torch.ones(2, 64)}
    coords = tw.spaces.FedPara(gamma=0.5).init(weights, {}, KEY)
    assert torch.equal(coords["head.weight"], weights["head.weight"])
    with pytest.raises(ConfigError, match=r"none of these weights smaller: head.weight \[2, 64\]"):
        tw.spaces.FedPara(modules_to_save=("fc.*",)).check(Spec.of(weights))


# -- another gamma for some weights ------------------------------------------------------------------------------------


def test_gammas_set_the_rank_of_the_weights_that_they_match():
    """FedPara's ResNet18: the first two convolutions and the 1x1 ones have gamma 1, the others a small one."""
    weights = weights_of(resnet18)
    first, rest = ("conv.weight", "blocks.0.conv1.weight"), 0.1
    shortcuts = tuple(name for name, one in weights.items() if one.ndim == 4 and one.shape[2] == 1)
    space = tw.spaces.FedPara(gamma=rest, gammas=(((*first, *shortcuts), 1.0),), modules_to_save=("head.weight",))
    for name, rank in space.ranks(Spec.of(weights)).items():
        assert rank == fedpara_rank(weights[name].shape, 1.0 if name in (*first, *shortcuts) else rest), name
    assert len(shortcuts) == 3
    everywhere = [size(tw.spaces.FedPara(gamma=g, modules_to_save=("head.weight",)), weights) for g in (rest, 1.0)]
    assert everywhere[0] < size(space, weights) < everywhere[1]
    low = tw.spaces.LowRank(like_gamma=rest, like_gammas=space.gammas, modules_to_save=("head.weight",))
    assert size(space, weights) <= size(low, weights) < 1.02 * size(space, weights)


def test_the_first_rule_that_matches_applies_and_unknown_selectors_are_refused():
    spec = Spec.of({"a.weight": torch.zeros(64, 64), "b.weight": torch.zeros(64, 64)})
    ranks = tw.spaces.FedPara(gamma=0.0, gammas=(("a.*", 0.5), ("*", 1.0))).ranks(spec)
    assert ranks == {"a.weight": fedpara_rank((64, 64), 0.5), "b.weight": fedpara_rank((64, 64), 1.0)}
    for space in (tw.spaces.FedPara(gammas=(("c.*", 1.0),)), tw.spaces.LowRank(like_gammas=(("c.*", 1.0),))):
        with pytest.raises(ConfigError, match=r"gammas: selector 'c.\*' matches no block; the blocks are a.weight"):
            space.ranks(spec)
    with pytest.raises(ConfigError, match=r"gamma must be from 0 to 1, not 2\.0"):
        tw.spaces.FedPara(gammas=(("a.*", 2.0),))
    with pytest.raises(ConfigError, match="gammas must be pairs of selectors and a value, not 'a'"):
        tw.spaces.FedPara(gammas=("a",))
    with pytest.raises(ConfigError, match="selects nothing"):
        tw.spaces.FedPara(gammas=(((), 1.0),))


def test_gammas_are_read_from_files_and_left_out_of_names_while_there_are_none():
    rules = [{"on": ["fc1.weight"], "gamma": 1.0}]
    experiment = resolve("fedpara-paper", "digits", {"method.space.gammas": rules})
    assert experiment.method.space == tw.spaces.FedPara(activation="tanh", gammas=(("fc1.weight", 1.0),))
    assert from_table(loads(dumps(to_table(experiment)), "again")) == experiment
    assert "gammas" not in repr(tw.spaces.FedPara())
    assert "gammas" not in to_table(resolve("fedpara", "digits"))["method"]["space"]
    assert (
        eval(repr(experiment.method.space), {"FedPara": tw.spaces.FedPara, "GammaRule": GammaRule})
        == experiment.method.space
    )


def test_the_size_of_a_factor_does_not_change_a_network_with_weight_norm():
    """FedPara's LSTM: factors set directions, lengths are parameters of their own, as for dense weights."""
    model = lstm80(hidden=16, layers=1, weight_norm=True)
    base, codes = {name: one.detach() for name, one in model.named_parameters()}, torch.arange(12).reshape(2, 6)
    for space in (
        tw.spaces.FedPara(rank=4, modules_to_save=("head.weight",)),
        tw.spaces.LowRank(rank=4, modules_to_save=("head.*t",)),
    ):
        coords = space.init(base, {}, KEY)
        factors = [name for name in coords if "/x" in name]
        assert {name.partition("/")[0] for name in factors} == {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
        twice = {**coords, **{name: 2 * coords[name] for name in factors}}
        one, two = (functional_call(model, space.expand(base, {}, made), (codes,)) for made in (coords, twice))
        torch.testing.assert_close(one, two)
