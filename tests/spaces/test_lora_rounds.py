"""LoRA over whole rounds: merging (FedLoRU), private factors (FedSA-LoRA), heads and presets."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task, perceptron, records_of, same_public
from thinwire.core.tree import Spec, same, sub
from thinwire.errors import IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.models import build
from thinwire.protocol import Method
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.schedules import AllBlocks
from thinwire.spaces import LoRA

PRESETS = ("lora", "ffa-lora", "fa-lora", "fedsa-lora", "fedloru")
ALL_CLIENTS = range(6)


# -- FedLoRU: merging --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze_a", [False, True])
def test_a_merge_changes_the_base_but_not_the_model(freeze_a):
    plain = Federation(Method(LoRA(rank=4, freeze_a=freeze_a)))
    merged = Federation(Method(LoRA(rank=4, freeze_a=freeze_a, redraw_every=2)))
    for _ in range(2):
        plain.round(ALL_CLIENTS)
        merged.round(ALL_CLIENTS)
    before, after = plain.server.public, merged.server.public
    assert same(plain.weights(), merged.weights())  # bit for bit
    assert same(before.base, plain.first.base)
    assert not torch.equal(after.base["0.weight"], before.base["0.weight"])
    assert torch.equal(after.base["0.bias"], before.base["0.bias"])  # frozen
    assert before.coords["0.weight/b"].any()
    assert not after.coords["0.weight/b"].any()
    if not freeze_a:
        assert not torch.equal(after.coords["0.weight/a"], merged.first.coords["0.weight/a"])
    merged.round(ALL_CLIENTS)
    moved = sub(merged.weights(), merged.first.base)["0.weight"]
    assert torch.linalg.matrix_rank(moved) > 4  # impossible with one adapter


@pytest.mark.parametrize(
    "space",
    [
        LoRA(rank=4, redraw_every=1),
        LoRA(rank=4, redraw_every=2, modules_to_save=("2.*",)),
        LoRA(rank=4, redraw_every=3, freeze_a=True),
        LoRA(rank=4, freeze_a=True),
    ],
)
def test_a_client_that_missed_rounds_gets_the_public_state_of_the_server(space):
    fed = Federation(Method(space, client_opt=tw.optimizers.SGD(0.1)))
    for number in range(7):
        fed.round([0, 1] if number % 2 else [1, 2, 3])
        if number in (2, 4):
            fed.download(4)
            assert same_public(fed.public[4], fed.server.public)
    for client in ALL_CLIENTS:
        fed.download(client)
        assert same_public(fed.public[client], fed.server.public)


def test_a_private_factor_cannot_be_merged():
    with pytest.raises(IncompatibleParts, match="redraw_every = 0"):
        Federation(Method(LoRA(rank=4, redraw_every=1), schedule=AllBlocks(private=("*/b",))))


# -- uploads -----------------------------------------------------------------------------------------------------------


def test_fedsa_sends_a_and_never_b():
    space = LoRA(rank=4)
    fed = Federation(Method(space, schedule=AllBlocks(private=("*/b",)), client_opt=tw.optimizers.SGD(0.1)))
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
    assert not fed.states[5].unsent  # never sampled


@pytest.mark.parametrize("head", ["sent", "private", "frozen"])
def test_a_head_is_sent_private_or_frozen(head):
    space = LoRA(rank=4, target_modules=("0.weight",), modules_to_save=() if head == "frozen" else ("2.*",))
    fed = Federation(Method(space, schedule=AllBlocks(private=("2.*",) if head == "private" else ())))
    for _ in range(2):
        up = fed.round([0, 1])
    adapter, dense = 4 * (64 + 12) * 4, (12 * 10 + 10) * 4
    sent = adapter + (dense if head == "sent" else 0)
    assert {len(message) - sent for message in up.values()} < set(range(60))
    before, after, unsent = fed.first.base, fed.weights(), fed.states[0].unsent
    assert torch.equal(after["2.weight"], before["2.weight"]) == (head != "sent")
    assert torch.equal(after["0.bias"], before["0.bias"])
    assert set(unsent) == ({"2.weight", "2.bias"} if head == "private" else set())
    assert all(block.any() for block in unsent.values())


def test_vmap_and_loop_train_the_same():
    x, y = digits_task().train.gather(torch.arange(60))
    clients = [(x[i::3], y[i::3]) for i in range(3)]
    method = Method(LoRA(rank=4, modules_to_save=("2.bias",)), client_opt=tw.optimizers.SGD(0.1))
    runs = [tw.simulate(perceptron(), clients, method, rounds=3, backend=how) for how in ("vmap", "loop")]
    for name, block in runs[0].weights.items():
        torch.testing.assert_close(block, runs[1].weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ffa-lora", "fedsa-lora", "fedloru"])
def test_presets_reduce_the_loss_on_digits(name):
    job = build_job(resolve(name, on="digits", overrides={"rounds": 5, "eval.every": 5}))
    losses = [record.loss for record in records_of(Engine(), job)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.95 * losses[0]


def test_presets_can_be_used_for_the_small_models():
    for model in ("mlp", "two-fc", "cnn2", "cnn-cifar", "femnist-cnn", "resnet20", "vgg16-gn", "lstm-shakespeare"):
        with torch.device("meta"):
            spec = Spec.of(dict(build(model).named_parameters()))
        for name in PRESETS:
            resolve(name).method.space.check(spec)
