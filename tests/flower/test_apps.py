"""Flower apps: generated files are complete, and node configurations are checked."""

from __future__ import annotations

import json
import sys

import pytest

from thinwire.errors import CheckpointError, ConfigError
from thinwire.flower import INSTALL, need_flower
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable, job_of, read_experiment, run_name
from thinwire.flower.sites import clients_of_node
from thinwire.runs.config import resolve
from thinwire.runs.toml import loads


def test_missing_flower_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)  # even if it is installed
    with pytest.raises(ConfigError, match="thinwire\\[flower\\]") as error:
        need_flower()
    assert INSTALL in str(error.value)
    assert "\n" not in str(error.value)


def test_app_folder_is_complete(tmp_path):
    experiment = resolve("mapo+int8", "digits", {"task.clients": 4, "cohort.size": 4})
    files = {str(path.relative_to(tmp_path / "app")) for path in write_app(experiment, tmp_path / "app")}
    code = {f"federated/{name}.py" for name in ("__init__", "jobs", "server_app", "client_app")}
    assert files == {"pyproject.toml", "federated/experiment.toml", *code}
    for file in code:
        compile((tmp_path / "app" / file).read_text(), file, "exec")
    table = loads((tmp_path / "app/pyproject.toml").read_text(), "pyproject.toml")
    parts = table["tool"]["flwr"]["app"]["components"]
    assert parts == {"serverapp": "federated.server_app:app", "clientapp": "federated.client_app:app"}
    assert table["project"]["name"] == "mapo-int8-digits"
    read = read_experiment(tmp_path / "app/federated/experiment.toml")
    assert read == deployable(experiment)
    assert len(job_of(read, {"partition-id": 0}).task.clients) == 4


def test_folder_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        write_app(resolve("fedavg", "digits"), tmp_path)


@pytest.mark.parametrize("config", [{}, {"partition-id": 4, "num-partitions": 4}, {"partition-id": "0"}])
def test_node_needs_a_partition_id(config):
    with pytest.raises(ConfigError, match="partition-id"):
        clients_of_node(config, 4)


def test_every_client_is_on_one_node():
    clients = [
        client for part in range(3) for client in clients_of_node({"partition-id": part, "num-partitions": 3}, 10)
    ]
    assert sorted(clients) == list(range(10))


def test_run_name_is_kept_only_by_a_run_with_checkpoints(tmp_path):
    first = run_name(tmp_path, {"nodes": 2})
    assert json.loads((tmp_path / "deployment.json").read_text()) == {"run": first, "nodes": 2}
    assert run_name(tmp_path, {"nodes": 2}) != first  # no checkpoint: clients start from the initial weights
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/round-000001.json").write_text("{}")
    again = run_name(tmp_path, {"nodes": 2})
    assert again == run_name(tmp_path, {"nodes": 2})
    (tmp_path / "deployment.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_name(tmp_path, {"nodes": 2})


def test_name_with_quotes_is_not_executed(tmp_path):
    name = '"""; raise SystemExit(1)  # \'{x}'
    write_app(resolve("fedavg", "digits", {"name": name}), tmp_path / "app")
    table = loads((tmp_path / "app/pyproject.toml").read_text(), "pyproject.toml")
    assert table["project"]["description"] == f"{name} on digits"
    code = (tmp_path / "app/federated/__init__.py").read_text()
    space: dict = {}
    exec(compile(code, "__init__.py", "exec"), space)
    assert space["__doc__"] == f"{name} on digits, as a Flower app."
