"""ServerApp and ClientApp with Flower's messages and contexts, in one process."""

from __future__ import annotations

import json
from logging import getLogger

import pytest

from thinwire.errors import CheckpointError, ThinwireError
from thinwire.flower.apps import client_app, deployable, job_of, server_app
from thinwire.flower.grid_transport import Question, unpack
from thinwire.flower.supervisor import HOPELESS
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

flwr = pytest.importorskip("flwr.app")


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """The ids that a process of Flower has before it runs an app."""
    known = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(known, name, value)


class DirectGrid:
    """A grid whose nodes handle messages when replies are pulled."""

    def __init__(self, app, configs: dict[int, dict]) -> None:
        self.app, self.waiting = app, {}
        self.contexts = {
            node: flwr.Context(run_id=1, node_id=node, node_config=config, state=flwr.RecordDict(), run_config={})
            for node, config in configs.items()
        }

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.waiting[message.object_id] = message
            if message.metadata.message_type == "query" and unpack(Question, message.content).refusal:
                self.pull_messages([message.object_id])
        return [message.object_id for message in messages]

    def pull_messages(self, names):
        found = [self.waiting.pop(name) for name in list(names) if name in self.waiting]
        return [self.app(message, self.contexts[message.metadata.dst_node_id]) for message in found]


def lines(folder) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "client_accuracy")} for row in rows]


def serve(app, grid, path, **config):
    state = flwr.RecordDict()
    context = flwr.Context(
        run_id=1, node_id=0, node_config={}, state=state, run_config={"run-dir": str(path), **config}
    )
    app(grid=grid, context=context)


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("method", ["scaffold", "mapo"])
def test_both_apps_equal_the_simulation(method, on_disk, tmp_path):
    experiment = deployable(
        resolve(method, "digits", {"task.clients": 4, "cohort.size": 3, "local.steps": 2, "rounds": 3})
    )

    def job(config):
        return job_of(experiment, config)

    where = {"state-dir": str(tmp_path / "nodes")} if on_disk else {}
    configs = {100 + part: {"partition-id": part, "num-partitions": 2, **where} for part in range(2)}
    grid = DirectGrid(client_app(job), configs)
    serve(server_app(experiment, job), grid, tmp_path / "deployed", quorum=1.0, seconds=30.0)
    execute(experiment, tmp_path / "simulated")
    one, two = (tmp_path / run / "model.safetensors" for run in ("deployed", "simulated"))
    assert one.read_bytes() == two.read_bytes()
    assert lines(tmp_path / "deployed") == lines(tmp_path / "simulated")
    assert (tmp_path / "nodes").exists() == on_disk
    log = (tmp_path / "deployed/server.log").read_text()
    assert [line.split()[2] for line in log.splitlines() if " round " in line] == ["1/3", "2/3", "3/3"]


def test_node_with_another_method_or_duplicate_clients_is_skipped(tmp_path, capsys):
    experiment = deployable(
        resolve("fedavg", "digits", {"task.clients": 2, "cohort.size": 2, "local.steps": 1, "rounds": 1})
    )
    other = deployable(resolve("mapo", "digits", {"task.clients": 2, "cohort.size": 2, "local.steps": 1}))

    def job(config):
        return job_of(other if config and config.get("other") else experiment, config)

    configs = {
        1: {"partition-id": 0, "num-partitions": 2},
        2: {"partition-id": 1, "num-partitions": 2},
        3: {"partition-id": 1, "num-partitions": 2, "other": 1},
        4: {"partition-id": 0, "num-partitions": 1},
    }
    serve(server_app(experiment, job), DirectGrid(client_app(job), configs), tmp_path / "run", seconds=30.0)
    assert lines(tmp_path / "run")[0]["clients"] == 2
    printed = capsys.readouterr().out
    assert "node 3 is not used: it runs another method" in printed
    assert "node 4 is not used: it reports client 0, which another node has" in printed


def test_changed_settings_end_the_run_in_one_line_and_a_new_run_begins_from_its_checkpoint(tmp_path, capsys, caplog):
    """Another learning rate and more rounds: the old directory is refused for good, a new one goes on from there."""

    def served(path, rounds, lr, **config):
        options = {"task.clients": 2, "cohort.size": 2, "local.steps": 1, "rounds": rounds}
        experiment = deployable(resolve("scaffold", "digits", {**options, "method.client_opt.lr": lr}, recipe="paper"))

        def job(node_config):
            return job_of(experiment, node_config)

        states = {"state-dir": str(tmp_path / "nodes")}
        grid = DirectGrid(client_app(job), {1: {"partition-id": 0, "num-partitions": 1, **states}})
        serve(server_app(experiment, job), grid, path, seconds=30.0, **config)
        return capsys.readouterr().out

    one, two = tmp_path / "one", tmp_path / "two"
    served(one, 2, 0.1)
    with pytest.raises(CheckpointError, match="rounds = 2 there, 4 here") as error:
        served(one, 4, 0.05)
    out = capsys.readouterr().out
    assert f'from="{one}"' in out
    assert out.splitlines()[-1] == HOPELESS
    getLogger("flwr").error("ServerApp raised an exception", exc_info=error.value)  # as Flower does
    assert "ServerApp raised" in caplog.text
    assert "Traceback" not in caplog.text
    out = served(two, 4, 0.05, **{"from": str(one)})
    assert f"begins with round 2 of {one}; clients are sent the whole state" in out
    assert [row["lr"] for row in lines(two)] == [0.1, 0.1, 0.05, 0.05]
    assert lines(two)[:2] == lines(one)
    assert lines(two)[2]["drifted"] == 0
    assert "begins with" not in served(two, 4, 0.05, **{"from": str(one)})  # it has begun
    for path, rounds, words in (("three", 2, "has 2 rounds already"), ("one", 4, "another configuration")):
        with pytest.raises(ThinwireError, match=words):
            served(tmp_path / path, rounds, 0.05, **{"from": str(one)})
