"""Tests of the models: published parameter counts, shapes, order of parameters, vmap, invalid arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from thinwire.core.registry import entries
from thinwire.core.tree import Tree, flatten, stack, unstack, weighted_mean
from thinwire.errors import ConfigError, UnknownName
from thinwire.models import LSTM, build, count

COUNTS: list[tuple[str, dict[str, Any], int]] = [
    ("cnn2", {}, 11_274),
    ("cnn-cifar", {}, 1_146_634),
    ("cnn-cifar4", {}, 855_882),
    ("femnist-cnn", {}, 6_603_710),
    ("mlp", {}, 4_810),
    ("mlp", {"hidden": 32}, 2_410),
    ("cnn", {}, 75_562),
    ("auto", {}, 4_810),
    ("auto", {"channels": 1, "height": 28, "width": 28}, 28_938),
    ("two-fc", {}, 203_530),
    ("two-fc", {"classes": 62}, 216_894),
    ("wrn16-4", {}, 2_854_420),
    ("wrn16-4", {"classes": 200}, 2_880_120),
    ("wrn16-4", {"norm": "bn_noaffine"}, 2_854_420),
    ("wrn16-4", {"norm": "none"}, 2_854_420),
    ("resnet20", {}, 272_762),
    ("resnet20", {"norm": "gn"}, 272_762),
    ("resnet18", {}, 11_173_962),
    ("resnet18", {"norm": "gn"}, 11_173_962),
    ("vgg16-gn", {}, 15_253_578),
    ("vgg16-gn", {"classes": 100}, 15_299_748),
    ("vgg16-gn", {"groups": 2, "dropout": 0.5}, 15_253_578),
    ("lstm-shakespeare", {}, 814_957),
    ("lstm-shakespeare", {"classes": 65}, 813_897),
    ("lstm80", {}, 819_920),
    ("lstm80", {"weight_norm": True}, 824_016),
    ("transformer-sent140", {}, 2_221_570),
]

# name, options, shape of a batch, and number of token ids (0: images)
CASES: list[tuple[str, dict[str, Any], tuple[int, ...], int]] = [
    ("cnn2", {}, (2, 1, 28, 28), 0),
    ("cnn2", {"classes": 47, "channels": 3, "size": 32}, (2, 3, 32, 32), 0),
    ("cnn-cifar", {"size": 16}, (2, 3, 16, 16), 0),
    ("cnn-cifar4", {"size": 16}, (2, 3, 16, 16), 0),
    ("femnist-cnn", {"size": 14}, (2, 1, 14, 14), 0),
    ("cnn", {"channels": 2, "height": 5, "width": 17}, (2, 2, 5, 17), 0),
    ("auto", {"classes": 2, "channels": 1, "height": 8, "width": 8}, (2, 1, 8, 8), 0),
    ("mlp", {}, (2, 8, 8), 0),
    ("mlp", {"inputs": 12}, (2, 12), 0),
    ("two-fc", {}, (2, 1, 28, 28), 0),
    ("wrn16-4", {}, (2, 3, 8, 8), 0),
    ("wrn16-4", {"norm": "none"}, (2, 3, 8, 8), 0),
    ("wrn16-4", {"norm": "bn_noaffine"}, (4, 3, 8, 8), 0),
    ("resnet20", {"norm": "gn"}, (2, 3, 16, 16), 0),
    ("resnet20", {}, (4, 3, 16, 16), 0),
    ("lstm-shakespeare", {}, (2, 6), 69),
    ("lstm80", {}, (2, 6), 80),
    ("lstm80", {"weight_norm": True, "hidden": 16}, (2, 6), 80),
    ("transformer-sent140", {"vocab": 300, "length": 12}, (2, 12), 300),
]
# too large to train here: one forward pass only
LARGE: list[tuple[str, dict[str, Any], tuple[int, ...], int]] = [
    ("vgg16-gn", {}, (1, 3, 32, 32), 0),
    ("vgg16-gn", {"classes": 100}, (1, 3, 64, 64), 0),
    ("resnet18", {"norm": "gn"}, (1, 3, 16, 16), 0),
]


def title(value: Any) -> str | None:
    return ",".join(f"{key}={v}" for key, v in value.items()) if isinstance(value, dict) else None


def batch(shape: tuple[int, ...], codes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if codes:
        return torch.randint(0, codes, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fresh(name: str, options: dict[str, Any], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(name, **options).double()


def weights(model: nn.Module) -> Tree:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "options", "expected"), COUNTS, ids=title)
def test_parameter_counts_equal_the_published_ones(name: str, options: dict[str, Any], expected: int) -> None:
    with torch.device("meta"):
        assert count(build(name, **options)) == expected


@pytest.mark.parametrize(("name", "options", "shape", "codes"), LARGE, ids=title)
def test_large_models_accept_their_images(
    name: str, options: dict[str, Any], shape: tuple[int, ...], codes: int
) -> None:
    with torch.device("meta"):
        model = build(name, **options)
        logits = model(batch(shape, codes).to("meta", torch.float32))
    assert logits.shape == (shape[0], model.head.bias.numel())


@pytest.mark.parametrize(("name", "options", "shape", "codes"), CASES, ids=title)
def test_gradients_under_vmap_equal_those_of_single_clients(
    name: str, options: dict[str, Any], shape: tuple[int, ...], codes: int
) -> None:
    model = fresh(name, options)
    clients = [weights(fresh(name, options, seed)) for seed in (1, 2)]
    buffers = [{k: b.detach().clone() for k, b in model.named_buffers()} for _ in clients]
    x = torch.stack([batch(shape, codes, seed) for seed in (3, 4)])
    y = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]])[:, : shape[0]]

    def loss(params: Tree, state: Tree, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**params, **state}, (x,)), y)

    together = vmap(grad(loss))(stack(clients), stack(buffers), x, y)
    for i, client in enumerate(clients):
        alone = grad(loss)(client, buffers[i], x[i], y[i])
        one = unstack(together, i)
        assert list(one) == list(alone)
        assert flatten(alone).abs().max() > 0
        torch.testing.assert_close(flatten(one), flatten(alone), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("name", "options", "shape", "codes"), CASES, ids=title)
def test_parameters_are_in_the_order_of_the_forward_pass_and_logits_have_a_column_per_class(
    name: str, options: dict[str, Any], shape: tuple[int, ...], codes: int
) -> None:
    model = fresh(name, options)
    called: list[str] = []
    owners: list[str] = []
    for path, part in model.named_modules():
        own = [key for key, _ in part.named_parameters(recurse=False)]
        if own:
            assert own.index("weight") < own.index("bias") if "bias" in own else True
            owners.append(path)
            part.register_forward_hook(lambda *_, path=path: called.append(path))
    logits = model(batch(shape, codes))
    assert logits.shape == (shape[0], list(model.parameters())[-1].numel())  # the last bias
    assert torch.isfinite(logits).all()
    assert called == [path for path in owners if path != "position"]  # used without a call


@pytest.mark.parametrize("name", ["cnn2", "cnn-cifar"])
def test_lecun_initialization_has_the_right_variance(name: str) -> None:
    for key, block in weights(fresh(name, {})).items():
        if key.endswith("bias"):
            assert not block.any()
        else:
            std = block[0].numel() ** -0.5
            assert abs(block.std().item() / std - 1) < 0.12
            assert block.abs().max().item() < 2.3 * std


def test_glorot_initialization_has_the_right_variance() -> None:
    torch.manual_seed(0)
    plain, glorot = build("resnet20"), build("resnet20", init="glorot")
    kernel = glorot.get_parameter("blocks.8.conv2.weight")  # 64 to 64 channels
    assert kernel.var().item() == pytest.approx(2 / (2 * 9 * 64), rel=0.05)
    assert not glorot.get_parameter("head.bias").any()
    assert plain.get_parameter("head.bias").any()


def test_one_bias_lstm_equals_torch_with_the_other_bias_zero() -> None:
    torch.manual_seed(0)
    theirs = nn.LSTM(8, 256, 2, batch_first=True)
    ours = LSTM(8, 256, layers=2)
    for key, block in theirs.named_parameters():
        if key.startswith("bias_ih"):
            nn.init.zeros_(block)
    ours.load_state_dict({k: b for k, b in theirs.state_dict().items() if not k.startswith("bias_ih")})
    x = torch.randn(3, 20, 8)
    torch.testing.assert_close(ours(x), theirs(x)[0][:, -1], rtol=0, atol=1e-5)
    ours(x).square().sum().backward()
    theirs(x)[0][:, -1].square().sum().backward()
    for key, block in ours.named_parameters():
        torch.testing.assert_close(block.grad, theirs.get_parameter(key).grad, rtol=1e-4, atol=1e-5)


def test_two_bias_lstm_loads_the_state_dict_of_torch() -> None:
    torch.manual_seed(0)
    theirs = nn.LSTM(8, 32, 2, batch_first=True)
    ours = LSTM(8, 32, layers=2, biases=2)
    ours.load_state_dict(theirs.state_dict())
    assert [k for k, _ in ours.named_parameters()] == [k for k, _ in theirs.named_parameters()]
    x = torch.randn(3, 20, 8)
    torch.testing.assert_close(ours(x), theirs(x)[0][:, -1], rtol=0, atol=1e-5)


def test_lstm_with_weight_norm_equals_that_of_torch() -> None:
    """`torch.nn.utils.parametrizations.weight_norm` on every matrix of nn.LSTM, and the same gradients."""
    ours, theirs = LSTM(8, 16, layers=2, biases=2, weight_norm=True), nn.LSTM(8, 16, 2, batch_first=True)
    for name in [name for name, block in theirs.named_parameters() if block.ndim == 2]:
        weight_norm(theirs, name)
    pairs = {}
    for name, block in ours.named_parameters():
        place = name if name.startswith("bias") else f"parametrizations.{name.replace('g_', 'weight_')}.original"
        place += "" if name.startswith("bias") else "0" if name.startswith("g_") else "1"
        pairs[name] = theirs.get_parameter(place)
        pairs[name].data.copy_(block.detach().reshape(pairs[name].shape))
    x = torch.randn(3, 20, 8)
    torch.testing.assert_close(ours(x), theirs(x)[0][:, -1], rtol=0, atol=1e-5)
    ours(x).square().sum().backward()
    theirs(x)[0][:, -1].square().sum().backward()
    for name, block in ours.named_parameters():
        torch.testing.assert_close(block.grad, pairs[name].grad.reshape(block.shape), rtol=1e-4, atol=1e-5)
    lengths = [ours._matrix(part).norm(dim=1) for part in ("ih_l0", "hh_l0")]
    for length, fan in zip(lengths, (8, 16), strict=True):
        torch.testing.assert_close(length.detach(), torch.full((64,), (fan / 48) ** 0.5))


@pytest.mark.parametrize(("biases", "normed"), [(1, False), (2, False), (2, True)])
def test_lstm_in_evaluation_equals_the_recurrence_of_training(biases: int, normed: bool) -> None:
    ours, x = LSTM(8, 32, layers=2, biases=biases, weight_norm=normed), torch.randn(5, 20, 8)
    trained = ours(x)
    with torch.no_grad():
        evaluated = ours(x)
    assert trained.requires_grad
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, trained.detach(), rtol=1e-5, atol=1e-6)


def test_lstm_initialization_is_uniform_as_in_torch() -> None:
    blocks = weights(LSTM(8, 256))
    assert all(block.abs().max() <= 1 / 16 for block in blocks.values())
    assert abs(flatten(blocks).std().item() * 16 * 3**0.5 - 1) < 0.01


def test_padding_does_not_change_the_logits() -> None:
    model = fresh("transformer-sent140", {"vocab": 50, "length": 12})
    short = torch.tensor([[5, 9, 3]])
    torch.testing.assert_close(model(F.pad(short, (0, 9))), model(short), rtol=0, atol=1e-9)


def test_an_empty_text_has_finite_gradients() -> None:
    model = fresh("transformer-sent140", {"vocab": 50, "length": 12})
    model(torch.zeros(1, 12, dtype=torch.int64)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_federated_averaging_trains_cnn2() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=28)[:800]
    y = torch.tensor(digits.target)[:800]
    torch.manual_seed(0)
    model = build("cnn2")
    public = weights(model)
    step = grad(lambda params, x, y: F.cross_entropy(functional_call(model, params, (x,)), y))
    for _ in range(4):
        locals_ = []
        for client in range(2):
            local = public
            for start in range(client * 320, client * 320 + 320, 32):
                g = step(local, x[start : start + 32], y[start : start + 32])
                local = {key: block - 0.1 * g[key] for key, block in local.items()}
            locals_.append(local)
        public = weighted_mean(locals_, [1.0, 1.0])
    predicted = functional_call(model, public, (x[640:],)).argmax(1)
    assert (predicted == y[640:]).float().mean() > 0.6


def test_dropout_can_be_disabled() -> None:
    def drops(**options: Any) -> int:
        with torch.device("meta"):
            return sum(isinstance(part, nn.Dropout) for part in build("vgg16-gn", **options).modules())

    assert drops(dropout=0.5) == 2
    assert drops() == 0


def test_models_with_group_norm_have_no_buffers() -> None:
    for name in ("wrn16-4", "vgg16-gn"):
        with torch.device("meta"):
            assert not list(build(name).buffers())


def test_all_models_are_registered_with_a_one_line_summary() -> None:
    table = entries("model")
    hub = {"pretrained", "causal-lm"}
    assert set(table) == {name for name, _, _ in COUNTS} | hub
    for entry in table.values():
        assert entry.doc.endswith(".")
        assert "\n" not in entry.doc


FOR_REGRESSION = ("auto", "mlp", "two-fc", "cnn", "cnn2", "cnn-cifar", "cnn-cifar4", "femnist-cnn")


@pytest.mark.parametrize("name", entries("model"))
def test_fewer_than_two_classes_are_refused(name: str) -> None:
    """One output is a regression, which the models for images and tables can do; a language model has a vocabulary."""
    why = "'classes'" if name == "causal-lm" else r"classes must be"
    one = [] if name in FOR_REGRESSION else [1]
    for classes in (*one, 0, -3, 2.5, "10", True):
        with pytest.raises(ConfigError, match=why):
            build(name, classes=classes)
    if name in FOR_REGRESSION:
        assert build(name, classes=1).head.bias.numel() == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cnn22", {}, "unknown model 'cnn22': did you mean 'cnn2'"),
        ("cnn2", {"clases": 3}, "unknown option of model 'cnn2' 'clases': did you mean 'classes'"),
        ("cnn2", {"size": 3}, "size must be 4 or more, not 3"),
        ("cnn-cifar4", {"size": 15}, "size must be 16 or more, not 15"),
        ("wrn16-4", {"norm": "bn"}, "norm must be one of gn, bn_noaffine, none, not 'bn'"),
        ("resnet20", {"norm": "layer"}, "norm must be one of bn, gn, not 'layer'"),
        ("resnet20", {"init": "he"}, "init must be one of torch, glorot, not 'he'"),
        ("resnet20", {"norm": "gn", "groups": 3}, "groups = 3: does not divide a layer of 16 channels"),
        ("vgg16-gn", {"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ("vgg16-gn", {"groups": 48}, "groups = 48: does not divide"),
        ("lstm80", {"embedding": 0}, "embedding must be 1 or more, not 0"),
        ("transformer-sent140", {"length": 0}, "length must be 1 or more, not 0"),
    ],
)
def test_invalid_options_are_refused_on_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError) as caught:
        build(name, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UnknownName) == message.startswith("unknown")


@pytest.mark.parametrize(
    ("name", "options", "shape", "message"),
    [
        ("cnn2", {}, (1, 1, 32, 32), "images of shape (1, 32, 32): this model takes (1, 28, 28); build"),
        ("mlp", {}, (1, 9, 9), "examples of shape (9, 9) in a model with inputs=64"),
        ("vgg16-gn", {}, (1, 3, 28, 28), "images of shape (3, 28, 28): this model takes (3, 32 or more"),
        ("resnet20", {}, (1, 1, 28, 28), "images of shape (1, 28, 28): this model takes (3, "),
        ("transformer-sent140", {}, (1, 41), "texts of 41 tokens in a model of length=40"),
    ],
)
def test_inputs_of_the_wrong_shape_are_refused(
    name: str, options: dict[str, Any], shape: tuple[int, ...], message: str
) -> None:
    with torch.device("meta"), pytest.raises(ConfigError) as caught:
        build(name, **options)(torch.zeros(shape))
    assert str(caught.value).startswith(message)
