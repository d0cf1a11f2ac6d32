"""A Flower app of one's own with `compressed` and `compressed_mod`: real processes, both of Flower's APIs."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as ClassicFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity

from thinwire.errors import ConfigError
from thinwire.flower.compressed import compressed, compressed_mod
from thinwire.flower.local import CONNECTION, Processes, start_nodes, start_superlink

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "own"
version = "1.0.0"
description = ""
dependencies = []

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "own.server_app:app"
clientapp = "own.client_app:app"

[tool.flwr.app.config]
"""

TASK = """
import numpy as np, torch
from sklearn.datasets import load_digits
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )

def data(part, parts):
    found = load_digits()
    x, y = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    return (x[1500:], y[1500:]) if part < 0 else (x[part:1500:parts], y[part:1500:parts])

def train(model, x, y):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        for at in range(0, len(x) - 1, 32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[at : at + 32]), y[at : at + 32]).backward()
            optimizer.step()

def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
"""

CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from own.task import accuracy, data, net, train
{IMPORT}
app = ClientApp({MODS})

@app.train()
def fit(message, context):
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data(context.node_config["partition-id"], context.node_config["num-partitions"])
    train(model, x, y)
    metrics = MetricRecord({{"num-examples": len(x)}})
    return Message(RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}}), reply_to=message)

@app.evaluate()
def evaluate(message, context):
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data(context.node_config["partition-id"], context.node_config["num-partitions"])
    metrics = MetricRecord({{"accuracy": accuracy(model, x, y), "num-examples": len(x)}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)
"""

SERVER = """
import json, os
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from own.task import accuracy, data, net
{IMPORT}
app = ServerApp()

@app.main()
def main(grid, context):
    strategy = FedAvg(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2)
    {WRAP}
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(net().state_dict()), num_rounds=8, timeout=60)
    model = net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    metrics = {{n: dict(one) for n, one in result.train_metrics_clientapp.items()}}
    facts = {{"accuracy": accuracy(model, *data(-1, 1)), "metrics": metrics}}
    open(os.environ["RESULT"], "w").write(json.dumps(facts))
"""

CLASSIC_CLIENT = """
import torch
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from own.task import accuracy, data, net, train
{IMPORT}
class Client(NumPyClient):
    def __init__(self, part, parts):
        self.model, self.data = net(), data(part, parts)

    def load(self, arrays):
        names = self.model.state_dict()
        self.model.load_state_dict({{name: torch.tensor(one) for name, one in zip(names, arrays)}})

    def fit(self, arrays, config):
        self.load(arrays)
        train(self.model, *self.data)
        return [one.numpy() for one in self.model.state_dict().values()], len(self.data[0]), {{}}

    def evaluate(self, arrays, config):
        self.load(arrays)
        return 0.0, len(self.data[0]), {{"accuracy": accuracy(self.model, *self.data)}}

def client_fn(context):
    return Client(context.node_config["partition-id"], context.node_config["num-partitions"]).to_client()

app = ClientApp(client_fn=client_fn{MODS})
"""

CLASSIC_SERVER = """
import json, os
import torch
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from own.task import accuracy, data, net
{IMPORT}
metrics = {{}}

class Noted(FedAvg):
    def evaluate(self, number, parameters):
        model = net()
        arrays = zip(model.state_dict(), parameters_to_ndarrays(parameters))
        model.load_state_dict({{name: torch.tensor(one) for name, one in arrays}})
        facts = {{"accuracy": accuracy(model, *data(-1, 1)), "metrics": metrics}}
        open(os.environ["RESULT"], "w").write(json.dumps(facts))

def server_fn(context):
    first = ndarrays_to_parameters([one.numpy() for one in net().state_dict().values()])
    strategy = Noted(initial_parameters=first, min_fit_clients=2, min_available_clients=2)
    {WRAP}
    inner = strategy.aggregate_fit
    def aggregate_fit(number, results, failures):
        assert not failures, failures
        arrays, metrics[number] = inner(number, results, failures)
        return arrays, metrics[number]
    strategy.aggregate_fit = aggregate_fit
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=8))

app = ServerApp(server_fn=server_fn)
"""

IMPORT = "from thinwire.flower.compressed import compressed, compressed_mod\n"
WRAP = 'strategy = compressed(strategy, up="topk+int4", down="int4")'


def write(folder: Path, client: str, server: str, with_us: bool) -> None:
    (folder / "own").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "own/__init__.py").write_text("")
    (folder / "own/task.py").write_text(TASK)
    comma = ", " if "client_fn" in client else ""
    words = {"IMPORT": IMPORT if with_us else "", "MODS": f"{comma}mods=[compressed_mod]" if with_us else ""}
    (folder / "own/client_app.py").write_text(client.format(**words))
    (folder / "own/server_app.py").write_text(server.format(**words, WRAP=WRAP if with_us else "pass"))


def run(home: Path, app: Path) -> dict:
    """What the server wrote at the end."""
    home.mkdir()
    result = home / "result.json"
    os.environ["RESULT"] = str(result)
    with Processes(home, None) as processes:
        link = start_superlink(processes, 2)
        start_nodes(processes, link, link.port, home)
        process = processes.start("run", ["flwr", "run", str(app), CONNECTION, "--stream"])
        end = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        logs = "\n".join("\n".join(processes.log(name)) for name in ("run", "superlink", "node-0", "node-1"))
        assert result.is_file(), logs[-4000:]
        return json.loads(result.read_text()) | {"log": logs}


class Grid:
    """Brings messages to a ClientApp of this process; contexts are those of its nodes."""

    def __init__(self, app) -> None:
        self.app, self.contexts, self.spoil = app, {}, lambda node, reply: reply
        for node in (1, 2):
            self.contexts[node] = Context(7, node, {"partition-id": node - 1, "num-partitions": 2}, RecordDict(), {})

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = "1"
            reply = self.app(message, self.contexts[node])
            yield self.spoil(node, reply)


@pytest.fixture(autouse=True)
def _in_a_process_of_flower(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def adding_app(mods, trained=None):
    """Adds the number of its node to `w`, and 1 to others."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        arrays = {name: one.numpy() for name, one in message.content["arrays"].items()}
        if trained is not None:
            trained.append(arrays)
        new = {name: one + one.dtype.type(context.node_id if name == "w" else 1) for name, one in arrays.items()}
        content = {"arrays": ArrayRecord({name: Array(np.asarray(one)) for name, one in new.items()})}
        return Message(RecordDict({**content, "m": MetricRecord({"num-examples": 5})}), reply_to=message)

    return app


@pytest.mark.parametrize("first", ["raw", "int8"])
def test_a_client_that_lost_its_state_and_a_damaged_reply(first, capsys):
    trained = []
    app = adding_app([compressed_mod], trained)
    grid = Grid(app)
    strategy = compressed(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2), "int8", "int8", first
    )

    def spoil(node, reply):
        rounds = len(trained) // 2
        if rounds == 2 and node == 2:
            grid.contexts[1].state = RecordDict()  # node 1 starts again without what it had
        if rounds == 4 and node == 2:
            (array,) = reply.content["arrays"].values()
            array.data = array.data[:-1]
        return reply

    grid.spoil = spoil
    start = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)
    arrays = ArrayRecord({"w": Array(start), "n": Array(np.array(0))})
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=5)
    final = result.arrays.to_numpy_ndarrays()
    assert len(trained) == 10
    assert np.abs(final[0] - start - (4 * 1.5 + 1.0)).max() < 0.05  # of the fourth round, node 1 alone
    assert (first == "raw") == bool((trained[0]["w"] == start).all())
    assert all((trained[i][name] == trained[i + 1][name]).all() for i in range(0, 10, 2) for name in "wn")
    sizes = [dict(one) for one in result.train_metrics_clientapp.values()]
    whole = 4000 if first == "raw" else 1000
    assert 3 * whole > sizes[0]["bytes-down"] > 1.8 * whole > 8 * sizes[1]["bytes-down"]
    assert 2 * whole > sizes[2]["bytes-down"] > 0.9 * whole  # all arrays, to node 1
    assert all(0 < 20 * one["bytes-up"] < 8000 for one in sizes)
    assert re.search(r"the reply of node 2 is refused: the message is damaged", capsys.readouterr().out)


def test_differential_privacy_of_flower_beside_codecs():
    """Noise of the server is calibrated to what it clipped itself; what clients clipped is changed by codecs."""
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    with pytest.raises(ConfigError, match="clip on the server instead"):
        compressed(DifferentialPrivacyClientSideFixedClipping(inner, 1.0, 5.0, 2))
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 1e-9, clipping_norm=5.0, num_sampled_clients=2)
    assert moved(strategy, [compressed_mod]) == pytest.approx(3 * 5.0, rel=0.05)  # updates have norms of 31 and 62


def test_local_differential_privacy_is_applied_before_the_codec():
    noisy = LocalDpMod(clipping_norm=5.0, sensitivity=1e-9, epsilon=1.0, delta=1e-5)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    assert moved(strategy, [compressed_mod, noisy]) == pytest.approx(3 * 5.0, rel=0.05)


def test_a_strategy_around_ours_and_mods_in_the_other_order_are_refused():
    inner = compressed(FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2))
    start = ArrayRecord({"w": Array(np.ones((20, 50), np.float32))})
    around = DifferentialPrivacyClientSideFixedClipping(inner, 1.0, 5.0, 2)
    with pytest.raises(ConfigError, match="make `compressed` the outermost"):
        around.start(grid=Grid(adding_app([compressed_mod, fixedclipping_mod])), initial_arrays=start, num_rounds=1)
    noisy = LocalDpMod(clipping_norm=5.0, sensitivity=1e-9, epsilon=1.0, delta=1e-5)
    for mod, why in ((noisy, "expects the keys"), (fixedclipping_mod, "expects exactly one ConfigRecord")):
        grid, reasons = Grid(adding_app([mod, compressed_mod])), []
        grid.spoil = lambda _, reply, reasons=reasons: reasons.append(reply.error.reason) or reply
        inner.start(grid=grid, initial_arrays=start, num_rounds=1)
        assert len(reasons) == 2
        assert all(why in one for one in reasons)


@pytest.mark.parametrize("mods", [[secaggplus_mod], [compressed_mod, secaggplus_mod]], ids=len)
def test_secure_aggregation_of_flower_is_refused(mods):
    """Its workflow sends messages itself: without us it trains, with us it ends in one line."""

    class Adding(NumPyClient):
        def fit(self, arrays, config):
            return [one + 1.0 for one in arrays], 5, {}

    grid = Grid(ClientApp(client_fn=lambda _: Adding().to_client(), mods=mods))
    grid.run, bring = SimpleNamespace(run_id=7), grid.send_and_receive
    grid.send_and_receive = lambda given, timeout=None: list(bring([copy.deepcopy(one) for one in given]))
    start = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)
    options = {"min_fit_clients": 2, "min_available_clients": 2, "fraction_evaluate": 0.0}
    strategy: object = ClassicFedAvg(initial_parameters=ndarrays_to_parameters([start]), **options)
    if len(mods) == 2:
        strategy = compressed(strategy)
    context = LegacyContext(Context(7, 0, {}, RecordDict(), {}), ServerConfig(num_rounds=2), strategy)
    flow = DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(1.0, 0.9, clipping_range=30.0))
    if len(mods) == 2:
        with pytest.raises(ConfigError, match=r"SecAgg.*method.secure_aggregation=true"):
            flow(grid, context)
        return
    flow(grid, context)
    (arrays,) = context.state.array_records.values()
    assert np.abs(arrays.to_numpy_ndarrays()[0] - start - 2.0).max() < 0.01


def moved(strategy, mods):
    """The distance from start to end."""
    start = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)
    options = {"initial_arrays": ArrayRecord({"w": Array(start)}), "num_rounds": 3}
    result = compressed(strategy, "int8", "int8").start(grid=Grid(adding_app(mods)), **options)
    return np.linalg.norm(result.arrays.to_numpy_ndarrays()[0] - start)


@pytest.mark.slow
def test_a_node_that_was_killed_takes_part_again_and_a_new_server_starts_cleanly(tmp_path):
    write(tmp_path / "thin", CLIENT, SERVER, with_us=True)
    home = tmp_path / "home"
    home.mkdir()
    os.environ["RESULT"] = str(home / "result.json")
    with Processes(home, None) as processes:
        link = start_superlink(processes, 2)
        (node, _) = start_nodes(processes, link, link.port, home)
        command = ["flwr", "run", str(tmp_path / "thin"), CONNECTION, "--stream"]

        def until(name, text, process):
            end = time.monotonic() + 900
            while text not in "\n".join(processes.log(name)):
                assert process.poll() is None, processes.log(name)[-40:]
                assert time.monotonic() < end
                time.sleep(0.1)

        process = processes.start("run", command)
        until("run", "[ROUND 3/8]", process)
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
        processes.start("node-again", [str(word) for word in node.args], {"FLWR_HOME": str(home / "node-0.home")})
        process.wait(900)
        assert (home / "result.json").is_file(), processes.log("run")[-60:]
        found = json.loads((home / "result.json").read_text())
        assert found["accuracy"] > 0.85
        down = [one["bytes-down"] for one in found["metrics"].values()]
        assert sum(size > down[0] / 4 for size in down) == 2, down  # everything to both, and once more to one

        (home / "result.json").unlink()
        process = processes.start("killed", command)
        until("killed", "[ROUND 3/8]", process)
        commands = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in processes._alive()}
        servers = [one for one, words in commands.items() if b"serverapp" in words]
        assert servers, commands
        for one in servers:
            os.kill(one, signal.SIGKILL)
        process.kill()
        process = processes.start("last", command)
        process.wait(900)
        assert (home / "result.json").is_file(), processes.log("last")[-60:]
        assert json.loads((home / "result.json").read_text())["accuracy"] > 0.85
        assert "refused" not in "\n".join(processes.log("last"))


@pytest.mark.slow
@pytest.mark.parametrize("api", ["messages", "classic"])
def test_an_app_of_flower_with_two_lines_has_the_same_accuracy_at_a_twentieth_of_the_bytes(api, tmp_path):
    client, server = (CLIENT, SERVER) if api == "messages" else (CLASSIC_CLIENT, CLASSIC_SERVER)
    write(tmp_path / "plain", client, server, with_us=False)
    write(tmp_path / "thin", client, server, with_us=True)
    plain, thin = run(tmp_path / "a", tmp_path / "plain"), run(tmp_path / "b", tmp_path / "thin")
    assert thin["accuracy"] > plain["accuracy"] - 0.02
    assert "Traceback" not in thin["log"]
    assert len(thin["metrics"]) == 8
    everything = 4 * (64 * 256 + 256 * 256 + 256 * 10)  # of each of two clients, with every message
    for number, sizes in list(thin["metrics"].items())[1:]:  # in the first round, clients receive everything
        assert 0 < 25 * sizes["bytes-up"] < 2 * everything, number
        assert 0 < 20 * (sizes["bytes-up"] + sizes["bytes-down"]) < 6 * everything, number  # evaluations, too
