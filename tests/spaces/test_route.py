"""Different spaces for different blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, same_public
from tests.parts import Drift
from thinwire.core.key import Key
from thinwire.core.tree import Spec, Tree, same
from thinwire.errors import ConfigError, UnknownName
from thinwire.protocol import Method
from thinwire.runs.config import digest, from_table, resolve, to_table
from thinwire.runs.parts import build, describe
from thinwire.runs.toml import dumps, loads
from thinwire.spaces import MAPO, FedPara, Frozen, Full, LoRA, Route, Space
from thinwire.spaces.route import Rule


@dataclass(frozen=True)
class Shift(Space):
    """One coordinate for all weights, along a random direction."""

    redraw_every: int = 0

    def basis(self, spec: Spec, key: Key, device) -> Tree:
        return {"direction": key.normal(spec.size, device=device)}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        return {"model/b": torch.zeros(1)}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        out, at = {}, 0
        for name, w in base.items():
            direction = basis["direction"][at : at + w.numel()].view(w.shape)
            out[name], at = w + coords["model/b"] * direction, at + w.numel()
        return out


# -- assignment of blocks ----------------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_a_block_applies():
    base = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4), "b.bias": torch.ones(4)}
    space = Route((("b.bias", Full()), ("b.*", LoRA(rank=1)), ("*", Frozen())))
    assert list(space.init(base, {}, Key(0))) == ["b.bias", "b.weight/a", "b.weight/b"]
    assert list(space.expand(base, {}, space.init(base, {}, Key(0)))) == list(base)


@pytest.mark.parametrize("inner", [LoRA(rank=4), LoRA(rank=4, freeze_a=True, redraw_every=2), Drift(k=4), Full()])
def test_a_route_of_one_rule_equals_its_space(inner):
    alone, routed = Federation(Method(inner)), Federation(Method(Route((("*", inner),))))
    for _ in range(3):
        alone.round([0, 2, 3])
        routed.round([0, 2, 3])
    assert same(alone.weights(), routed.weights())
    assert same(alone.server.public.coords, routed.server.public.coords)


def test_a_route_of_lora_and_full_equals_lora_with_modules_to_save():
    one = LoRA(rank=4, target_modules=("0.weight",), modules_to_save=("2.*",))
    other = Route((("0.weight", LoRA(rank=4)), ("2.*", Full()), ("*", Frozen())))
    runs = [Federation(Method(space)) for space in (one, other)]
    for fed in runs:
        for _ in range(3):
            fed.round([0, 1, 4])
    assert same(runs[0].weights(), runs[1].weights())


def test_coordinates_of_no_single_weight_have_different_names_in_each_rule():
    base = {"a": torch.zeros(5), "b": torch.zeros(5)}
    space = Route((("a", Shift()), ("b", Shift())))
    basis = space.basis(Spec.of(base), Key(0), None)
    coords = space.init(base, basis, Key(0))
    assert list(coords) == ["model/0/b", "model/1/b"]
    made = space.expand(base, basis, {"model/0/b": torch.ones(1), "model/1/b": torch.zeros(1)})
    assert made["a"].any()
    assert not made["b"].any()
    both = space.expand(base, basis, {name: torch.ones(1) for name in coords})
    assert not torch.equal(both["a"], both["b"])  # different directions


def test_only_trained_blocks_are_sent():
    fed = Federation(Method(Route((("0.weight", LoRA(rank=4)), ("*", Frozen())))))
    up = fed.round([0, 1])
    assert {len(message) - 4 * (64 + 12) * 4 for message in up.values()} < set(range(60))
    assert torch.equal(fed.weights()["2.weight"], fed.first.base["2.weight"])


def test_a_client_that_missed_merges_of_a_route_gets_the_public_state_of_the_server():
    rules = (("0.weight", LoRA(rank=4, redraw_every=2)), ("2.weight", MAPO(k=4, redraw_every=2)), ("*", Full()))
    fed = Federation(Method(Route(rules), client_opt=tw.optimizers.SGD(0.1)))
    for _ in range(5):
        fed.round([0, 1])
    fed.download(3)
    assert same_public(fed.public[3], fed.server.public)
    assert not torch.equal(fed.server.public.base["0.weight"], fed.first.base["0.weight"])


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Route(()), "at least one rule"),
        (lambda: Route((("*",),)), "pairs of selectors and a value"),
        (lambda: Route((((), Full()),)), "selects nothing"),
        (lambda: Route((("a", LoRA(redraw_every=1)), ("b", LoRA(redraw_every=2)))), "same redraw_every"),
        (lambda: Route((("a", LoRA(redraw_every=1)), ("b", LoRA()))), "never; all spaces of a Route"),
        (lambda: Route((("a", LoRA()), ("b", Drift(redraw_every=3)))), "merges after 3 rounds"),
        (lambda: Route((("fc.*", Full()),)), "no rule of the route matches 'conv.weight'"),
        (lambda: Route((("*", Full()), ("fc.*", LoRA(2)))), "put it before earlier rules"),
        (lambda: Route((("attn*", LoRA(2)), ("*", Frozen()))), "rule 'attn*' matches no block"),
        (lambda: Route((("conv.*", FedPara(rank=9)), ("*", Frozen()))), "rank = 9 is above 2"),
    ],
)
def test_invalid_routes_are_refused_in_one_line(make, message):
    spec = Spec.of({"conv.weight": torch.zeros(4, 2, 3, 3), "fc.weight": torch.zeros(6, 4), "fc.bias": torch.zeros(6)})
    with pytest.raises(ConfigError) as error:
        make().check(spec)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_rule_for_all_blocks_may_match_no_remaining_block():
    spec = Spec.of({"fc.weight": torch.zeros(6, 4)})
    Route((("fc.*", LoRA(2)), ("*", Frozen()))).check(spec)


@pytest.mark.parametrize("space", [Frozen(), Route((("*", Frozen()),))])
def test_a_method_that_trains_nothing_is_refused(space):
    with pytest.raises(ConfigError, match="trains no weight"):
        Federation(Method(space))


# -- configuration files -----------------------------------------------------------------------------------------------

TABLE = {
    "kind": "route",
    "rules": [
        {"on": ["fc1*"], "space": {"kind": "lora", "rank": 4}},
        {"on": ["*"], "space": {"kind": "route", "rules": [{"on": ["*.bias"], "space": "full"}, ["*", "frozen"]]}},
    ],
}


def test_a_route_is_unchanged_after_writing_and_reading():
    space = build("space", TABLE, "method.space")
    inner = Route((("*.bias", Full()), ("*", Frozen())))
    assert space == Route((("fc1*", LoRA(rank=4)), ("*", inner)))
    assert build("space", describe("space", space), "again") == space
    experiment = resolve("fedavg", overrides={"method.space": TABLE})
    assert experiment.method.space == space
    again = from_table(loads(dumps(to_table(experiment)), "test"))
    assert again == experiment
    assert digest(again) == digest(experiment)


def test_pairs_and_rules_make_equal_routes():
    assert Route((("*", Full()),)) == Route((Rule(("*",), Full()),)) == Route(((("*",), Full()),))
    assert repr(Route((("*", Full()),))) == repr(Route())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"on": ["*"], "space": {"kind": "lora", "rnk": 4}}], "'rank'"),
        ([{"on": ["*"], "space": "lorra"}], "'lora'"),
        ([{"no": ["*"], "space": "lora"}], "'on'"),
        ([{"on": ["*"]}], "lacks 'space'"),
        ([{"on": 3, "space": "full"}], "method.space.rules.on must be of type"),
        (["*"], "method.space.rules must be"),
    ],
)
def test_errors_of_a_table_name_place_and_reason(rules, message):
    with pytest.raises((ConfigError, UnknownName)) as error:
        resolve("fedavg", overrides={"method.space": {"kind": "route", "rules": rules}})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
