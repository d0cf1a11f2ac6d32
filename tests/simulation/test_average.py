"""The averaged model: an exponential moving average of all versions is evaluated, saved and resumed."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import thinwire as tw
from tests.federation import digits_task, perceptron, same_public
from tests.flower.in_memory import FlowerServer, InMemory
from tests.parts import Half, Turns
from tests.simulation.test_engine import bits, job, play
from thinwire.core.tree import same
from thinwire.data.task import validation_fraction
from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.evaluation import averaged
from thinwire.federation.simulation import make_simulation
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.runs.build import build_job
from thinwire.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thinwire.runs.config import digest, from_table, resolve, to_table
from thinwire.runs.loop import check_blocks
from thinwire.schedules import AllBlocks
from thinwire.training.evaluation import evaluate

SGD = tw.optimizers.SGD
STAGE = tw.Stage(3, tw.spaces.LoRA(rank=2, alpha=2.0))
METHODS = {
    "fedavg": tw.Method(),
    "full download": tw.Method(download="full", down=Half()),
    "bases that are redrawn": tw.Method(space=tw.spaces.MAPO(k=40, redraw_every=2), client_opt=SGD(0.5)),
    "fedpara": tw.Method(space=tw.spaces.FedPara()),
    "two stages": tw.Method(download="full", next_stage=STAGE),
    "private blocks": tw.Method(schedule=AllBlocks(private=("3.*",))),
    "blocks in turn": tw.Method(schedule=Turns(2)),
}


def averaging(method: tw.Method, decay: float = 0.6) -> tw.Method:
    return replace(method, evaluate="average", ema_decay=decay)


def by_hand(models: list[dict], decay: float) -> dict:
    """The average of trees in float64, by the formula."""
    average = {}
    for t, model in enumerate(models, 1):
        m = min(decay, 1 - 1 / t)
        average = {name: m * average.get(name, 0.0) + (1 - m) * block.double() for name, block in model.items()}
    return average


@pytest.mark.parametrize("name", METHODS)
def test_the_average_is_that_of_all_versions(name):
    run = job(averaging(METHODS[name]), digits_task(perceptron(norm=True)), rounds=6)
    simulation, states, records = play(run, Engine(backend="vmap"))
    federation, models = simulation, []
    for state, record in zip(states[1:], records, strict=True):
        public = state.server.public
        models.append({**federation.weights(public), **public.buffers})
        weights, buffers = federation.final(state)
        expected = by_hand(models, 0.6)
        assert list({**weights, **buffers}) == list(expected)
        assert buffers
        for block, value in {**weights, **buffers}.items():
            torch.testing.assert_close(value.double(), expected[block], rtol=1e-5, atol=1e-6)
        with federation.compute():
            found = evaluate(federation.model, weights, buffers, federation.test)
        assert (record.accuracy, record.test_loss) == (found.accuracy, found.loss)
    newest = federation.weights(states[-1].server.public)
    assert any(not torch.equal(newest[block], federation.final(states[-1])[0][block]) for block in newest)
    plain, _, sent = play(replace(run, method=METHODS[name]), Engine(backend="vmap"))
    assert [r[4:7] for r in sent] == [r[4:7] for r in records], "it costs no bytes"
    assert plain.contract.schema == simulation.contract.schema, "clients need not know"


@pytest.mark.parametrize("decay", [0.0, 0.95])
@pytest.mark.parametrize("name", ["bases that are redrawn", "two stages", "private blocks"])
def test_the_average_of_one_version_is_that_version(name, decay):
    simulation, states, _ = play(job(averaging(METHODS[name], decay), digits_task(perceptron(norm=True)), rounds=1 + 3))
    public = states[1].server.public
    assert same(simulation.final(states[1])[0], simulation.weights(public))
    assert same(simulation.final(states[1])[1], dict(public.buffers))
    assert states[0].average == {}
    if decay == 0:  # then it is the newest version
        weights, newest = simulation.final(states[-1])[0], states[-1].server.public
        assert same(weights, simulation.weights(newest))


def test_the_first_versions_are_a_plain_mean():
    models = [{"w": torch.tensor([float(x)])} for x in (1, 2, 6, 7)]
    average: dict = {}
    for t, model in enumerate(models, 1):
        average = averaged(average, model, t, 0.99)
    assert average["w"].item() == pytest.approx(4.0)


def test_16_bit_weights_are_summed_in_32_bits():
    average: dict = {}
    for t in range(1, 200):
        average = averaged(average, {"w": torch.tensor([1.0 if t < 100 else 1.5], dtype=torch.bfloat16)}, t, 0.99)
    assert average["w"].dtype == torch.float32
    assert average["w"].item() == pytest.approx(1.5 - 0.5 * 0.99**100, abs=1e-3)


def test_backends_differ_by_rounding_only():
    ends = [play(job(averaging(tw.Method())), Engine(backend=name))[1][-1].average for name in ("vmap", "loop")]
    for name, block in ends[0].items():
        torch.testing.assert_close(block, ends[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "two stages", "bases that are redrawn"])
def test_a_resumed_run_has_the_same_average(name, tmp_path):
    run = job(averaging(METHODS[name]), digits_task(perceptron(norm=True)), rounds=6)
    simulation, states, records = play(run)
    save_checkpoint(tmp_path, Checkpoint(states[4]), "digest")
    state = load_checkpoint(tmp_path, "digest").state
    assert same(dict(state.average), dict(states[4].average))
    check_blocks(simulation, state)
    again = make_simulation(Engine(), run)
    for number in (4, 5):
        state, record = again.round(state)
        assert bits([record]) == bits([records[number]])
    assert same(dict(state.average), dict(states[-1].average))
    assert same_public(state.server.public, states[-1].server.public)
    for wrong in ({}, dict(list(states[4].average.items())[1:])):
        with pytest.raises(CheckpointError, match="other blocks"):
            check_blocks(simulation, states[4]._replace(average=wrong))
    with pytest.raises(CheckpointError, match="other blocks"):
        check_blocks(play(replace(run, method=METHODS[name]))[0], states[4])


def test_a_checkpoint_without_an_average_is_read_where_none_is_asked_for(tmp_path):
    simulation, states, _ = play(job())
    save_checkpoint(tmp_path, Checkpoint(states[1]), "digest")
    state = load_checkpoint(tmp_path, "digest").state
    assert state.average == {}
    check_blocks(simulation, state)


def test_the_average_is_the_result_of_a_run(tmp_path):
    torch.manual_seed(0)
    clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

    def run(method, **more):
        return tw.simulate(model, clients, method, rounds=3, test=clients[0], **same, **more)

    same = {"backend": "loop", "seed": 1, "lr": 0.1, "recipe": "paper"}
    versions = [tw.simulate(model, clients, rounds=n, **same) for n in (1, 2, 3)]
    expected = by_hand([{**one.weights, **one.buffers} for one in versions], 0.95)
    found = run(tw.Method(evaluate="average"), out=tmp_path / "run")
    saved = load_file(tmp_path / "run/model.safetensors")
    state = found.model().state_dict()
    for name, block in expected.items():
        torch.testing.assert_close(saved[name].double(), block, rtol=1e-5, atol=1e-6)
        assert torch.equal(state[name], saved[name])
    right = (found.model().eval()(clients[0][0]).argmax(1) == clients[0][1]).float().mean()
    assert found.accuracy == pytest.approx(right.item())
    assert 'evaluate = "average"' in (tmp_path / "run/config.toml").read_text()
    adapter = run(tw.Method(space=tw.spaces.LoRA(rank=1), evaluate="average"))
    with pytest.raises(ConfigError, match=r"the average has no adapter of this rank; use run\.model"):
        adapter.save_adapter(tmp_path / "adapter")


def test_clients_without_changes_of_their_own_use_the_average():
    task = digits_task()
    train, held_out = validation_fraction(task.clients, 0.3, tw.Key(0))
    task = replace(task, clients=train, client_tests=held_out)
    for method, uses_average in ((tw.Method(), True), (tw.Method(schedule=AllBlocks(private=("2.*",))), False)):
        run = job(averaging(method), task, rounds=4)
        simulation, states, records = play(run)
        federation, state = simulation, states[-1]
        model = federation.final(state)
        values = [
            evaluate(federation.model, *model, federation.train, held_out.client(i)).accuracy
            for i in range(len(held_out))
        ]
        assert (records[-1].client_accuracy == pytest.approx(sum(values) / len(values))) is uses_average
        current = play(replace(run, method=method))[2][-1].client_accuracy
        assert (records[-1].client_accuracy == current) is not uses_average


def test_where_everything_is_private_the_average_is_the_initial_model():
    method = tw.Method(schedule=AllBlocks(private=("*",)))
    simulation, states, records = play(job(averaging(method)))
    first = simulation.weights(simulation.first)
    assert same(simulation.final(states[-1])[0], first)
    assert [r.accuracy for r in records] == [r.accuracy for r in play(job(method))[2]]


@pytest.mark.parametrize("method", ["fedavg", "slora"])
def test_a_deployment_has_the_average_of_the_simulation(method):
    quick = {"task.clients": 4, "cohort.size": 3, "local.steps": 3, "rounds": 4, "method.evaluate": "average"}
    quick |= {"engine.backend": "loop", "engine.chunk": 1}
    chosen = resolve(method, "digits", quick | ({"method.next_stage.at": 2} if method == "slora" else {}))
    run = build_job(chosen)
    _, states, records = play(run, chosen.engine)
    server = FlowerServer(chosen.engine, run, InMemory(Client(chosen.engine, run)), RoundPolicy(quorum=1.0))
    state = server.start()
    for record in records:
        state, own = server.round(state)
        assert (own.accuracy, own.test_loss) == (record.accuracy, record.test_loss)
    assert same(dict(state.average), dict(states[-1].average))


def test_settings_are_checked_and_left_out_at_their_defaults():
    for wrong in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"ema_decay must be at least 0 and below 1, not"):
            tw.Method(ema_decay=wrong)
    with pytest.raises(ConfigError, match="evaluate must be one of server, client, average, not 'mean'"):
        tw.Method(evaluate="mean")
    plain, chosen = resolve("fedavg"), resolve("fedavg", overrides={"method.evaluate": "average"})
    assert not {"evaluate", "ema_decay"} & to_table(plain)["method"].keys()
    assert "ema_decay" not in to_table(chosen)["method"]
    assert digest(plain) != digest(chosen)
    other = resolve("fedavg", overrides={"method.evaluate": "average", "method.ema_decay": 0.9})
    assert from_table(to_table(other)) == other
    assert other.method.ema_decay == 0.9
