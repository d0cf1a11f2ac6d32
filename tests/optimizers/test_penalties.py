"""L1, L2 and Jacobian penalties on weights and on coordinates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.federation import Federation
from thinwire.core.key import Key
from thinwire.core.tree import flatten
from thinwire.errors import ConfigError
from thinwire.protocol.setup import make_contract


def clients(n=3):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(12 + i, 5, generator=generator), torch.randint(0, 3, (12 + i,), generator=generator))
        for i in range(n)
    ]


def train(**parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    backend = parts.pop("backend", "auto")
    parts.setdefault("client_opt", tw.optimizers.SGD(0.2))
    return tw.simulate(model, clients(), tw.Method(**parts), rounds=3, local=tw.Local(batch=6), backend=backend)


def vector(run):
    return flatten(run.weights)


def test_in_the_full_space_l2_is_weight_decay():
    mine = train(penalty=tw.optimizers.L1L2(l2=0.1))
    theirs = train(client_opt=tw.optimizers.SGD(0.2, weight_decay=0.1))
    assert torch.allclose(vector(mine), vector(theirs), atol=1e-6)
    assert not torch.allclose(vector(mine), vector(train()), atol=1e-4)


def test_the_l1_gradient_is_the_sign_of_each_weight():
    weights = {"w": torch.tensor([2.0, -3.0, 0.5]), "b": torch.tensor([1.0])}
    gradient = tw.optimizers.L1L2(l1=0.25, layers=("w",)).gradient(lambda c: c, weights, {}, 0.1)
    assert gradient["w"].tolist() == [0.25, -0.25, 0.25]
    assert gradient["b"].tolist() == [0.0]


def test_the_penalty_of_a_projection_is_that_of_its_weights():
    space = tw.spaces.MAPO(k=4)
    base = {"w": Key(1).normal(10)}
    basis = space.basis(tw.Spec.of(base), Key(2), "cpu")
    coords = {"model/b": Key(3).normal(4, 1).requires_grad_()}

    def expand(c):
        return space.expand(base, basis, c)

    mine = tw.optimizers.L1L2(l2=0.3).gradient(expand, {k: v.detach() for k, v in coords.items()}, {}, 0.1)
    (0.15 * flatten(expand(coords)).square().sum()).backward()
    assert torch.allclose(mine["model/b"], coords["model/b"].grad, atol=1e-6)


def test_a_penalty_on_selected_coordinates_does_not_affect_others():
    """The term of Factorized-FL, l1 on `mu`, against automatic differentiation."""
    base = {"fc.weight": torch.zeros(6, 5), "fc.bias": torch.zeros(6)}
    space = tw.spaces.FactorizedFL()
    coords = space.init(base, {}, Key(1))
    coords["fc.weight/mu"][0, :2] = 0.0  # the term has no derivative here
    mine = tw.optimizers.L1L2(l1=0.3, l2=0.2, coords=("*/mu",)).gradient(
        lambda c: space.expand(base, {}, c), coords, {}, 0.1
    )
    mu = coords["fc.weight/mu"].clone().requires_grad_()
    (0.3 * mu.abs().sum() + 0.1 * mu.square().sum()).backward()
    torch.testing.assert_close(mine["fc.weight/mu"], mu.grad)
    assert mine["fc.weight/mu"][0, :2].tolist() == [0.0, 0.0]
    assert all(not block.any() for name, block in mine.items() if name != "fc.weight/mu")


def test_a_penalty_on_mu_makes_mu_sparse():
    def small(penalty):
        federation = Federation(
            tw.Method(space=tw.spaces.FactorizedFL(), penalty=penalty), local=tw.Local(epochs=4, batch=8)
        )
        federation.round([0, 1])
        coords = federation.server.public.coords
        mu = torch.cat([block.flatten() for name, block in coords.items() if name.endswith("/mu")])
        return float((mu.abs() < 0.05).float().mean())

    assert small(tw.optimizers.L1L2(l1=0.1, coords=("*/mu",))) > small(tw.optimizers.NoPenalty()) + 0.1


def test_in_the_full_space_a_penalty_on_coordinates_equals_one_on_weights():
    mine, theirs = (train(penalty=tw.optimizers.L1L2(l1=0.01, **on)) for on in ({"coords": ("*",)}, {"layers": ("*",)}))
    assert torch.equal(vector(mine), vector(theirs))


def test_selectors_that_match_nothing_are_refused_before_training():
    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}
    for penalty, message in (
        (
            tw.optimizers.L1L2(l1=0.1, coords=("*/mu",)),
            r"penalty: coords '\*/mu' matches no block; the blocks are 0.weight, ",
        ),
        (
            tw.optimizers.L1L2(l1=0.1, layers=("head.*",)),
            r"penalty: layers 'head.\*' matches no block; the blocks are 0.weight, ",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            make_contract(tw.Method(penalty=penalty), weights, {}, Key(0))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"on weights \(layers\) or on coordinates \(coords\), not on both"):
        tw.optimizers.L1L2(l1=0.1, layers=("w",), coords=("w/mu",))


def test_in_the_full_space_the_jacobian_penalty_changes_nothing():
    assert torch.allclose(vector(train(penalty=tw.optimizers.Jacobian(10.0))), vector(train()), atol=1e-6)


@pytest.mark.parametrize("squared", [False, True])
def test_the_jacobian_penalty_is_the_gradient_of_its_term(squared):
    """Equation 9 of FedPara, by finite differences in float64."""
    x, y, pull = Key(1).normal(3, 2).double(), Key(2).normal(4, 2).double(), {"w": Key(3).normal(3, 4).double()}
    lr = 0.3

    def expand(c):
        return {"w": c["x"] @ c["y"].T}

    def term(c):
        w = c["x"] @ c["y"].T
        moved = (c["x"] - lr * pull["w"] @ c["y"]) @ (c["y"] - lr * pull["w"].T @ c["x"]).T
        gap = (moved - (w - lr * pull["w"])).square().sum()
        return float(0.5 * 2.0 * (gap if squared else gap.sqrt()))

    coords = {"x": x, "y": y}
    got = tw.optimizers.Jacobian(2.0, squared).gradient(expand, coords, pull, lr)
    step = 1e-6
    for name in coords:
        for at in range(coords[name].numel()):
            nudge = torch.zeros(coords[name].numel(), dtype=torch.float64)
            nudge[at] = step
            up = term({**coords, name: coords[name] + nudge.view_as(coords[name])})
            down = term({**coords, name: coords[name] - nudge.view_as(coords[name])})
            assert float(got[name].flatten()[at]) == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("penalty", "space"),
    [
        (tw.optimizers.L1L2(l1=1e-3, l2=1e-2), tw.spaces.MAPO(k=8)),
        (tw.optimizers.L1L2(l1=1e-2, coords=("*",)), tw.spaces.LoRA(rank=2)),
        (tw.optimizers.Jacobian(1.0), tw.spaces.MAPO(k=8)),
        (tw.optimizers.Jacobian(1.0), tw.spaces.FedPara(rank=2, activation="tanh")),
    ],
    ids=repr,
)
def test_penalties_work_in_other_spaces_with_vmap_and_loop(penalty, space):
    a = train(space=space, penalty=penalty, backend="vmap")
    b = train(space=space, penalty=penalty, backend="loop")
    assert torch.allclose(vector(a), vector(b), atol=1e-5)
    linear = isinstance(space, tw.spaces.MAPO) and isinstance(penalty, tw.optimizers.Jacobian)
    assert torch.allclose(vector(a), vector(train(space=space)), atol=1e-7) == linear


def test_invalid_strengths_are_refused():
    for make in (
        lambda: tw.optimizers.L1L2(l1=-1),
        lambda: tw.optimizers.L1L2(l2=float("nan")),
        lambda: tw.optimizers.Jacobian(-0.1),
    ):
        with pytest.raises(ConfigError, match="must be 0 or more"):
            make()
