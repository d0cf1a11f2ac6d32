"""A Flower app of one's own with `compressed` and `compressed_mod`: real processes, both of Flower's APIs."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

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
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(net().state_dict()), num_rounds=8)
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


@pytest.mark.parametrize("first", ["raw", "int8"])
def test_a_client_that_lost_its_state_and_a_damaged_reply(first, capsys, monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):  # as in a process of Flower
        monkeypatch.setattr(TaskIdentity, name, 1)
    app = ClientApp(mods=[compressed_mod])
    trained = []

    @app.train()
    def train(message, context):
        arrays = {name: one.numpy() for name, one in message.content["arrays"].items()}
        trained.append(arrays)
        new = {"w": arrays["w"] + np.float32(context.node_id), "n": arrays["n"] + 1}
        content = {"arrays": ArrayRecord({name: Array(np.asarray(one)) for name, one in new.items()})}
        return Message(RecordDict({**content, "m": MetricRecord({"num-examples": 5})}), reply_to=message)

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
