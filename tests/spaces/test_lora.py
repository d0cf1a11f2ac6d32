"""LoRA and its federated relatives."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import thinwire as tw
from tests.federation import Federation, digits_task, perceptron, same_public
from thinwire.core.key import Key
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree, same, scale, sub, weighted_mean
from thinwire.data.task import pool_clients
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.experiments.build import build_job
from thinwire.experiments.config import resolve
from thinwire.protocol import Method
from thinwire.runtime.sampler import Sampler
from thinwire.schedules import AllBlocks
from thinwire.simulation.engine import LocalEngine
from thinwire.spaces import LoRA
from thinwire.testing import check_space
from thinwire.training import Local
from thinwire.training.functional import Functional

PRESETS = ("lora", "ffa-lora", "fa-lora", "fedsa-lora", "fedloru")
EVERYONE = range(6)


def random_coords(space: LoRA, base: Tree, basis: Tree, seed: int) -> Tree:
    """Coordinates away from the start, where B is not zero."""
    start = space.init(base, basis, Key(seed))
    return {name: block + 0.3 * Key(seed).fold(name).normal(*block.shape) for name, block in start.items()}


@pytest.mark.parametrize(
    "space",
    [
        LoRA(rank=2),
        LoRA(rank=3, alpha=1.0, target_modules=("fc.*", "head.*")),
        LoRA(rank=2, target_modules=("*", "!conv*"), modules_to_save=("*bias", "head.*", "scale")),
        LoRA(rank=2, freeze_a=True),
        LoRA(rank=2, redraw_every=1),
        LoRA(rank=1, redraw_every=3, freeze_a=True, modules_to_save=("norm.*",)),
        LoRA(rank=2, fan_in_fan_out=("fc.weight",)),
    ],
)
def test_the_contract_of_spaces_is_kept(space):
    check_space(space)


# -- what the correction is --------------------------------------------------------------------------------------------


def test_the_first_a_is_kaiming_uniform_and_the_first_b_is_zero():
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("freeze_a", [False, True])
def test_corrections_have_at_least_32_bits_and_weights_their_own_type(dtype, freeze_a):
    base = {"w": torch.ones(4, 6, dtype=dtype), "head": torch.ones(4, dtype=dtype)}
    space = LoRA(rank=2, freeze_a=freeze_a, modules_to_save=("head",))
    basis = space.basis(Spec.of(base), Key(0), None)
    coords = space.init(base, basis, Key(0))
    own = torch.float64 if dtype == torch.float64 else torch.float32
    assert {block.dtype for tree in (basis, coords) for block in tree.values()} == {own}
    assert {block.dtype for block in space.expand(base, basis, coords).values()} == {dtype}
    patches = space.expand_unmerged(base, basis, coords)
    assert {name: patches[name].dtype for name in base} == dict.fromkeys(base, dtype)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_small_steps_on_a_model_of_16_bits_are_not_lost(how):
    """Twenty steps and the server's, each too small for eight bits, as by hand with factors in float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    x, y = torch.randn(80, 6).bfloat16(), torch.arange(80) % 3
    method = Method(
        LoRA(rank=2, alpha=2.0, modules_to_save=("2.bias",)), client_opt=tw.SGD(2e-4), server_opt=tw.SGD(0.5)
    )
    run = tw.simulate(net, [(x, y)], method, rounds=1, local=Local(batch=4), test=(x, y), backend=how)
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
def test_merged_weights_do_what_an_adapter_beside_the_layer_does(layer, freeze_a):
    torch.manual_seed(0)
    turned = layer == "conv1d of gpt-2"
    space = LoRA(rank=3, alpha=5.0, freeze_a=freeze_a, fan_in_fan_out=("weight",) if turned else ())
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
    beside = module(x) + s * adapter(x, both["weight/a"], both["weight/b"])
    torch.testing.assert_close(merged, beside, rtol=1e-5, atol=1e-5)
    assert (merged - module(x)).abs().max() > 0.1


def test_a_step_of_frozen_a_is_the_gradient_projected_on_its_rows():
    """One full-batch step of SGD on B alone:  W <- W0 - lr s^2 G A^T A."""
    space = LoRA(rank=4, alpha=6.0, freeze_a=True)
    method = Method(space, client_opt=tw.SGD(0.2))
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
def test_averaging_is_exact_only_where_a_is_frozen(freeze_a):
    space = LoRA(rank=3, freeze_a=freeze_a)
    base = Functional.of(perceptron()).weights()
    basis = space.basis(Spec.of(base), Key(1), None)
    clients, share = [random_coords(space, base, basis, i) for i in range(4)], [1.0, 2.0, 3.0, 4.0]
    of_mean = sub(space.expand(base, basis, weighted_mean(clients, share)), base)
    mean_of = sub(weighted_mean([space.expand(base, basis, one) for one in clients], share), base)
    gap = max(float((of_mean[name] - mean_of[name]).abs().max()) for name in base)
    size = max(float(block.abs().max()) for block in mean_of.values())
    assert gap < 1e-6 * size if freeze_a else gap > 1e-2 * size


# -- how many numbers --------------------------------------------------------------------------------------------------


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


def test_rank_16_on_two_attention_matrices_of_vit_trains_the_published_count():
    vit = transformer(dict.fromkeys(("query", "key", "value"), (768, 768)))
    query_value = ("*.query.weight", "*.value.weight")
    assert trained(LoRA(rank=16, target_modules=query_value), vit) == 589_824
    assert trained(LoRA(rank=16, target_modules=query_value, modules_to_save=("head.*",)), vit) == 597_514
    assert trained(LoRA(rank=16, target_modules=("*.attn.*",)), vit) == 884_736


def test_rank_16_on_the_fused_attention_matrix_of_gpt2_trains_the_published_count():
    gpt2 = transformer({"c_attn": (768, 2304)})
    fused = LoRA(rank=16, target_modules=("*c_attn.weight",), fan_in_fan_out=("*c_attn.weight",))
    assert trained(fused, gpt2) == 589_824
    shapes = Spec.of(fused.init(gpt2.shapes(), {}, Key(0))).restrict({"h.0.attn.c_attn.weight/a"})
    assert shapes.blocks[0].shape == (16, 768)  # A meets the input
    frozen = LoRA(rank=16, target_modules=("*c_attn.weight",), fan_in_fan_out=("*c_attn.weight",), freeze_a=True)
    assert trained(frozen, gpt2) == 12 * 16 * 2304


# -- FedLoRU: merge and begin anew -------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze_a", [False, True])
def test_a_merge_moves_the_base_and_leaves_the_model_as_it_is(freeze_a):
    kept = Federation(Method(LoRA(rank=4, freeze_a=freeze_a)))
    merged = Federation(Method(LoRA(rank=4, freeze_a=freeze_a, redraw_every=2)))
    for _ in range(2):
        kept.round(EVERYONE)
        merged.round(EVERYONE)
    before, after = kept.server.public, merged.server.public
    assert same(kept.weights(), merged.weights())  # the same two rounds, and then the merge: not a bit changed
    assert same(before.base, kept.first.base)
    assert not torch.equal(after.base["0.weight"], before.base["0.weight"])
    assert torch.equal(after.base["0.bias"], before.base["0.bias"])  # frozen
    assert before.coords["0.weight/b"].any()
    assert not after.coords["0.weight/b"].any()
    if not freeze_a:
        assert not torch.equal(after.coords["0.weight/a"], merged.first.coords["0.weight/a"])
    merged.round(EVERYONE)
    moved = sub(merged.weights(), merged.first.base)["0.weight"]
    assert torch.linalg.matrix_rank(moved) > 4  # what one correction could not do


@pytest.mark.parametrize(
    "space",
    [
        LoRA(rank=4, redraw_every=1),
        LoRA(rank=4, redraw_every=2, modules_to_save=("2.*",)),
        LoRA(rank=4, redraw_every=3, freeze_a=True),
        LoRA(rank=4, freeze_a=True),
    ],
)
def test_a_client_that_missed_rounds_replays_to_the_bits_of_the_server(space):
    fed = Federation(Method(space, client_opt=tw.SGD(0.1)))
    for number in range(7):
        fed.round([0, 1] if number % 2 else [1, 2, 3])
        if number in (2, 4):
            fed.download(4)
            assert same_public(fed.public[4], fed.server.public)
    for client in EVERYONE:
        fed.download(client)
        assert same_public(fed.public[client], fed.server.public)


def test_a_private_factor_cannot_be_merged():
    with pytest.raises(IncompatibleParts, match="redraw_every = 0"):
        Federation(Method(LoRA(rank=4, redraw_every=1), schedule=AllBlocks(private=("*/b",))))


# -- who sends what ----------------------------------------------------------------------------------------------------


def test_fedsa_shares_a_and_never_sends_b():
    space = LoRA(rank=4)
    fed = Federation(Method(space, schedule=AllBlocks(private=("*/b",)), client_opt=tw.SGD(0.1)))
    for _ in range(3):
        up = fed.round([0, 1, 2])
    a_bytes = fed.contract.coords.restrict({"0.weight/a", "2.weight/a"}).nbytes
    assert {len(message) - a_bytes for message in up.values()} < set(range(60))  # header, plan and the client's weight
    public = fed.server.public.coords
    assert not public["0.weight/b"].any()
    assert not torch.equal(public["0.weight/a"], fed.first.coords["0.weight/a"])
    mine = [fed.states[i].unsent for i in (0, 1)]
    assert set(mine[0]) == {"0.weight/b", "2.weight/b"}
    assert mine[0]["0.weight/b"].any()
    assert not torch.equal(mine[0]["0.weight/b"], mine[1]["0.weight/b"])
    assert not fed.states[5].unsent  # never asked


@pytest.mark.parametrize("head", ["sent", "kept", "frozen"])
def test_a_head_is_trained_and_sent_or_trained_and_kept_or_frozen(head):
    space = LoRA(rank=4, target_modules=("0.weight",), modules_to_save=() if head == "frozen" else ("2.*",))
    fed = Federation(Method(space, schedule=AllBlocks(private=("2.*",) if head == "kept" else ())))
    for _ in range(2):
        up = fed.round([0, 1])
    adapter, whole = 4 * (64 + 12) * 4, (12 * 10 + 10) * 4
    sent = adapter + (whole if head == "sent" else 0)
    assert {len(message) - sent for message in up.values()} < set(range(60))
    before, after, held = fed.first.base, fed.weights(), fed.states[0].unsent
    assert torch.equal(after["2.weight"], before["2.weight"]) == (head != "sent")
    assert torch.equal(after["0.bias"], before["0.bias"])
    assert set(held) == ({"2.weight", "2.bias"} if head == "kept" else set())
    assert all(block.any() for block in held.values())


def test_together_and_one_by_one_train_the_same():
    x, y = digits_task().train.gather(torch.arange(60))
    clients = [(x[i::3], y[i::3]) for i in range(3)]
    method = Method(LoRA(rank=4, modules_to_save=("2.bias",)), client_opt=tw.SGD(0.1))
    runs = [tw.simulate(perceptron(), clients, method, rounds=3, backend=how) for how in ("vmap", "loop")]
    for name, block in runs[0].weights.items():
        torch.testing.assert_close(block, runs[1].weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_train_the_digits_to_a_falling_loss(name):
    job = build_job(resolve(name, on="digits", overrides={"rounds": 10, "eval.every": 10}))
    losses = [record.loss for record in LocalEngine().run(job)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.95 * losses[0]


def test_presets_fit_the_small_models():
    from thinwire.models import build

    for model in ("mlp", "two-fc", "cnn2", "cnn-cifar", "femnist-cnn", "resnet20", "vgg16-gn", "lstm-shakespeare"):
        with torch.device("meta"):
            spec = Spec.of(dict(build(model).named_parameters()))
        for name in PRESETS:
            resolve(name).method.space.check(spec)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0}, "rank must be 1 or more, not 0"),
        ({"rank": -3}, "rank must be 1 or more"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"alpha": -1.0}, "alpha must be above 0"),
        ({"alpha": math.nan}, "alpha must be above 0"),
        ({"redraw_every": -1}, "redraw_every must be 0"),
        ({"layers": ()}, "layers selects nothing"),
        ({"rank": 11}, "rank 11 is above 10, the largest that '2.weight', a matrix of 10 x 12"),
        ({"layers": ("attn*",)}, "layers 'attn*' matches no block; the blocks are 0.weight, 2.weight"),
        ({"layers": ("*.bias",)}, "layers '*.bias' matches no block"),
        ({"dense": ("classifier.*",)}, "dense 'classifier.*' matches no block"),
        ({"dense": ("*",)}, "leaves no matrix"),
        ({"transposed": ("c_attn",)}, "transposed 'c_attn' matches no block"),
    ],
)
def test_bad_settings_are_one_clear_line(options, says):
    with pytest.raises(ConfigError) as error:
        LoRA(**options).check(Spec.of(Functional.of(perceptron()).weights()))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_without_a_matrix_is_refused():
    with pytest.raises(ConfigError, match="no matrix"):
        LoRA().check(Spec.of({"bias": torch.zeros(3)}))


def test_a_rank_above_the_layer_is_refused_before_a_run_starts():
    with pytest.raises(ConfigError, match="rank 16 is above 10"):
        LocalEngine().prepare(build_job(resolve("lora", overrides={"method.space.rank": 16})))


def test_scaling_alpha_scales_the_correction():
    base = Functional.of(perceptron()).weights()
    coords = random_coords(LoRA(rank=4), base, {}, 0)
    one, two = (sub(LoRA(rank=4, alpha=alpha).expand(base, {}, coords), base) for alpha in (4.0, 8.0))
    for name in base:
        torch.testing.assert_close(two[name], scale(one, 2.0)[name], rtol=1e-5, atol=1e-6)
