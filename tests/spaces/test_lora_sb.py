"""LoRASB (Fed-SB): directions of the weights, exact means, messages of R alone, and adapters that peft loads."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, same_public
from thinwire.core.tree import same, weighted_mean
from thinwire.errors import ConfigError
from thinwire.spaces import LoRASB
from thinwire.testing import check_space

KEY = tw.Key(4)


def random_base() -> tw.Tree:
    return {
        "conv.weight": KEY.fold("c").normal(6, 4, 2, 2),
        "fc.weight": KEY.fold("f").normal(9, 7),
        "b": KEY.normal(3),
    }


@pytest.mark.parametrize("space", [LoRASB(rank=1), LoRASB(rank=3, fan_in_fan_out=("fc.weight",)), LoRASB(rank=99)])
def test_it_meets_the_contract_and_starts_at_the_weights(space):
    check_space(space, random_base())


@pytest.mark.parametrize("rank", [1, 4, 6])
def test_directions_are_singular_vectors_and_a_step_projects_the_gradient(rank):
    base, space = random_base(), LoRASB(rank=rank)
    basis = space.basis_from(base, KEY, "cpu")
    for name, weight in (("conv.weight", base["conv.weight"].flatten(1)), ("fc.weight", base["fc.weight"])):
        b, a = basis[f"{name}/b"].double(), basis[f"{name}/a"].double()
        values = torch.linalg.svdvals(weight.double())[:rank]
        torch.testing.assert_close(b.mT @ weight.double() @ a.mT, values.diag(), atol=1e-5, rtol=1e-5)
        assert (a.gather(1, a.abs().argmax(1, keepdim=True)) > 0).all()
    coords = {name: block.requires_grad_() for name, block in space.init(base, basis, KEY).items()}
    gradient = KEY.fold("g").normal(9, 7)
    (space.expand(base, basis, coords)["fc.weight"] * gradient).sum().backward()
    step = {name: -block.grad if block.grad is not None else block.detach() for name, block in coords.items()}
    moved = space.expand(base, basis, step)["fc.weight"] - base["fc.weight"]
    b, a = basis["fc.weight/b"], basis["fc.weight/a"]
    torch.testing.assert_close(moved, -(b @ b.mT) @ gradient @ (a.mT @ a), atol=1e-5, rtol=1e-5)


def test_the_mean_of_r_is_the_mean_of_the_weights():
    base, space = random_base(), LoRASB(rank=5)
    basis = space.basis_from(base, KEY, "cpu")
    first, weights = space.init(base, basis, KEY), [1.0, 2.0, 7.0]
    trees = [{n: KEY.fold(n, i).normal(*block.shape) for n, block in first.items()} for i in range(3)]
    made = [space.expand(base, basis, tree)["fc.weight"].double() for tree in trees]
    wanted = sum(w / 10 * one for w, one in zip(weights, made, strict=True))
    got = space.expand(base, basis, weighted_mean(trees, weights))["fc.weight"].double()
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_rounds_send_r_alone_and_a_client_that_missed_them_catches_up():
    fed = Federation(tw.methods.fed_sb(rank=6, lr=0.3).replace(norm_bound=0.0))
    for cohort in ((0, 1, 2), (3,), (2, 4)):
        up = fed.round(cohort)
    head = 12 * 10 + 10
    assert {len(data) for data in up.values()} <= {4 * (36 + head) + n for n in range(10, 14)}  # and a header
    fed.download(5)
    assert same_public(fed.public[5], fed.server.public)
    assert same(fed.server.public.base, fed.first.base)
    assert fed.losses[4] < fed.losses[2]  # client 2 in the last and in the first round
    r = fed.server.public.coords["0.weight/r"]
    moved = fed.weights()["0.weight"] - fed.first.base["0.weight"]
    assert r.any()
    assert torch.linalg.matrix_rank(moved, atol=1e-5) <= 6


@pytest.mark.parametrize("weight", [torch.zeros(4, 4), torch.eye(5), torch.ones(4, 6)])
def test_weights_without_directions_are_refused(weight):
    with pytest.raises(ConfigError, match="write '!w'"):
        LoRASB(rank=3).basis_from({"w": weight}, KEY, "cpu")


def test_bad_settings_are_one_line():
    with pytest.raises(ConfigError, match="rank must be 1 or more"):
        LoRASB(rank=0)
    with pytest.raises(ConfigError, match="basis_from"):
        LoRASB().basis(tw.Spec.of(random_base()), KEY, "cpu")


def test_it_works_inside_a_route():
    fed = Federation(
        tw.Method(tw.spaces.Route((("0.weight", LoRASB(rank=4)), ("2.*", tw.spaces.Full()), ("*", tw.spaces.Frozen()))))
    )
    fed.round((0, 1))
    fed.download(2)
    assert same_public(fed.public[2], fed.server.public)
    assert fed.server.public.coords["0.weight/r"].any()
