"""Weights as products of two low-rank ones, number by number."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn import functional as F

import thinwire as tw
from tests.federation import Federation, digits_task, perceptron
from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, all_finite, same, unstack
from thinwire.errors import ConfigError
from thinwire.models.cnn import cnn2
from thinwire.models.lstm import lstm80
from thinwire.models.mlp import two_fc
from thinwire.models.resnet import resnet18
from thinwire.models.vgg import vgg16_gn
from thinwire.protocol.setup import make_contract
from thinwire.spaces.fedpara import fedpara_bounds, fedpara_rank, fedpara_size
from thinwire.testing import check_space

KEY = Key(3)
CONVOLUTIONS = ("features.*",)  # of VGG16; the paper leaves its linear layers as they are


def weights_of(make, **options) -> Tree:
    """Only the shapes of a model's weights: no memory, no time."""
    with torch.device("meta"):
        return {name: p.detach() for name, p in make(**options).named_parameters()}


def size(space, weights: Tree) -> int:
    return Spec.of(space.init(weights, {}, KEY)).size


def composed(space, *shape: int) -> torch.Tensor:
    base = {"w": torch.zeros(shape, dtype=torch.float64)}  # rounding has full rank: keep it far below the rest
    return space.expand(base, {}, space.init(base, {}, KEY))["w"]


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        tw.FedPara(),
        tw.FedPara(gamma=0.5, activation="tanh"),
        tw.FedPara(gamma=1.0, personal=True),
        tw.FedPara(rank=2, start="factor_he", modules_to_save=("head.*",)),
        tw.FedPara(rank=2, start="composed_he", target_modules=("conv*",)),
    ],
    ids=repr,
)
def test_keeps_the_contract_of_a_space(space):
    check_space(space, starts_at_base=False)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_takes_convolutions_of_any_dimension(dims):
    weights = {"conv.weight": torch.zeros(6, 5, *(3,) * dims), "conv.bias": torch.ones(6)}
    check_space(tw.FedPara(rank=2), weights, starts_at_base=False)
    assert tw.FedPara(rank=2).init(weights, {}, KEY)["conv.weight/t1"].shape == (2, 2, *(3,) * dims)


def test_names_of_the_coordinates():
    weights = {"conv.weight": torch.zeros(8, 8, 3, 3), "fc.weight": torch.zeros(8, 8), "fc.bias": torch.zeros(8)}
    names = list(tw.FedPara(rank=2).init(weights, {}, KEY))
    kernel = [f"conv.weight/{part}{j}" for j in "12" for part in "txy"]
    assert names == [*kernel, *(f"fc.weight/{part}{j}" for j in "12" for part in "xy"), "fc.bias"]


def test_first_factors_depend_on_key_and_shapes_only_and_dense_weights_start_at_the_base():
    space = tw.FedPara(rank=2)
    one = {"fc.weight": torch.zeros(6, 4), "fc.bias": torch.ones(6)}
    two = {"fc.weight": torch.randn(6, 4), "fc.bias": torch.full((6,), 2.0)}
    a, b = space.init(one, {}, KEY), space.init(two, {}, KEY)
    assert all(torch.equal(a[name], b[name]) for name in a if "/" in name)
    assert torch.equal(b["fc.bias"], two["fc.bias"])
    assert not torch.equal(a["fc.weight/x1"], space.init(one, {}, Key(4))["fc.weight/x1"])
    assert not torch.equal(a["fc.weight/x1"][:4], a["fc.weight/y1"])


def test_double_precision_stays_double():
    base = {"w": torch.zeros(6, 4, dtype=torch.float64)}
    coords = tw.FedPara(rank=2).init(base, {}, KEY)
    assert {block.dtype for block in coords.values()} == {torch.float64}


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "reached"), [(10, 100), (7, 49)])
def test_rank_of_the_product_is_the_square(rank, reached):
    w = composed(tw.FedPara(rank=rank), 100, 100)
    assert int(torch.linalg.matrix_rank(w)) == reached


def test_full_rank_at_gamma_zero_where_low_rank_has_twice_the_rank_only():
    assert fedpara_rank((256, 256), 0.0) == 16
    assert int(torch.linalg.matrix_rank(composed(tw.FedPara(gamma=0.0), 256, 256))) == 256


@pytest.mark.parametrize(("o", "i", "rank", "ranks"), [(24, 10, 4, (16, 10)), (30, 30, 3, (9, 9))])
def test_unfoldings_of_a_kernel_have_at_most_the_squared_rank(o, i, rank, ranks):
    w = composed(tw.FedPara(rank=rank), o, i, 3, 3)
    outs = int(torch.linalg.matrix_rank(w.reshape(o, -1)))
    ins = int(torch.linalg.matrix_rank(w.transpose(0, 1).reshape(i, -1)))
    assert (outs, ins) == ranks
    assert max(ranks) <= rank**2


def test_bounds_are_the_least_and_the_largest_rank_by_trying_all():
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
    built = [size(tw.FedPara(gamma=g / 10, target_modules=CONVOLUTIONS), weights) for g in range(1, 10)]
    assert built == sizes


def test_ranks_of_vgg16():
    spec = Spec.of(weights_of(vgg16_gn))
    ranks = {g: list(tw.FedPara(gamma=g, target_modules=CONVOLUTIONS).ranks(spec).values()) for g in (0.1, 0.5)}
    assert ranks[0.1] == [2, 11, 13, 18, 22, 30, 30, 36, *[52] * 5]
    assert ranks[0.5] == [4, 23, 31, 44, 60, 85, 85, 116, *[166] * 5]


@pytest.mark.parametrize(("gamma", "built"), [(0.1, 1000778), (0.6, 5303132), (0.9, 9432386)])
def test_size_of_resnet18_with_its_first_and_smallest_kernels_at_gamma_one(gamma, built):
    weights = weights_of(resnet18)
    kernels = [name for name, w in weights.items() if w.dim() == 4]
    large = {name for name in kernels if weights[name].shape[-1] == 1} | set(kernels[:2])
    one, some = tw.FedPara(gamma=1.0), tw.FedPara(gamma=gamma)
    ranks = {name: (one if name in large else some).ranks(Spec.of(weights))[name] for name in kernels}
    sizes = [fedpara_size(w.shape, ranks[name]) if name in ranks else w.numel() for name, w in weights.items()]
    assert sum(sizes) == built


def test_size_of_the_memory_network_with_its_stacked_gates():
    weights, space = weights_of(lstm80), tw.FedPara(gamma=0.0, modules_to_save=("head.*",))
    assert list(space.ranks(Spec.of(weights)).values()) == [3, 16, 16, 16]  # the embedding is left alone
    assert size(space, weights) == 154368
    assert round(154368 / Spec.of(weights).size, 3) == 0.188


def test_an_embedding_is_taken_apart_only_if_a_selector_means_it():
    spec = Spec.of(weights_of(lstm80))
    assert "embedding.weight" not in tw.FedPara().ranks(spec)
    assert list(tw.FedPara(gamma=0.5, target_modules=("embedding.*",)).ranks(spec)) == ["embedding.weight"]


@pytest.mark.parametrize(("classes", "sent", "ratio"), [(62, 63646, 3.41), (10, 59570, 3.42)])
def test_personal_half_of_two_linear_layers_stays_at_home(classes, sent, ratio):
    method = tw.Method(space=tw.FedPara(gamma=0.5, personal=True), schedule=tw.AllBlocks(private=("*/[txy]2",)))
    weights = {name: p.detach() for name, p in two_fc(classes).named_parameters()}
    contract, _ = make_contract(method, weights, {}, KEY)
    assert contract.sendable.size == sent
    assert round(Spec.of(weights).size / sent, 2) == ratio


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_composed_kernel_convolves_as_the_sum_in_the_paper(activation):
    space, base = tw.FedPara(rank=3, activation=activation), {"w": torch.zeros(6, 5, 3, 3)}
    coords = space.init(base, {}, KEY)
    halves = []
    for j in "12":
        t, x, y = (coords[f"w/{part}{j}"] for part in "txy")
        halves.append(sum(t[a, b] * torch.outer(x[:, a], y[:, b])[..., None, None] for a in range(3) for b in range(3)))
    if activation == "tanh":
        halves = [half.tanh() for half in halves]
    picture = KEY.fold("picture").normal(2, 5, 8, 8)
    made = F.conv2d(picture, space.expand(base, {}, coords)["w"])
    torch.testing.assert_close(made, F.conv2d(picture, halves[0] * halves[1]), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_corrected_equation_six():
    space, base = tw.FedPara(rank=3), {"w": torch.zeros(6, 5)}
    coords = space.init(base, {}, KEY)
    j = KEY.fold("J").normal(6, 5)  # the gradient of the loss by W
    x1, y1, x2, y2 = (coords[f"w/{part}"] for part in ("x1", "y1", "x2", "y2"))
    slopes = grad(lambda c: (space.expand(base, {}, c)["w"] * j).sum())(coords)
    j1, j2 = j * (x2 @ y2.T), j * (x1 @ y1.T)
    for name, expected in {"x1": j1 @ y1, "y1": j1.T @ x1, "x2": j2 @ y2, "y2": j2.T @ x2}.items():
        torch.testing.assert_close(slopes[f"w/{name}"], expected)


@pytest.mark.parametrize("shape", [(300, 200), (64, 48, 3, 3)])
@pytest.mark.parametrize("personal", [False, True])
def test_weights_start_at_their_usual_size(shape, personal):
    w = composed(tw.FedPara(gamma=0.3, personal=personal, start="composed_he"), *shape)
    usual = (2 / torch.Size(shape[1:]).numel()) ** 0.5
    assert 0.8 < float(w.std()) / usual < 1.25


LAYERS = {
    "linear": (lambda: torch.nn.Linear(300, 200), "weight"),
    "conv": (lambda: torch.nn.Conv2d(64, 96, 3), "weight"),
    "input gates": (lambda: torch.nn.LSTM(64, 128), "weight_ih_l0"),
    "state gates": (lambda: torch.nn.LSTM(64, 128), "weight_hh_l0"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"activation": "tanh"}, {"personal": True}, {"rank": 8, "activation": "tanh"}, {"lowrank": True}],
    ids=str,
)
@pytest.mark.parametrize("start", ["composed", "composed_he"])
def test_composed_weights_start_at_the_size_that_is_said(layer, settings, start):
    """Within four percent, of one draw: of the dense weight, or of He's rule, with and without tanh."""
    make, name = LAYERS[layer]
    torch.manual_seed(0)
    base = {key: p.detach() for key, p in make().named_parameters()}
    if settings.get("lowrank"):
        space = tw.LowRank(start=start)
    else:
        space = tw.FedPara(start=start, **{"gamma": 0.2, **settings})
    made = space.expand(base, {}, space.init(base, {}, KEY))[name]
    goal = float(base[name].std()) if start == "composed" else (2 / base[name][0].numel()) ** 0.5
    assert float(made.std()) == pytest.approx(goal, rel=0.04)


@pytest.mark.parametrize("space", [tw.FedPara(rank=16, activation="tanh"), tw.LowRank()], ids=["tanh", "low"])
def test_gates_of_recurrent_layers_start_where_dense_ones_do(space):
    """Of a network that reads letters: He's rule would make the gates of eight inputs fourteen times as large."""
    base = {key: p.detach() for key, p in torch.nn.LSTM(64, 256).named_parameters()}
    made = space.expand(base, {}, space.init(base, {}, KEY))
    for name in ("weight_ih_l0", "weight_hh_l0"):
        assert float(made[name].std() / base[name].std()) == pytest.approx(1, rel=0.05)
    letters = {key: p.detach() for key, p in torch.nn.LSTM(8, 256).named_parameters()}
    made = tw.LowRank(rank=4).expand(letters, {}, tw.LowRank(rank=4).init(letters, {}, KEY))
    assert float(made["weight_ih_l0"].std() / letters["weight_ih_l0"].std()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("start", ["auto", "factor_he", "composed_he", "composed"])
def test_low_rank_starts_as_fedpara_does(start, norms):
    """One setting and one default for both: by factor where norms follow, else composed."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3), *([torch.nn.GroupNorm(4, 64)] if norms else []))
    base = {key: p.detach() for key, p in net.named_parameters()}
    one, two = tw.FedPara(gamma=0.2, start=start), tw.LowRank(like_gamma=0.2, start=start)
    a, b = (space.expand(base, {}, space.init(base, {}, KEY))["0.weight"] for space in (one, two))
    goal = {"composed_he": (2 / (32 * 9)) ** 0.5, "composed": float(base["0.weight"].std())}
    small = start == "factor_he" or (start == "auto" and norms)
    for made, parts in ((a, 2), (b, 1)):
        # by factor: core, X and Y by He's rule each, sqrt(8 R / (9 O I)) in all
        rank = (one if parts == 2 else two).ranks(Spec.of(base))["0.weight"]
        expected = (8 * rank / (9 * 64 * 32)) ** (parts / 2) if small else goal.get(start, goal["composed_he"])
        assert float(made.std()) == pytest.approx(expected, rel=0.15)
    assert tw.FedPara().start == tw.LowRank().start == "auto"
    with pytest.raises(ConfigError, match="start must be one of auto, factor_he, composed_he, composed, not 'zero'"):
        tw.LowRank(start="zero")


def test_both_ends_find_the_same_first_size():
    """The size of a dense weight is a sum of whole numbers: no order of adding changes it."""
    from thinwire.spaces.factors import first_std

    weight = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 0.037
    sizes = {first_std("w", part, "composed") for part in (weight, weight.flip(0), weight.T.contiguous().T)}
    assert len(sizes) == 1
    assert sizes.pop() == pytest.approx(float(weight.double().std(correction=0)), rel=1e-5)


def test_weights_start_small_by_factor_and_only_where_norms_follow():
    kernel = {"conv.weight": torch.zeros(512, 512, 3, 3)}
    normed = {**kernel, "norm.weight": torch.ones(512), "fc.weight": torch.zeros(300, 300)}
    small, usual = 1.8e-4, 2.1e-2
    space = tw.FedPara(gamma=0.1)
    made = space.expand(normed, {}, space.init(normed, {}, KEY))
    assert abs(float(made["conv.weight"].std()) / small - 1) < 0.1
    assert abs(float(made["fc.weight"].std()) / (2 / 300) ** 0.5 - 1) < 0.25
    assert abs(float(composed(space, 512, 512, 3, 3).std()) / usual - 1) < 0.25


# -- in a round --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Switched(tw.FedPara):
    """pFedPara whose personal half is zero, where its gradient is zero too: it stays there."""

    def init(self, base, basis, key):
        coords = super().init(base, basis, key)
        return {name: torch.zeros_like(b) if name.endswith("2") else b for name, b in coords.items()}


@dataclass(frozen=True)
class Alike(tw.LowRank):
    """Low rank from where pFedPara's common half starts."""

    def init(self, base, basis, key):
        twin = tw.FedPara(rank=self.rank, personal=True).init(base, basis, key)
        return {name.removesuffix("1"): b for name, b in twin.items() if not name.endswith("2")}


def test_personal_half_at_zero_is_low_rank_averaging():
    task, rounds = digits_task(), 2
    one = Federation(
        tw.Method(space=Switched(rank=4, personal=True), schedule=tw.AllBlocks(private=("*/[xy]2",))), task
    )
    two = Federation(tw.Method(space=Alike(rank=4)), task)
    for _ in range(rounds):
        one.round([0, 1, 2])
        two.round([0, 1, 2])
    for name, w in one.weights().items():
        torch.testing.assert_close(w, two.weights()[name], rtol=1e-5, atol=1e-5)
    assert not torch.equal(one.weights()["0.weight"], one.weights(one.first)["0.weight"])


def test_the_server_averages_factors_and_not_weights():
    federation = Federation(tw.Method(space=tw.FedPara(rank=3), client_weight=tw.Uniform()))
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


def test_private_factors_differ_between_clients_and_outlast_rounds_without_them():
    schedule = tw.AllBlocks(private=("*/[txy]2",))
    federation = Federation(tw.Method(space=tw.FedPara(gamma=0.5, personal=True), schedule=schedule))
    federation.round([0, 1])
    kept = {i: federation.states[i].unsent for i in (0, 1)}
    assert set(kept[0]) == {f"{i}.weight/{part}2" for i in (0, 2) for part in "xy"}
    assert not same(kept[0], kept[1])
    federation.round([2, 3])
    federation.download(0)
    assert same(federation.states[0].unsent, kept[0])
    for name in kept[0]:  # the server never learns them
        assert torch.equal(federation.server.public.coords[name], federation.first.coords[name])


def test_together_and_one_after_another_agree_on_a_convolutional_network():
    from thinwire.core.tree import stack

    model = cnn2(size=8)
    base = {name: p.detach() for name, p in model.named_parameters()}
    space = tw.FedPara(activation="tanh")
    points = [space.init(base, {}, Key(i)) for i in range(3)]
    together = torch.func.vmap(lambda c: space.expand(base, {}, c))(stack(points))
    for i, point in enumerate(points):
        for name, w in space.expand(base, {}, point).items():
            torch.testing.assert_close(unstack(together, i)[name], w)
    assert all_finite(together)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gamma": -0.1}, "gamma must be a number from 0 to 1"),
        ({"gamma": 1.5}, "gamma must be a number from 0 to 1"),
        ({"gamma": None}, "gamma must be a number from 0 to 1"),
        ({"gamma": float("nan")}, "gamma must be a number from 0 to 1"),
        ({"rank": -1}, "rank must be a whole number"),
        ({"rank": 2.5}, "rank must be a whole number"),
        ({"activation": "relu"}, "activation must be one of none, tanh"),
        ({"start": "zero"}, "start must be one of auto"),
        ({"personal": True, "activation": "tanh"}, "without an activation"),
    ],
)
def test_settings_that_cannot_be(options, says):
    with pytest.raises(ConfigError, match=says) as info:
        tw.FedPara(**options)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (tw.FedPara(rank=11), r"rank = 11 is above the 10 that 2.weight \[10, 12\] can have"),
        (tw.FedPara(target_modules=("conv*",)), "layers 'conv.' matches no block; the blocks are 0.weight, 2.weight"),
        (tw.FedPara(modules_to_save=("head.*",)), "dense 'head.*' matches no block"),
        (tw.FedPara(modules_to_save=("*",)), "leave no weight to take apart"),
    ],
    ids=repr,
)
def test_models_that_do_not_fit(space, says):
    with pytest.raises(ConfigError, match=says):
        tw.simulate(perceptron(), [(torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64))], tw.Method(space=space))


def test_a_model_without_matrices_is_refused_by_naming_its_weights():
    clients = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(ConfigError, match=r"the weights are weight \[3\], bias \[3\]"):
        tw.simulate(nn.LayerNorm(3), clients, tw.Method(space=tw.FedPara()))


def test_weights_that_no_rank_makes_smaller_stay_dense_and_a_model_of_such_is_refused():
    assert fedpara_rank((2, 64), 0.5) == 0
    weights = {"fc.weight": torch.zeros(32, 64), "head.weight": torch.ones(2, 64)}
    coords = tw.FedPara(gamma=0.5).init(weights, {}, KEY)
    assert torch.equal(coords["head.weight"], weights["head.weight"])
    with pytest.raises(ConfigError, match=r"none of these weights smaller: head.weight \[2, 64\]"):
        tw.FedPara(modules_to_save=("fc.*",)).check(Spec.of(weights))
