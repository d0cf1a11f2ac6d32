"""Initial factors of FedPara and LowRank: the standard deviation of the weights that they make."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call

import thinwire as tw
from tests.spaces.test_fedpara import KEY, composed
from thinwire.core.tree import Spec
from thinwire.errors import ConfigError
from thinwire.spaces.factors import initial_std


@pytest.mark.parametrize("shape", [(300, 200), (64, 48, 3, 3)])
@pytest.mark.parametrize("personal", [False, True])
def test_initial_weights_have_the_std_of_he(shape, personal):
    w = composed(tw.spaces.FedPara(gamma=0.3, personal=personal, start="composed_he"), *shape)
    he = (2 / torch.Size(shape[1:]).numel()) ** 0.5
    assert 0.8 < float(w.std()) / he < 1.25


LAYERS = {
    "linear": (lambda: torch.nn.Linear(300, 200), "weight"),
    "conv": (lambda: torch.nn.Conv2d(64, 96, 3), "weight"),
    "state gates": (lambda: torch.nn.LSTM(64, 128), "weight_hh_l0"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "settings", [{"rank": 8, "activation": "tanh"}, {"personal": True}, {"lowrank": True}], ids=str
)
@pytest.mark.parametrize("start", ["composed", "composed_he"])
def test_composed_weights_have_the_given_std(layer, settings, start):
    """Within four percent: the std of the dense weight, or of He's rule, with and without tanh."""
    make, name = LAYERS[layer]
    torch.manual_seed(0)
    base = {key: p.detach() for key, p in make().named_parameters()}
    if settings.get("lowrank"):
        space = tw.spaces.LowRank(start=start)
    else:
        space = tw.spaces.FedPara(start=start, **{"gamma": 0.2, **settings})
    made = space.expand(base, {}, space.init(base, {}, KEY))[name]
    goal = float(base[name].std()) if start == "composed" else (2 / base[name][0].numel()) ** 0.5
    assert float(made.std()) == pytest.approx(goal, rel=0.04)


@pytest.mark.parametrize(
    "space", [tw.spaces.FedPara(rank=16, activation="tanh"), tw.spaces.LowRank()], ids=["tanh", "low"]
)
def test_gates_of_recurrent_layers_have_the_std_of_dense_gates(space):
    """By He's rule, gates with eight inputs would be fourteen times as large."""
    base = {key: p.detach() for key, p in torch.nn.LSTM(64, 256).named_parameters()}
    made = space.expand(base, {}, space.init(base, {}, KEY))
    for name in ("weight_ih_l0", "weight_hh_l0"):
        assert float(made[name].std() / base[name].std()) == pytest.approx(1, rel=0.05)
    letters = {key: p.detach() for key, p in torch.nn.LSTM(8, 256).named_parameters()}
    made = tw.spaces.LowRank(rank=4).expand(letters, {}, tw.spaces.LowRank(rank=4).init(letters, {}, KEY))
    assert float(made["weight_ih_l0"].std() / letters["weight_ih_l0"].std()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("start", ["auto", "factor_he", "composed_he", "composed"])
def test_low_rank_has_the_initialization_of_fedpara(start, norms):
    """Same option and default: by factor if the model has norms, else composed."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3), *([torch.nn.GroupNorm(4, 64)] if norms else []))
    base = {key: p.detach() for key, p in net.named_parameters()}
    one, two = tw.spaces.FedPara(gamma=0.2, start=start), tw.spaces.LowRank(like_gamma=0.2, start=start)
    a, b = (space.expand(base, {}, space.init(base, {}, KEY))["0.weight"] for space in (one, two))
    goal = {"composed_he": (2 / (32 * 9)) ** 0.5, "composed": float(base["0.weight"].std())}
    small = start == "factor_he" or (start == "auto" and norms)
    for made, parts in ((a, 2), (b, 1)):
        # by factor: core, X and Y by He's rule each, sqrt(8 R / (9 O I)) in all
        rank = (one if parts == 2 else two).ranks(Spec.of(base))["0.weight"]
        expected = (8 * rank / (9 * 64 * 32)) ** (parts / 2) if small else goal.get(start, goal["composed_he"])
        assert float(made.std()) == pytest.approx(expected, rel=0.15)
    assert tw.spaces.FedPara().start == tw.spaces.LowRank().start == "auto"
    with pytest.raises(ConfigError, match="start must be one of auto, factor_he, composed_he, composed, not 'zero'"):
        tw.spaces.LowRank(start="zero")


def test_initial_std_does_not_depend_on_the_order_of_values():
    """The std of a dense weight is computed from a sum of integers."""
    weight = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 0.037
    sizes = {initial_std("w", part, "composed") for part in (weight, weight.flip(0), weight.T.contiguous().T)}
    assert len(sizes) == 1
    assert sizes.pop() == pytest.approx(float(weight.double().std(correction=0)), rel=1e-5)


def test_initial_weights_are_small_by_factor_only_in_models_with_norms():
    kernel = {"conv.weight": torch.zeros(512, 512, 3, 3)}
    normed = {**kernel, "norm.weight": torch.ones(512), "fc.weight": torch.zeros(300, 300)}
    small, he = 1.8e-4, 2.1e-2
    space = tw.spaces.FedPara(gamma=0.1)
    made = space.expand(normed, {}, space.init(normed, {}, KEY))
    assert abs(float(made["conv.weight"].std()) / small - 1) < 0.1
    assert abs(float(made["fc.weight"].std()) / (2 / 300) ** 0.5 - 1) < 0.25
    assert abs(float(composed(space, 512, 512, 3, 3).std()) / he - 1) < 0.25


# -- biases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["auto", "factor_he", "composed_he", "composed"])
@pytest.mark.parametrize("make", [tw.spaces.FedPara, tw.spaces.LowRank])
def test_biases_of_factorized_layers_start_at_zero(make, start):
    net = nn.ModuleDict({"conv": nn.Conv2d(16, 32, 3), "norm": nn.GroupNorm(4, 32), "gru": nn.GRU(32, 24)})
    base = {name: p.detach() + 1 for name, p in net.named_parameters()}
    coords = make(start=start, modules_to_save=("gru.weight_ih_l0",)).init(base, {}, KEY)
    assert [name for name in base if "bias" in name and not coords[name].any()] == ["conv.bias", "gru.bias_hh_l0"]
    assert all(coords[name] is base[name] for name in ("norm.bias", "gru.bias_ih_l0"))


def normed(bias: bool) -> nn.Sequential:
    """Four convolutions, each before a group norm."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan, width in ((1, 64), (64, 64), (64, 64), (64, 64)):
        layers += [nn.Conv2d(fan, width, 3, padding=1, bias=bias), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def test_the_last_layer_depends_on_the_input_at_the_start():
    """The share of its energy that differs between inputs; with torch's biases it is far smaller."""
    net, seen = normed(bias=True), {}
    net[10].register_forward_hook(lambda module, inputs, output: seen.update(made=output))
    base = {name: p.detach() for name, p in net.named_parameters()}
    space = tw.spaces.FedPara(start="factor_he", activation="tanh", modules_to_save=("14.weight",))
    coords = space.init(base, {}, KEY)

    def share(point):
        functional_call(net, space.expand(base, {}, point), (KEY.normal(16, 1, 8, 8),))
        return float((seen["made"] - seen["made"].mean(0)).square().sum() / seen["made"].square().sum())

    usual = {name: base[name] for name in coords if name.endswith("bias")}
    assert 20 * share({**coords, **usual}) < share(coords)


def test_fedpara_as_printed_learns_at_the_printed_rate_without_biases_before_norms():
    """The authors' convolutions have none. Trained, they outgrow weights that are a hundred times too small."""
    inputs, targets = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(inputs, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(targets)
    clients = [(inputs[i:1500:10], targets[i:1500:10]) for i in range(10)]
    space = tw.spaces.FedPara(start="factor_he", activation="tanh", modules_to_save=("14.weight",))
    local, test = tw.Local(epochs=2, batch=16), (inputs[1500:], targets[1500:])
    run = tw.simulate(
        normed(bias=False), clients, tw.Method(space=space), rounds=4, cohort=5, test=test, lr=0.1, local=local
    )
    assert (
        max(record.accuracy or 0.0 for record in run.history) > 0.25
    )  # with biases that train: 0.11 for twenty rounds
