"""FLASC: uploads and downloads are sparse; training and the server are dense."""

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.federation import SIZES, Federation, digits_task
from thinwire.core.selection import kept
from thinwire.core.tree import add, flatten, restrict, same, scale, sub, weighted_mean
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.protocol.upload import decode_upload
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.runs.toml import dumps, loads
from thinwire.schedules.base import Plan
from thinwire.training import Local
from thinwire.training.evaluation import evaluate

ALL_CLIENTS = range(len(SIZES))


def flasc(down: float = 0.25, up: float = 0.25, **changes) -> tw.Method:
    paper = tw.methods.flasc(density=up, download_density=0.5, lr=0.01, server_lr=0.03, from_start=False)
    return replace(paper, down=tw.codecs.TopK(down), **changes)


def after(method: tw.Method, rounds: int = 3, backend: str = "vmap"):
    simulation = make_simulation(Engine(backend=backend), Job(digits_task(), method, rounds, 3, Local(1, batch=8)))
    state = simulation.start()
    for _ in range(rounds):
        state, record = simulation.round(state)
    return simulation, state, record


def same_state(a, b):
    return list(a) == list(b) and all(same(a[slot], b[slot]) for slot in a)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_at_density_1_it_equals_federated_lora_with_adam_bit_for_bit(backend):
    lora = tw.Method(
        space=flasc().space,
        client_weight=tw.aggregators.Uniform(),
        client_opt=flasc().client_opt,
        server_opt=flasc().server_opt,
    )
    assert lora.download == "incremental"
    _, plain, known = after(lora, backend=backend)
    _, dense, record = after(flasc(1.0, 1.0), backend=backend)
    assert same(plain.server.public.coords, dense.server.public.coords)
    assert same_state(plain.server.opt, dense.server.opt)
    assert (record.loss, record.accuracy, record.test_loss) == (known.loss, known.accuracy, known.test_loss)


@pytest.mark.parametrize("up", [0.01, 0.25, 0.6])
def test_a_round_equals_the_algorithm_of_the_paper(up):
    federation = Federation(flasc(0.3, up))
    federation.round(ALL_CLIENTS)  # so that no factor is zero
    before, size = federation.server, federation.contract.coords.size
    dense = flatten(before.public.coords)
    messages, plan = {}, Plan(frozenset(federation.contract.coords.names))
    for client in (0, 2):
        federation.download(client)
        start = federation.public[client].coords
        largest = dense.abs().topk(int(0.3 * size)).indices
        masked = torch.zeros_like(dense).index_copy(0, largest, dense[largest])
        assert torch.equal(flatten(start), masked)  # P * M
        messages[client] = federation.upload(client)
        code = decode_upload(federation.contract, plan, 1, client, messages[client]).code
        assert int((flatten(code) != 0).sum()) <= kept(up, size) == max(1, int(up * size))
        if up == 0.6:  # values that the download masked can change
            assert bool((flatten(code)[masked == 0] != 0).any())
    codes = [decode_upload(federation.contract, plan, 1, client, data).code for client, data in messages.items()]
    change, opt = federation.method.server_opt.update(
        scale(weighted_mean(codes, [1.0, 1.0]), -1.0), before.opt, before.public.coords
    )
    federation.close(plan, messages)
    assert same(federation.server.public.coords, add(before.public.coords, change))  # the dense P moves
    assert same_state(federation.server.opt, opt)


def test_the_delta_is_relative_to_the_download():
    federation = Federation(flasc(0.1, 1.0))
    federation.download(0)
    start = federation.public[0].coords
    other = Federation(flasc(1.0, 1.0))
    other.download(0)
    other.public[0] = other.public[0]._replace(coords=start)  # the same values, received dense
    plan = Plan(frozenset(federation.contract.coords.names))
    codes = [decode_upload(one.contract, plan, 0, 0, one.upload(0)).code for one in (federation, other)]
    assert same(*codes)
    assert not same(start, restrict(federation.server.public.coords, start))


def test_the_model_of_clients_or_of_the_server_is_evaluated():
    sent, state, record = after(flasc(0.1))
    public = state.server.public
    whole = sent.job.method.space.expand(public.base, {}, public.coords)
    shown = sent.weights(public)
    assert not same(shown, whole)
    with sent.compute():
        found = evaluate(sent.model, shown, public.buffers, sent.test)
    assert record.test_loss == found.loss
    server, state, record = after(flasc(0.1, evaluate="server"))
    assert same(state.server.public.coords, public.coords)  # evaluation changes nothing
    assert same(server.weights(state.server.public), whole)
    with pytest.raises(ConfigError, match="evaluate must be one of server, client, average, not 'me'"):
        flasc(evaluate="me")


def test_tiers_have_different_densities():
    tiers = tuple(tw.Tier(up=tw.codecs.TopK(4.0 ** (b - 3))) for b in (1, 2, 3))
    federation = Federation(flasc(budget=tw.Budget(tiers, clients=tuple(i % 3 for i in ALL_CLIENTS))))
    size = federation.contract.coords.size
    for client, data in federation.round(ALL_CLIENTS).items():
        values = kept(4.0 ** (client % 3 - 2), size)
        assert 4 * values < len(data) < 4 * values + size // 8 + 60  # values, and at most a bitmap


def test_the_preset_is_the_same_after_writing_and_reading():
    experiment = resolve("flasc", "text-classification")
    assert from_table(loads(dumps(to_table(experiment)), "a test")) == experiment
    assert experiment.method.evaluate == "client"
    assert "evaluate" not in to_table(resolve("lora", "digits"))["method"]


def test_the_server_is_never_masked():
    federation = Federation(flasc(0.05, 0.05))
    first = federation.server.public.coords
    for _ in range(2):
        federation.round(ALL_CLIENTS)
    moved = sub(federation.server.public.coords, first)
    share = float((flatten(federation.server.public.coords) != 0).float().mean())
    assert share > 0.4  # the random factor A alone is half of all values
    assert float(flatten(moved).abs().max()) > 0


def test_values_that_are_not_sent_stay_at_their_start():
    """`from_start`, the preset on any model: clients begin with the initial weights, however sparse the download is."""
    fresh, paper = (
        make_simulation(Engine(), Job(digits_task(), method, 3, 3))
        for method in (replace(flasc(0.05), space=tw.methods.flasc().space), flasc(0.05))
    )
    base = dict(fresh.first.base)
    assert same(fresh.weights(fresh.first), base)
    assert not same(paper.weights(paper.first), base)
    assert resolve("flasc", "digits").method.space.from_start
    assert not resolve("flasc", "text-classification").method.space.from_start
