"""Published rivals against plain loops of torch: the same weights after a few rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.data.task import pool_clients
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation

ROUNDS, STEPS, LR = 5, 4, 0.1
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
SIZES = (20, 35, 10)  # unequal on purpose
SHARES = [size / sum(SIZES) for size in SIZES]


def clients() -> list[tuple[Tensor, Tensor]]:
    """Three classes of points."""
    generator = torch.Generator().manual_seed(1)
    points = [torch.randn(size, 12, generator=generator) for size in SIZES]
    return [(x, x[:, :3].argmax(1)) for x in points]


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))


def start() -> list[Tensor]:
    return [block.detach().clone() for block in network().parameters()]


def loss(weights: list[Tensor], client: int) -> Tensor:
    """The loss of all examples of a client."""
    x, y = clients()[client]
    hidden = torch.relu(x @ weights[0].T + weights[1])
    return cross_entropy(hidden @ weights[2].T + weights[3], y)


def mean(trees: list[list[Tensor]]) -> list[Tensor]:
    return [sum(p * block for p, block in zip(SHARES, blocks, strict=True)) for blocks in zip(*trees, strict=True)]


def played(method: tw.Method):
    """A simulation with full batches; all clients take part."""
    local = tw.Local(steps=STEPS, batch=0)
    job = Job(tw.Task(network(), *pool_clients(clients())), method.replace(norm_bound=0), ROUNDS, 3, local, seed=3)
    runner = make_simulation(Engine(backend="loop"), job)
    state, bases, sent = runner.start(), [], []
    first = state.server.public.coords
    for version in range(ROUNDS):
        bases.append(runner.contract.basis(version, "cpu"))
        sent.append(0)

        def count(_number, direction, _client, message):
            sent[-1] += len(message) if direction == "up" else 0

        state, _ = runner.round(state, count)
    public = state.server.public
    weights = method.space.expand(public.base, runner.contract.basis(public.version, "cpu"), public.coords)
    return [weights[name] for name in NAMES], first, bases, sent


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, atol=2e-5), float((one - other).abs().max())
    assert not torch.allclose(mine[0], start()[0], atol=1e-2)  # something was learned


def outer_loop(make_optimizers) -> list[Tensor]:
    """DiLoCo: the optimizers of a client live for the whole run; Nesterov SGD on the negated mean change."""
    weights = [block.requires_grad_() for block in start()]
    server = torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    places = [[block.requires_grad_() for block in start()] for _ in SIZES]
    optimizers = [make_optimizers(own) for own in places]
    for _ in range(ROUNDS):
        for i, own in enumerate(places):
            for block, now in zip(own, weights, strict=True):
                block.data.copy_(now.data)
            for _ in range(STEPS):
                for block in own:
                    block.grad = None
                loss(own, i).backward()
                for optimizer in optimizers[i]:
                    optimizer.step()
        for block, new in zip(weights, mean([[one.data for one in own] for own in places]), strict=True):
            block.grad = block.data - new
        server.step()
    return [block.detach() for block in weights]


def test_diloco_equals_a_loop_of_torch():
    theirs = outer_loop(lambda own: [torch.optim.AdamW(own, lr=0.01, weight_decay=0.1)])
    assert_close(played(tw.methods.diloco(lr=0.01))[0], theirs)


def muon(own: list[Tensor]) -> list[torch.optim.Optimizer]:
    matrices = torch.optim.Muon(
        [own[0], own[2]], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return [matrices, torch.optim.AdamW([own[1], own[3]], lr=0.01, weight_decay=0.1)]


def test_muloco_equals_a_loop_with_the_muon_of_torch_in_float32(monkeypatch):
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self.clone())
    assert_close(played(tw.methods.muloco(lr=0.01))[0], outer_loop(muon))


def test_muon_has_other_steps_than_adamw():
    adamw = outer_loop(lambda own: [torch.optim.AdamW(own, lr=0.01, weight_decay=0.1)])
    assert not torch.allclose(adamw[0], played(tw.methods.muloco(lr=0.01))[0][0], atol=1e-2)


def sgd(blocks: list[Tensor], weights_of, client: int) -> list[Tensor]:
    """Some steps of gradient descent on these blocks."""
    for _ in range(STEPS):
        own = [block.detach().requires_grad_() for block in blocks]
        grads = torch.autograd.grad(loss(weights_of(*own), client), own)
        blocks = [block.detach() - LR * grad for block, grad in zip(own, grads, strict=True)]
    return blocks


def test_rolora_equals_a_loop_and_sends_one_factor_a_round():
    method = tw.methods.rolora(rank=2, alpha=2.0, lr=LR)
    mine, first, _, sent = played(method)
    w0, bias, *head = start()
    a, b = first["0.weight/a"].clone(), torch.zeros(10, 2)
    for number in range(ROUNDS):
        if number % 2 == 0:
            trained = [sgd([b, *head], lambda b, *head: [w0 + b @ a, bias, *head], i) for i in range(3)]  # noqa: B023
            b, *head = mean(trained)
        else:
            trained = [sgd([a, *head], lambda a, *head: [w0 + b @ a, bias, *head], i) for i in range(3)]  # noqa: B023
            a, *head = mean(trained)
    assert_close(mine, [w0 + b @ a, bias, *head])
    assert sent[1] - sent[0] == 3 * 4 * (a.numel() - b.numel())


def test_fedsvd_equals_a_loop_that_decomposes_the_product_in_every_round():
    mine, _, bases, _ = played(tw.methods.fedsvd(rank=2, alpha=2.0).replace(client_opt=tw.optimizers.SGD(LR)))
    w0, bias, *head = start()
    a, b = bases[0]["0.weight/a"], torch.zeros(10, 2)
    assert torch.allclose(a @ a.T, torch.eye(2), atol=1e-6)
    for _ in range(ROUNDS):
        trained = [sgd([b, *head], lambda b, *head: [w0 + b @ a, bias, *head], i) for i in range(3)]  # noqa: B023
        b, *head = mean(trained)
        u, s, v = torch.linalg.svd(b @ a)
        a, b = v[:2], u[:, :2] * s[:2]
    assert_close(mine, [w0 + b @ a, bias, *head])


@pytest.mark.parametrize("every", [1, 2])
def test_fedmud_equals_a_loop_and_merges(every):
    method = tw.methods.fedmud(rank=2, alpha=2.0, lr=LR, redraw_every=every)
    mine, _, bases, _ = played(method)
    w, bias, *head = start()
    for number in range(ROUNDS):
        if number % every == 0:
            a0, b0 = (bases[number][f"0.weight/{side}"] for side in "ab")
            a, b, w0 = torch.zeros(2, 12), torch.zeros(10, 2), w
        weights = lambda a, b, *head: [w0 + b @ a0 + b0 @ a, bias, *head]  # noqa: B023, E731
        a, b, *head = mean([sgd([a, b, *head], weights, i) for i in range(3)])
        w = weights(a, b)[0]
    assert_close(mine, [w, bias, *head])
    assert not torch.equal(bases[0]["0.weight/a"], bases[every]["0.weight/a"])


def test_muon_takes_convolutions_as_matrices_and_leaves_heads_to_adamw():
    coords = {"conv.weight": torch.zeros(4, 2, 3, 1), "head.weight": torch.zeros(3, 4)}
    grads = {name: tw.Key(1).fold(name).normal(*block.shape) for name, block in coords.items()}
    opt = tw.optimizers.Muon(0.1)
    change, state = opt.update(grads, opt.init(coords), coords)
    assert set(state["momentum"]) == {"conv.weight"}
    assert set(state["m"]) == {"head.weight"}
    values = torch.linalg.svdvals(change["conv.weight"].flatten(1)) / (0.1 * 0.2 * 6**0.5)
    assert bool(((values > 0.6) & (values < 1.3)).all())  # five steps do not reach 1
    assert torch.allclose(change["head.weight"], -0.1 * grads["head.weight"].sign(), atol=1e-6)


@pytest.mark.parametrize("setting", [{"freeze_a": True}, {"from_start": True}, {"adapter": "folder"}])
def test_a_sum_of_two_products_starts_at_zero(setting):
    with pytest.raises(tw.ConfigError, match="LoRASum trains B and A from 0"):
        tw.spaces.LoRASum(redraw_every=0 if "adapter" in setting else 1, **setting)
