"""FedEx-LoRA and FLoRA: after a round the weights are the mean of the clients' weights, and everyone replays that."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, decoded, same_public
from thinwire.core.tree import Spec, same
from thinwire.errors import ConfigError, IncompatibleParts, WireError
from thinwire.protocol.receive import receive
from thinwire.protocol.round import Round
from thinwire.spaces import LoRAResidual, LoRAStack
from thinwire.wire import message as wire

SPACES = [LoRAResidual, LoRAStack]
PRESETS = [tw.methods.fedex_lora, tw.methods.flora_stack]
KEY = tw.Key(8)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("rank", [2, 9])
@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.1, 0.3, 0.1)])
def test_a_stack_and_the_mean_factors_make_the_mean_of_the_weights(kind, rank, shares):
    """On a convolution, a matrix and a transposed one, with ranks up to the smaller side."""
    base = {
        "conv.weight": KEY.normal(9, 5, 2, 2),
        "fc.weight": KEY.fold(1).normal(30, 40),
        "t": KEY.fold(2).normal(8, 9),
    }
    space = kind(rank=rank, alpha=3.0, fan_in_fan_out=("t",))
    first = space.init(base, {}, KEY)
    values = [{n: KEY.fold(n, i).normal(*block.shape) for n, block in first.items()} for i in range(len(shares))]
    wanted = {
        name: sum(p * space.expand(base, {}, one)[name].double() for p, one in zip(shares, values, strict=True))
        for name in base
    }
    stack = space.stack(values, shares)
    assert Spec.of(stack.blocks) == space.stack_spec(Spec.of(base), stack.adapters)
    assert sum(b.numel() for b in stack.blocks.values()) <= sum(b.numel() for b in base.values())
    made, mean = space.with_stack(base, stack.blocks), tw.aggregators.WeightedMean().of(values, shares)
    after = space.expand(made, {}, mean if kind is LoRAResidual else first)
    for name, weight in wanted.items():
        size = float(weight.norm())
        torch.testing.assert_close(after[name].double() / size, weight / size, atol=1e-5, rtol=0)
    if kind is LoRAResidual:
        assert stack.adapters == len(shares) - 1
        assert bool(stack.blocks) == (len(shares) > 1)


@pytest.mark.parametrize("upload", ["delta", "weights"])
@pytest.mark.parametrize("preset", PRESETS)
def test_rounds_are_exact_and_every_client_replays_them(preset, upload):
    fed = Federation(preset(rank=2, lr=0.1).replace(norm_bound=0.0, upload=upload))
    space, contract = fed.method.space, fed.contract
    for cohort in ((0, 1, 2), (3,), (1, 4), (0, 5)):
        plan, before = Round.open(contract, fed.server).plan, fed.server.public
        for client in cohort:
            fed.download(client)
            assert same_public(fed.public[client], before)
        up = {client: fed.upload(client) for client in cohort}
        received = list(decoded(contract, fed.server, plan, up).values())
        trees = [one.code for one in received]
        if upload == "delta":
            trees = [{name: before.coords[name] + block for name, block in tree.items()} for tree in trees]
        total = sum(one.weight for one in received)
        made = [space.expand(before.base, {}, tree) for tree in trees]
        fed.close(plan, up)
        for name, got in fed.weights().items():
            wanted = sum(o.weight / total * m[name].double() for o, m in zip(received, made, strict=True))
            torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    assert not same(fed.server.public.base, fed.first.base)
    fed.download(2)  # missed three rounds
    assert same_public(fed.public[2], fed.server.public)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_download_has_the_stack_and_nothing_else(preset):
    """A matrix of 12 x 64: factors as long as they are smaller, which six adapters of rank 2 are not."""
    fed = Federation(preset(rank=2, lr=0.1))
    head, sides = 12 * 10 + 10, 2 * (12 + 64)
    residual = preset is tw.methods.fedex_lora
    for clients in (1, 2, 6):
        fed.round(range(clients))
        data = fed.opened.downloads.messages({0: fed.server.public.version - 1})[0]
        values = (len(data) - 14) // 4
        stacked = min((clients - residual) * sides, 12 * 64)
        assert values - (head + residual * sides + stacked) in (0, 1, 2), (clients, values)
    assert residual or not any("weight/" in name for name in fed.contract.step.names)


@pytest.mark.parametrize("preset", PRESETS)
def test_codecs_of_both_directions_and_the_whole_state(preset):
    """With lossy codecs the mean is no longer exact, but everyone still has the same state."""
    fed = Federation(
        preset(rank=2, lr=0.1).replace(up=tw.codecs.ErrorFeedback(tw.codecs.TopK(0.3)), down=tw.codecs.Quantize(8))
    )
    for cohort in ((0, 1), (1, 2), (0,), (3, 4)):
        fed.round(cohort)
    fed.download(5)
    assert same_public(fed.public[5], fed.server.public)
    fed.public[5] = fed.public[5]._replace(base={n: b + 1 for n, b in fed.public[5].base.items()})
    fed.round((0, 1))
    fed.download(5)  # its base is wrong: the drift check finds it
    assert fed.drifted == [5]
    assert same_public(fed.public[5], fed.server.public)


def test_forged_stacks_are_refused():
    fed = Federation(tw.methods.flora_stack(rank=1, lr=0.1))
    fed.round((0, 1))
    data = fed.opened.downloads.messages({5: 0})[5]
    schema = fed.contract.schema
    message = wire.unpack(data, schema)
    body = wire.unpack_body(message.bodies[0], schema)
    stack = bytes(body.fields[wire.STACK])
    for forged in (
        b"",
        stack[:-1],
        stack + b"\0",
        b"\x03" + stack[1:],
        b"\x00" + stack[1:],
        b"\xff\xff\xff\xff\x7f" + stack,
    ):
        bad = wire.pack_body(wire.Body(body.plan, {**body.fields, wire.STACK: forged}), schema)
        with pytest.raises(WireError):
            receive(fed.contract, fed.public[5], wire.pack(wire.STEPS, 1, (bad, message.bodies[1]), schema, 1))
    without = wire.pack_body(wire.Body(body.plan, {wire.COORDS: body.fields[wire.COORDS]}), schema)
    with pytest.raises(WireError, match="fields"):
        receive(fed.contract, fed.public[5], wire.pack(wire.STEPS, 1, (without, message.bodies[1]), schema, 1))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"secure_aggregation": True}, "learns only a sum"),
        ({"privacy": tw.privacy.DP(), "client_weight": tw.aggregators.Uniform()}, "privacy = 'none'"),
        ({"aggregator": tw.aggregators.Median()}, "aggregator = 'weighted'"),
        ({"merge_codec": tw.codecs.Quantize(8)}, "merge_codec = 'raw'"),
        ({"down": tw.codecs.ErrorFeedback(tw.codecs.TopK(0.1))}, "without state"),
        ({"server_opt": tw.optimizers.Adam(0.1)}, "server_opt = 'sgd'"),
        ({"download": "full"}, "incremental"),
    ],
)
def test_refusals(change, what):
    for preset in PRESETS:
        with pytest.raises(IncompatibleParts, match=what):
            Federation(preset().replace(**change))


def test_bad_settings_are_one_line():
    for kind in SPACES:
        for bad, what in (({"redraw_every": 2}, "redraw_every = 1"), ({"freeze_a": True}, "freeze_a = false")):
            with pytest.raises(ConfigError, match=what):
                kind(**bad)
    with pytest.raises(ConfigError, match="use it alone"):
        tw.spaces.Route((("*", LoRAStack()),))
