"""LoRA: adapters, parameter counts and errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import thinwire as tw
from tests.federation import Federation, perceptron
from thinwire.core.key import Key
from thinwire.core.tree import Block, Spec, Tree, scale, sub, weighted_mean
from thinwire.data.task import pool_clients
from thinwire.errors import ConfigError
from thinwire.federation.sampler import Sampler
from thinwire.protocol import Method
from thinwire.protocol.setup import make_contract
from thinwire.runs.check import check
from thinwire.runs.config import resolve
from thinwire.spaces import LoRA
from thinwire.training import Local
from thinwire.training.functional import Functional

PRESETS = ("lora", "ffa-lora", "fa-lora", "fedsa-lora", "fedloru")
ALL_CLIENTS = range(6)


def random_coords(space: LoRA, base: Tree, basis: Tree, seed: int) -> Tree:
    """Coordinates with a B that is not zero."""
    initial = space.init(base, basis, Key(seed))
    return {name: block + 0.3 * Key(seed).fold(name).normal(*block.shape) for name, block in initial.items()}


# -- the adapter -------------------------------------------------------------------------------------------------------


def test_initial_a_is_kaiming_uniform_and_initial_b_is_zero():
    base = {"fc.weight": torch.zeros(40, 900)}
    coords = LoRA(rank=32).init(base, {}, Key(3))
    a = coords["fc.weight/a"]
    assert a.shape == (32, 900)
    assert not coords["fc.weight/b"].any()
    twin = nn.Linear(900, 32, bias=False).weight.detach()  # torch's own kaiming_uniform_(a=sqrt(5))
    assert a.abs().max() <= 1 / 30 + 1e-9
    assert twin.abs().max() <= 1 / 30 + 1e-9
    assert float(a.std()) == pytest.approx(float(twin.std()), rel=0.03)
    assert not torch.equal(a, LoRA(rank=32).init(base, {}, Key(4))["fc.weight/a"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("freeze_a", [False, True])
def test_coordinates_have_at_least_32_bits_and_weights_the_type_of_the_model(dtype, freeze_a):
    base = {"w": torch.ones(4, 6, dtype=dtype), "head": torch.ones(4, dtype=dtype)}
    space = LoRA(rank=2, freeze_a=freeze_a, modules_to_save=("head",))
    basis = space.basis(Spec.of(base), Key(0), None)
    coords = space.init(base, basis, Key(0))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {block.dtype for tree in (basis, coords) for block in tree.values()} == {expected}
    assert {block.dtype for block in space.expand(base, basis, coords).values()} == {dtype}
    unmerged = space.expand_unmerged(base, basis, coords)
    assert {name: unmerged[name].dtype for name in base} == dict.fromkeys(base, dtype)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_small_steps_on_a_model_of_16_bits_are_not_lost(backend):
    """Twenty client steps and one server step, each too small for bfloat16, against a loop with float32 factors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    x, y = torch.randn(80, 6).bfloat16(), torch.arange(80) % 3
    method = Method(
        LoRA(rank=2, alpha=2.0, modules_to_save=("2.bias",)),
        client_opt=tw.optimizers.SGD(2e-4),
        server_opt=tw.optimizers.SGD(0.5),
    )
    run = tw.simulate(net, [(x, y)], method, rounds=1, local=Local(batch=4), test=(x, y), backend=backend)
    base = {name: p.detach() for name, p in net.named_parameters()}
    first = make_contract(method, base, {}, Key(0).fold("run"))[1].coords
    mine = {name: block.clone().requires_grad_() for name, block in first.items()}

    def layer(at: str, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, base[f"{at}.weight"], bias)
        a, b = mine[f"{at}.weight/a"], mine[f"{at}.weight/b"]
        return (out + F.linear(F.linear(x.float(), a), b)).bfloat16()

    work = Sampler(Key(0), [0], 1, Local(batch=4), *pool_clients([(x, y)]), torch.device("cpu")).workload(0, (0,))
    for rows in work.index[0]:
        out = layer("2", torch.tanh(layer("0", x[rows], base["0.bias"])), mine["2.bias"].bfloat16())
        grads = torch.autograd.grad(F.cross_entropy(out, y[rows]), list(mine.values()))
        with torch.no_grad():
            for block, grad in zip(mine.values(), grads, strict=True):
                block -= 2e-4 * grad
    for name, block in mine.items():
        expected = first[name] + 0.5 * (block.detach() - first[name])
        change = float((expected - first[name]).abs().max())
        assert 0 < change < 1e-3
        assert float((run.coords[name] - expected).abs().max()) < 0.05 * change, name
    assert all(block.dtype == torch.bfloat16 for block in run.weights.values())


@pytest.mark.parametrize("freeze_a", [False, True])
@pytest.mark.parametrize("layer", ["linear", "conv", "grouped", "embedding", "conv1d of gpt-2"])
def test_merged_weights_equal_a_layer_with_an_unmerged_adapter(layer, freeze_a):
    torch.manual_seed(0)
    transposed = layer == "conv1d of gpt-2"
    space = LoRA(rank=3, alpha=5.0, freeze_a=freeze_a, fan_in_fan_out=("weight",) if transposed else ())
    s = 5.0 / 3
    module: nn.Module
    if layer == "linear":
        module, x = nn.Linear(7, 5), torch.randn(4, 7)
        adapter = lambda x, a, b: x @ a.T @ b.T  # noqa: E731
    elif layer == "conv":
        module, x = nn.Conv2d(4, 6, 3, stride=2, padding=1), torch.randn(2, 4, 9, 9)
        adapter = lambda x, a, b: F.conv2d(  # noqa: E731
            F.conv2d(x, a.view(3, 4, 3, 3), stride=2, padding=1), b[..., None, None]
        )
    elif layer == "grouped":
        module, x = nn.Conv2d(4, 6, 3, groups=2), torch.randn(2, 4, 9, 9)
        adapter = lambda x, a, b: F.conv2d(x, (b @ a).view(6, 2, 3, 3), groups=2)  # noqa: E731
    elif layer == "embedding":
        module, x = nn.Embedding(11, 6), torch.randint(0, 11, (4, 3))
        adapter = lambda x, a, b: b[x] @ a  # noqa: E731
    else:
        module, x = nn.Module(), torch.randn(4, 7)
        module.weight = nn.Parameter(torch.randn(7, 5))
        module.forward = lambda x: x @ module.weight
        adapter = lambda x, a, b: x @ a.T @ b.T  # noqa: E731
    base = {name: p.detach() for name, p in module.named_parameters()}
    basis = space.basis(Spec.of(base), Key(1), None)
    coords = random_coords(space, base, basis, 2)
    both = {**basis, **coords}
    merged = functional_call(module, space.expand(base, basis, coords), (x,))
    unmerged = module(x) + s * adapter(x, both["weight/a"], both["weight/b"])
    torch.testing.assert_close(merged, unmerged, rtol=1e-5, atol=1e-5)
    assert (merged - module(x)).abs().max() > 0.1


def test_a_step_with_frozen_a_projects_the_gradient_on_the_rows_of_a():
    """One full-batch step of SGD on B alone:  W <- W0 - lr s^2 G A^T A."""
    space = LoRA(rank=4, alpha=6.0, freeze_a=True)
    method = Method(space, client_opt=tw.optimizers.SGD(0.2))
    fed = Federation(method, local=Local(epochs=1, batch=0))
    task = fed.task
    model = Functional.of(task.model, task.loss)
    own = torch.from_numpy(task.clients.client(0))
    x, y = task.train.gather(own)
    weights = {name: w.requires_grad_() for name, w in model.weights().items()}
    loss, _ = model.loss(weights, {}, x, y, None)
    grads = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    basis = fed.contract.basis(0, "cpu")
    fed.round([0])
    for name, w in fed.weights().items():
        step = torch.zeros_like(w)
        if w.dim() == 2:
            a = basis[f"{name}/a"]
            step = 0.2 * (6.0 / 4) ** 2 * grads[name] @ a.T @ a
            assert step.abs().max() > 1e-4
        torch.testing.assert_close(w, weights[name].detach() - step, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("freeze_a", [False, True])
def test_averaging_is_exact_only_if_a_is_frozen(freeze_a):
    space = LoRA(rank=3, freeze_a=freeze_a)
    base = Functional.of(perceptron()).weights()
    basis = space.basis(Spec.of(base), Key(1), None)
    clients, share = [random_coords(space, base, basis, i) for i in range(4)], [1.0, 2.0, 3.0, 4.0]
    of_mean = sub(space.expand(base, basis, weighted_mean(clients, share)), base)
    mean_of = sub(weighted_mean([space.expand(base, basis, one) for one in clients], share), base)
    gap = max(float((of_mean[name] - mean_of[name]).abs().max()) for name in base)
    size = max(float(block.abs().max()) for block in mean_of.values())
    assert gap < 1e-6 * size if freeze_a else gap > 1e-2 * size


# -- parameter counts --------------------------------------------------------------------------------------------------


def trained(space: LoRA, spec: Spec) -> int:
    space.check(spec)
    basis = space.basis(spec, Key(0), "meta")
    return Spec.of(space.init(spec.shapes(), basis, Key(0))).size


def transformer(attention: dict[str, tuple[int, int]]) -> Spec:
    """Twelve layers of width 768 with these attention matrices, and a head of ten classes."""
    blocks = [Block("embed.weight", (50257, 768))]
    for i in range(12):
        blocks += [Block(f"h.{i}.attn.{name}.weight", shape) for name, shape in attention.items()]
        blocks += [Block(f"h.{i}.mlp.weight", (3072, 768)), Block(f"h.{i}.norm.weight", (768,))]
    return Spec((*blocks, Block("head.weight", (10, 768)), Block("head.bias", (10,))))


def test_rank_16_on_two_attention_matrices_of_vit_has_the_published_number_of_parameters():
    vit = transformer(dict.fromkeys(("query", "key", "value"), (768, 768)))
    query_value = ("*.query.weight", "*.value.weight")
    assert trained(LoRA(rank=16, target_modules=query_value), vit) == 589_824
    assert trained(LoRA(rank=16, target_modules=query_value, modules_to_save=("head.*",)), vit) == 597_514


def test_rank_16_on_the_fused_attention_matrix_of_gpt2_has_the_published_number_of_parameters():
    gpt2 = transformer({"c_attn": (768, 2304)})
    fused = LoRA(rank=16, target_modules=("*c_attn.weight",), fan_in_fan_out=("*c_attn.weight",))
    assert trained(fused, gpt2) == 589_824
    shapes = Spec.of(fused.init(gpt2.shapes(), {}, Key(0))).restrict({"h.0.attn.c_attn.weight/a"})
    assert shapes.blocks[0].shape == (16, 768)  # A is applied to the input
    frozen = LoRA(rank=16, target_modules=("*c_attn.weight",), fan_in_fan_out=("*c_attn.weight",), freeze_a=True)
    assert trained(frozen, gpt2) == 12 * 16 * 2304


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be 1 or more, not 0"),
        ({"rank": -3}, "rank must be 1 or more"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"alpha": -1.0}, "alpha must be above 0"),
        ({"alpha": math.nan}, "alpha must be above 0"),
        ({"redraw_every": -1}, "redraw_every must be 0"),
        ({"target_modules": ()}, "target_modules selects nothing"),
        ({"scaling": "peft"}, "scaling must be one of standard, rslora, not 'peft'"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights must be one of kaiming, isometric, orthonormal, not 'g"),
        ({"dense": "head"}, "dense must be one of none, auto, not 'head'"),
        ({"target_modules": ("attn*",)}, "target_modules 'attn*' matches no block; the blocks are 0.weight, 2.weight"),
        ({"target_modules": ("*.bias",)}, "target_modules '*.bias' matches no block"),
        ({"modules_to_save": ("classifier.*",)}, "modules_to_save 'classifier.*' matches no block"),
        ({"modules_to_save": ("*",)}, "leaves no matrix"),
        ({"fan_in_fan_out": ("c_attn",)}, "fan_in_fan_out 'c_attn' matches no block"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(options, message):
    with pytest.raises(ConfigError) as error:
        LoRA(**options).check(Spec.of(Functional.of(perceptron()).weights()))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_without_a_matrix_is_refused():
    with pytest.raises(ConfigError, match="no matrix"):
        LoRA().check(Spec.of({"bias": torch.zeros(3)}))


def test_a_rank_above_that_of_a_matrix_is_that_of_the_matrix_and_check_says_so():
    base = {"fc.weight": torch.zeros(40, 30), "fc.bias": torch.zeros(40), "head.weight": torch.zeros(3, 40)}
    space = LoRA(rank=8, alpha=16.0)
    coords = space.init(base, {}, Key(0))
    assert {name: tuple(block.shape) for name, block in coords.items()} == {
        "fc.weight/a": (8, 30),
        "fc.weight/b": (40, 8),
        "head.weight/a": (3, 40),
        "head.weight/b": (3, 3),
    }
    assert space.note(Spec.of(base)) == "LoRA has rank 8, but for smaller matrices: head.weight 3."
    ones = {name: torch.ones_like(block) for name, block in coords.items()}
    made = space.expand(base, {}, ones)
    assert float(made["fc.weight"][0, 0]) == 8 * 2.0
    assert float(made["head.weight"][0, 0]) == 3 * 2.0  # alpha / rank is that of the other matrices
    facts = check(resolve("lora", overrides={"method.space.rank": 16, "method.space.dense": "none", "rounds": 1}))
    assert "LoRA has rank 16, but for smaller matrices: head.weight 10." in facts["note"]


def test_small_matrices_and_the_head_are_trained_without_an_adapter():
    net = nn.ModuleDict(
        {
            "conv": nn.Conv1d(1, 6, 5),
            "gru": nn.GRU(6, 24),
            "norm": nn.LayerNorm(24),
            "fc": nn.Linear(24, 30),
            "head": nn.Linear(30, 5),
        }
    )
    spec = Spec.of({name: p.detach() for name, p in net.named_parameters()})
    space = LoRA(rank=4, dense="auto")
    names = list(space.init(spec.shapes(), {}, Key(0)))
    adapted = ["gru.weight_ih_l0", "gru.weight_hh_l0", "fc.weight"]
    assert [name for name in names if "/" in name] == [f"{name}/{side}" for name in adapted for side in "ab"]
    assert [name for name in names if "/" not in name] == ["conv.weight", "conv.bias", "head.weight", "head.bias"]
    assert space.note(spec) == "Trained without an adapter: conv.weight, head.weight."
    # a language model's head has more outputs than inputs, so it gets an adapter
    words = Spec.of({"fc.weight": torch.zeros(30, 24), "words.weight": torch.zeros(100, 30)})
    assert all("/" in name for name in space.init(words.shapes(), {}, Key(0)))
    # only matrices that target_modules selects
    assert not any(
        "head" in name for name in LoRA(2, target_modules=("fc.*",), dense="auto").init(spec.shapes(), {}, Key(0))
    )


def test_a_model_too_small_for_adapters_is_trained_without():
    clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    run = tw.simulate(nn.Linear(4, 2), clients, tw.methods.lora(), rounds=2)
    dense = tw.simulate(nn.Linear(4, 2), clients, tw.Method(), rounds=2)
    assert set(run.coords) == set(dense.coords) == {"weight", "bias"}


@pytest.mark.parametrize("scaling", ["standard", "rslora"])
@pytest.mark.parametrize(("rank", "alpha"), [(2, 8.0), (5, 1.0), (9, 3.0)])
def test_with_an_isometric_a_a_step_of_b_has_the_mean_of_fedavgs(rank, alpha, scaling):
    """s^2 E[A^T A] = I, also for a rank that the matrix lowers to its 7 outputs."""
    space = LoRA(rank, alpha, scaling=scaling, init_lora_weights="isometric", freeze_a=True)
    spec = Spec.of({"w": torch.zeros(7, 12)})
    assert space.scale == pytest.approx(alpha / (rank if scaling == "standard" else rank**0.5))
    draws = torch.stack([space.basis(spec, Key(i), None)["w/a"] for i in range(400)])
    products = space.scale**2 * draws.mT @ draws
    assert bool(((products.mean(0) - torch.eye(12)).abs() <= 5 * products.std(0) / 20).all())


def test_the_adapter_is_proportional_to_alpha():
    base = Functional.of(perceptron()).weights()
    coords = random_coords(LoRA(rank=4), base, {}, 0)
    one, two = (sub(LoRA(rank=4, alpha=alpha).expand(base, {}, coords), base) for alpha in (4.0, 8.0))
    for name in base:
        torch.testing.assert_close(two[name], scale(one, 2.0)[name], rtol=1e-5, atol=1e-6)


class Conv1D(nn.Module):
    """A layer that stores its matrix as inputs x outputs, as that of transformers, which is found by its name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))


def test_a_space_is_completed_by_the_layers_of_a_model_and_says_what_it_exports():
    model = nn.ModuleDict({"fc": Conv1D(), "out": nn.Linear(4, 3)})
    space = LoRA(rank=2, lora_dropout=0.25).for_model(model)
    assert space.fan_in_fan_out == ("fc.weight",)
    assert (space.adapter_dropout, tw.spaces.Full().adapter_dropout) == (0.25, 0.0)
    assert tw.spaces.Full().for_model(model) == tw.spaces.Full()
    base = {name: p.detach() for name, p in model.named_parameters()}
    for one in (space, tw.spaces.LoRASB(rank=2, target_modules=("out.weight",))):
        basis = one.basis_from(base, Key(0), "cpu")
        coords = {name: torch.randn_like(block) for name, block in one.init(base, basis, Key(0)).items()}
        lora, same = one.exported(basis, coords)
        assert one.exports_adapter
        for name, weight in one.expand(base, basis, coords).items():
            assert torch.equal(lora.expand(base, basis, same)[name], weight)
    with pytest.raises(tw.IncompatibleParts, match="Full has no adapters to export"):
        tw.spaces.Full().exported({}, {})
