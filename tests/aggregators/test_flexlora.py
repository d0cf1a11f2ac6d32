"""FlexLoRA: the aggregate is the best approximation of the mean of products, for any ranks, clients and weights."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, decoded, same_public
from thinwire.aggregators.flexlora import best_adapter
from thinwire.core.tree import restrict
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.protocol.round import Round

OUT, IN = 9, 7


def adapters(clients: int, rank: int, seed: int = 0) -> list[tw.Tree]:
    key = tw.Key(seed)
    made = []
    for i in range(clients):
        b, a = key.fold("b", i).normal(OUT, rank), key.fold("a", i).normal(rank, IN)
        made.append({"w/a": a, "w/b": b, "bias": key.fold("bias", i).normal(3)})
    return made


def dense_mean(trees, weights) -> torch.Tensor:
    total = sum(weights)
    return sum(w / total * (t["w/b"].double() @ t["w/a"].double()) for t, w in zip(trees, weights, strict=True))


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_the_product_is_the_truncated_svd_of_the_dense_mean(clients, rank):
    trees, weights = adapters(clients, rank), [1.0 + 3 * (i % 2) for i in range(clients)]
    got = tw.aggregators.FlexLoRA().of(trees, weights)
    u, s, v = torch.linalg.svd(dense_mean(trees, weights), full_matrices=False)
    wanted = u[:, :rank] * s[:rank] @ v[:rank]
    torch.testing.assert_close((got["w/b"].double() @ got["w/a"].double()), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got["bias"], tw.aggregators.WeightedMean().of(trees, weights)["bias"])
    assert list(got) == list(trees[0])
    gram = got["w/a"].double() @ got["w/a"].double().mT  # rows of A: orthogonal, of the size that clients have
    size = torch.cat([tree["w/a"] for tree in trees]).square().sum(1).mean()
    torch.testing.assert_close(gram, size.double() * torch.eye(rank, dtype=torch.float64), atol=1e-4, rtol=1e-4)


def test_the_first_ranks_are_the_best_adapter_of_that_rank():
    trees = adapters(4, 4)
    got = tw.aggregators.FlexLoRA().of(trees, [1.0] * 4)
    u, s, v = torch.linalg.svd(dense_mean(trees, [1.0] * 4), full_matrices=False)
    for rank in (1, 2, 3):
        torch.testing.assert_close(
            got["w/b"][:, :rank].double() @ got["w/a"][:rank].double(),
            u[:, :rank] * s[:rank] @ v[:rank],
            atol=1e-5,
            rtol=0,
        )


def test_clients_of_lower_ranks_and_zero_adapters():
    trees = adapters(3, 4)
    for tree, rank in zip(trees, (1, 2, 4), strict=True):
        tree["w/a"][rank:], tree["w/b"][:, rank:] = 0.0, 0.0
    got = tw.aggregators.FlexLoRA().of(trees, [2.0, 1.0, 1.0])
    u, s, v = torch.linalg.svd(dense_mean(trees, [2.0, 1.0, 1.0]), full_matrices=False)
    torch.testing.assert_close(got["w/b"].double() @ got["w/a"].double(), u[:, :4] * s[:4] @ v[:4], atol=1e-5, rtol=0)
    b, a = best_adapter([torch.zeros(OUT, 2)] * 3, [tree["w/a"][:2] for tree in adapters(3, 2)], [1 / 3] * 3)
    assert not b.any()
    assert torch.linalg.matrix_rank(a) == 2  # so that B still has a gradient
    b, a = best_adapter([torch.zeros(OUT, 2)], [torch.zeros(2, IN)], [1.0])
    assert torch.isfinite(a).all()
    assert not (b @ a).any()


@pytest.mark.parametrize("upload", ["delta", "weights"])
def test_a_round_makes_the_best_adapter_of_what_the_clients_trained(upload):
    fed = Federation(tw.methods.flexlora(rank=2, lr=0.1).replace(upload=upload, norm_bound=0.0))
    for cohort in ((0, 1, 2), (3,), (1, 4)):
        plan, before = Round.open(fed.contract, fed.server).plan, fed.server.public
        for client in cohort:
            fed.download(client)
        up = {client: fed.upload(client) for client in cohort}
        received = decoded(fed.contract, fed.server, plan, up)
        fed.close(plan, up)
        trees = [one.code for one in received.values()]
        if upload == "delta":
            trees = [{name: before.coords[name] + block for name, block in tree.items()} for tree in trees]
        trees = [{"w/a": tree["0.weight/a"], "w/b": tree["0.weight/b"]} for tree in trees]
        u, s, v = torch.linalg.svd(dense_mean(trees, [one.weight for one in received.values()]), full_matrices=False)
        after = restrict(fed.server.public.coords, ["0.weight/a", "0.weight/b"])
        got = after["0.weight/b"].double() @ after["0.weight/a"].double()
        torch.testing.assert_close(got, u[:, :2] * s[:2] @ v[:2], atol=1e-5, rtol=1e-5)
    fed.download(5)  # missed all rounds
    assert same_public(fed.public[5], fed.server.public)


def test_clients_receive_and_send_their_own_ranks():
    fed = Federation(tw.methods.flexlora(rank=4, lr=0.1, ranks=(1,)))
    tiers = [fed.contract.tier(i) for i in range(6)]
    assert set(tiers) == {0, 1}
    for _ in range(2):
        up = fed.round(range(6))
    low, high = (len(up[tiers.index(tier)]) for tier in (0, 1))
    assert high - low == 3 * (64 + 12) * 4  # three ranks of one matrix of 64 x 12
    received = fed.public[tiers.index(0)].coords
    assert received["0.weight/a"][0].any()
    assert not received["0.weight/a"][1:].any()


def test_refusals():
    method = tw.methods.flexlora()
    with pytest.raises(IncompatibleParts, match="server_opt = 'sgd'"):
        Federation(method.replace(server_opt=tw.optimizers.Adam(0.01)))
    with pytest.raises(IncompatibleParts, match="lr = 1"):
        Federation(method.replace(server_opt=tw.optimizers.SGD(0.5)))
    with pytest.raises(IncompatibleParts, match="from_start = false"):
        Federation(method.replace(space=tw.spaces.LoRA(rank=2, from_start=True)))
    with pytest.raises(IncompatibleParts, match="needs each upload"):
        Federation(method.replace(secure_aggregation=True))
    with pytest.raises(IncompatibleParts, match="correction = 'none'"):
        Federation(method.replace(correction=tw.optimizers.Scaffold()))
    with pytest.raises(IncompatibleParts, match="mask = 'none'"):
        Federation(method.replace(mask=tw.masks.RandomMask(0.5)))
    for outer in (tw.aggregators.Bounded, tw.aggregators.NearestMixing):
        with pytest.raises(ConfigError, match="inner = 'weighted'"):
            outer(inner=tw.aggregators.FlexLoRA())
