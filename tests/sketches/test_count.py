"""Count sketches and FetchSGD: linear to the bit, and what is not broadcast stays in the server's sketch."""

import math

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, same_public
from thinwire.core.key import Key
from thinwire.core.tree import Spec, add, flatten, restrict, same, scale
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.protocol.setup import UNRECOVERED
from thinwire.sketches import CountSketch, count as module

DELTA = {"w": Key(1).normal(70, 5), "b": Key(2).normal(60)}
COORDS = Spec.of(DELTA)


def test_the_sum_of_codes_is_the_code_of_the_sum_to_the_bit():
    sketch, key = CountSketch(rows=3, columns=40), Key(5)
    updates = [{name: Key(i).fold(name).normal(*x.shape) * 1e-2 for name, x in DELTA.items()} for i in range(20)]
    codes = [sketch.encode(update, key) for update in updates]
    total, cells = scale(DELTA, 0.0), scale(codes[0], 0.0)
    for update, code in zip(updates, codes, strict=True):
        rounded = {name: (x.double() * 2**20).round() / 2**20 for name, x in update.items()}
        total, cells = {name: total[name].double() + x for name, x in rounded.items()}, add(cells, code)
    assert same(cells, sketch.encode(total, key))
    assert same(cells, {"sketch": sum(code["sketch"] for code in reversed(codes))})  # in any order


def test_large_values_are_recovered_and_their_cells_are_not_left():
    sketch, key = CountSketch(rows=5, columns=100, k=4), Key(3)
    delta = scale(DELTA, 1e-3)
    for at, value in ((0, 3.0), (7, -2.0), (100, 5.0)):
        delta["w"].view(-1)[at] = value
    delta["b"][11] = -4.0
    code = sketch.encode(delta, key)
    update, left = sketch.recover(code, COORDS, key)
    found = torch.nonzero(flatten(update)).squeeze(-1)
    assert found.tolist() == [0, 7, 100, 350 + 11]
    assert torch.allclose(flatten(update)[found], flatten(delta)[found], atol=0.05)
    assert int((~left["sketch"]).sum(1).max()) <= 4
    rest = sketch.decode({"sketch": torch.where(left["sketch"], code["sketch"], 0)}, COORDS, key)
    assert float(flatten(rest)[found].abs().max()) < 0.05


def test_a_block_has_the_same_cells_whatever_else_is_sketched():
    sketch = CountSketch(rows=3, columns=50)
    parts = [sketch.encode(restrict(DELTA, (name,)), Key(1)) for name in DELTA]
    assert same(add(*parts), sketch.encode(DELTA, Key(1)))


@pytest.mark.parametrize("block", [7, 64])
def test_codes_do_not_depend_on_how_many_values_are_drawn_at_a_time(monkeypatch, block):
    sketch = CountSketch(rows=3, columns=50, k=9)
    code = sketch.encode(DELTA, Key(1))
    found = sketch.recover(code, COORDS, Key(1))
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "KEPT", 0)
    assert same(sketch.encode(DELTA, Key(1)), code)
    assert all(map(same, sketch.recover(code, COORDS, Key(1)), found))


def test_what_is_not_broadcast_stays_in_the_sketch_and_is_broadcast_later():
    """With a wide sketch estimates are exact: after the updates stop, everything arrives, k values at a time."""
    method = tw.methods.fetchsgd(columns=40_000, k=300)
    federation = Federation(method.replace(client_opt=tw.optimizers.SGD(0.5)))
    federation.round((0, 1, 2))
    error = federation.server.opt[UNRECOVERED]["sketch"]
    start, moved = flatten(federation.first.coords), flatten(federation.server.public.coords)
    assert int((moved != start).sum()) == 300
    rest = method.sketch.decode({"sketch": error}, federation.contract.coords, federation.contract.sketch_key(1))
    assert float(flatten(rest).abs().max()) > 0
    assert float(flatten(rest).abs().max()) <= float((moved - start)[moved != start].abs().min()) + 1e-6
    assert not federation.states[0].codec  # clients keep nothing


def test_momentum_is_zero_where_values_were_recovered():
    federation = Federation(tw.methods.fetchsgd(columns=200, k=20, momentum=0.9))
    federation.round((0, 1))
    opt = federation.server.opt
    gone = opt[UNRECOVERED]["sketch"] == 0
    assert int(gone.sum()) >= 20
    assert bool((opt["momentum"]["sketch"][gone] == 0).all())
    assert bool((opt["momentum"]["sketch"] != 0).any())


@pytest.mark.parametrize("secure", [False, True])
def test_clients_follow_the_server_and_catch_up(secure):
    method = tw.methods.fetchsgd(momentum=0.5).replace(
        secure_aggregation=secure, client_weight=tw.aggregators.Uniform()
    )
    federation = Federation(method)
    for cohort in ((0, 1, 2), (1, 3), (0, 1)):
        federation.round(cohort)
    for client in (2, 4):
        federation.download(client)
        assert same_public(federation.public[client], federation.server.public)


def test_masked_sums_give_the_update_of_plain_ones():
    method = tw.methods.fetchsgd(k=5000).replace(client_weight=tw.aggregators.Uniform())  # everything is broadcast
    plain, secure = Federation(method), Federation(method.replace(secure_aggregation=True))
    for one in (plain, secure):
        one.round((0, 1, 2, 3))
    a, b = (flatten(one.server.public.coords) for one in (plain, secure))
    assert torch.allclose(a, b, atol=1e-5)
    assert not torch.equal(a, flatten(plain.first.coords))


def test_a_schedule_of_some_blocks_needs_a_number_of_columns():
    schedule = tw.schedules.FedLAMA(phi=2)
    with pytest.raises(IncompatibleParts, match="Use a sketch"):
        Federation(tw.methods.fetchsgd().replace(schedule=schedule))
    federation = Federation(tw.methods.fetchsgd(columns=100).replace(schedule=schedule))
    for _ in range(3):
        federation.round(federation.cohort)
    assert all(map(math.isfinite, federation.losses))


def test_fetchsgd_learns_the_digits():
    run = tw.run("fetchsgd", on="digits", rounds=8, eval_every=8, backend="vmap")
    assert run.history[-1].accuracy > 0.7
    assert run.history[-1].bytes_up < 0.3 * 4 * 4810 * 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be from 1 to 64"),
        ({"columns": -1}, "columns"),
        ({"k": -1}, "k must be"),
        ({"resolution": 0.3}, "power of two"),
        ({"resolution": 2.0}, "power of two"),
        ({"rows": "5"}, "write rows = 5"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        CountSketch(**options)
