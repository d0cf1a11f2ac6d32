"""Factorized and personal methods by preset name, over whole runs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.federation import SIZES, Federation, digits, digits_task, records_of, schema_of
from thinwire.core.key import Key
from thinwire.core.tree import same
from thinwire.data.examples import Arrays
from thinwire.data.partition import Assignment
from thinwire.data.task import Task, validation_fraction
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.models.mlp import mlp
from thinwire.runs.config import update
from thinwire.runs.presets import preset
from thinwire.wire import message as wire
from thinwire.wire.message import unpack_weight

PRESETS = (
    "fedpara",
    "fedpara-paper",
    "pfedpara",
    "lowrank",
    "pufferfish",
    "factorized-fl",
    "factorized-fl-u",
    "fedper",
    "local",
)
# parameters that a client sends of the network for digits (4,810 weights)
SENT = {
    "fedavg": 4810,
    "fedpara": 2 * 9 * 128 + 640 + 74,  # the head is dense
    "fedpara-paper": 2 * 9 * 128 + 2 * 4 * 74 + 74,
    "pfedpara": 12 * 128 + 4 * 74 + 74,
    "lowrank": 18 * 128 + 8 * 74 + 74,
    "pufferfish": 16 * 128 + 640 + 74,
    "factorized-fl": 4810 + 128 + 74,
    "factorized-fl-u": 64 + 64 + 74,
    "fedper": 64 * 64 + 64,
    "local": 0,
}


@pytest.fixture
def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp()


def named(name: str) -> tw.Method:
    return update(tw.Method(), preset("methods", name).table.get("method", {}))


@pytest.mark.parametrize("name", ["fedpara", "pfedpara", "pufferfish", "factorized-fl-u", "local"])
def test_preset_learns_digits(name, network):
    x, y = digits()
    clients = [(x[i : i + 60], y[i : i + 60]) for i in range(0, 480, 60)]
    run = tw.simulate(network, clients, name, rounds=6, test=(x[-300:], y[-300:]), local=tw.Local(epochs=3, batch=16))
    losses = [record.loss for record in run.history]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.9 * losses[0]
    assert run.backend == "vmap"
    if name not in ("pfedpara", "factorized-fl-u", "fedper", "local"):  # the server's model is evaluated
        assert run.accuracy > 0.4
    with torch.no_grad():  # a plain module with the composed weights
        outputs = run.model()(x[-300:])
    assert float((outputs.argmax(1) == y[-300:]).float().mean()) == pytest.approx(run.accuracy, abs=1e-6)
    loss = torch.nn.functional.cross_entropy(outputs, y[-300:])
    assert float(loss) == pytest.approx(run.history[-1].test_loss, rel=1e-4)


@pytest.mark.parametrize("name", ["fedavg", *PRESETS])
def test_messages_have_four_bytes_for_each_value_plus_a_header(name, network):
    federation = Federation(named(name), digits_task(network))
    contract = federation.contract
    assert contract.sendable.size == SENT[name]
    for client, data in federation.round([0, 1]).items():
        body = wire.unpack_body(wire.unpack(data, contract.schema.sent_by(client)).bodies[0], contract.schema)
        assert len(body.fields[wire.COORDS]) == 4 * SENT[name]
        assert unpack_weight(body.fields[wire.WEIGHT]) == SIZES[client]
        assert len(data) - 4 * SENT[name] <= 20
    down = federation.download(2)
    assert len(down) - 4 * SENT[name] <= 20


@pytest.mark.parametrize("name", ["pfedpara", "factorized-fl-u", "fedper", "local"])
def test_private_blocks_are_never_sent(name, network):
    federation = Federation(named(name), digits_task(network))
    private = federation.method.schedule.never(federation.contract.coords)
    assert private
    for _ in range(2):
        up = federation.round([0, 1])
        down = {client: federation.download(client) for client in (0, 1, 2)}
        for client, data in (*up.items(), *down.items()):
            schema = schema_of(federation.contract, data, client)
            body = wire.unpack_body(wire.unpack(data, schema).bodies[0], schema)
            assert not private & body.plan
            for block in federation.states[client].unsent.values():
                assert block.contiguous().numpy().tobytes() not in data
    assert federation.states[0].unsent.keys() == private


def test_local_equals_training_without_federation(network):
    together, alone = (Federation(named("local"), digits_task(network)) for _ in range(2))
    for _ in range(2):
        together.round([0, 1, 2])
        alone.round([1])
    for name, block in alone.states[1].unsent.items():
        assert torch.equal(together.states[1].unsent[name], block)
    assert torch.equal(together.weights()["fc1.weight"], together.first.base["fc1.weight"])


def test_sparse_residual_is_sent_by_value_and_equals_the_residual_of_the_evaluated_model(network):
    """Comm = #u + #v + nnz(mu), plus positions. Clients download the model that is tested."""

    def sparse(value):
        codec = tw.codecs.ByBlock((("*/mu", tw.codecs.Threshold(value)), ("*", tw.codecs.Raw())))
        penalty = tw.optimizers.L1L2(l1=value, coords=("*/mu",))
        return tw.Method(
            tw.spaces.FactorizedFL(prune=value),
            up=codec,
            down=codec,
            download="full",
            upload="weights",
            penalty=penalty,
        )

    assert sparse(5e-4) == named("factorized-fl-sparse")
    method = sparse(0.05)  # large enough for sparsity after a few steps
    federation = Federation(method, digits_task(network))
    for _ in range(2):
        uploads = federation.round([0, 1])
    contract, server = federation.contract, federation.server
    up, residuals = contract.up(0), 4810 - 74
    others = contract.sendable.size - residuals
    for client, data in uploads.items():
        body = wire.unpack_body(wire.unpack(data, contract.schema.sent_by(client)).bodies[0], contract.schema)
        got = up.decode(body.fields[wire.COORDS], contract.code, contract.peer(server.public.version - 1, client))
        mu = torch.cat([block.flatten() for name, block in got.items() if name.endswith("/mu")])
        sent = int(mu.count_nonzero())
        assert 0 < sent < 0.9 * residuals
        assert mu[mu != 0].abs().min() >= 0.05
        positions = math.log2(math.comb(residuals, sent)) / 8
        assert 0 <= len(data) - 4 * (others + sent) - positions < 64 + 0.05 * positions
    federation.download(2)
    seen, full = federation.public[2], server.public.coords
    assert any((block != 0).sum() < (full[name] != 0).sum() for name, block in seen.coords.items())
    basis = contract.basis(seen.version, "cpu")
    assert same(federation.weights(seen), method.space.evaluation_weights(server.public.base, basis, full))


def test_client_models_are_tested_after_pruning(network):
    """With a threshold above all values no residual is left: a client model is the product of two vectors."""
    x, y = digits()
    clients = Assignment(np.arange(200), np.arange(0, 201, 50))
    train, held_out = validation_fraction(clients, 0.2, Key(0))
    task = Task(network, Arrays(x[:200], y[:200]), train, client_tests=held_out)
    accuracies = []
    for prune in (0.0, 1e6):
        method = replace(named("factorized-fl-u"), space=tw.spaces.FactorizedFL(prune=prune))
        job = Job(task, method, rounds=2, cohort=4, local=tw.Local(epochs=16, batch=20))
        *_, last = records_of(Engine(), job)
        assert last.bytes_up < 4 * 4 * (SENT["factorized-fl-u"] + 8)
        accuracies.append(last.client_accuracy)
    assert accuracies[0] > 0.6
    assert accuracies[1] < accuracies[0] - 0.2
