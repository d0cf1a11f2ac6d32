"""Trackers: the values of a record, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.trackers import scalars, tracker


def clients():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, generator=generator), torch.arange(8) % 2) for _ in range(3)]


def test_on_round_gets_plain_values():
    lines = []
    run = tw.simulate(nn.Linear(3, 2), clients(), rounds=2, on_round=lambda record: lines.append(scalars(record)))
    assert len(lines) == 2
    assert sum(line["bytes_total"] for line in lines) == run.bytes_total
    assert "accuracy" not in lines[0]  # there were no test examples
    assert all(isinstance(value, int | float) for line in lines for value in line.values())


def test_an_unknown_tracker_is_refused_and_none_does_nothing(tmp_path):
    with pytest.raises(tw.errors.UnknownName, match="did you mean 'tensorboard'"), tracker("tensorbord", tmp_path):
        pass
    with tracker(None, tmp_path) as on_round:
        on_round(None)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_without_tensorboard_the_error_names_the_package(tmp_path):
    with pytest.raises(tw.ConfigError, match="pip install tensorboard"), tracker("tensorboard", tmp_path):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="pip install tensorboard")
def test_tensorboard_reads_every_round_once_after_two_runs(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for _ in range(2):
            with tracker("tensorboard", tmp_path) as on_round:
                run = tw.simulate(nn.Linear(3, 2), clients(), rounds=3, on_round=on_round)
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    sent = events.Scalars("bytes_so_far")
    assert [event.step for event in sent] == [1, 2, 3]
    assert sent[-1].value == run.bytes_total


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed")
def test_without_mlflow_the_error_names_the_package(tmp_path):
    with pytest.raises(tw.ConfigError, match="pip install mlflow"), tracker("mlflow", tmp_path):
        pass


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="pip install mlflow")
def test_mlflow_has_every_round_once_after_an_interrupted_run(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/board.db")
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sites")
        monkeypatch.chdir(tmp_path)
        experiment = resolve("fedavg", "digits", {"rounds": 4, "local.steps": 1, "checkpoint.every": 1})

        def interrupted() -> None:
            with tracker("mlflow", tmp_path / "run") as on_round:

                def interrupt(record):
                    on_round(record)
                    if record.round == 2:
                        raise KeyboardInterrupt

                execute(experiment, tmp_path / "run", on_round=interrupt)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        client = MlflowClient()
        (found,) = client.search_runs([client.get_experiment_by_name("sites").experiment_id])
        assert found.info.status == "KILLED"
        with tracker("mlflow", tmp_path / "run") as on_round:
            summary = execute(experiment, tmp_path / "run", resume=True, on_round=on_round)
        (found,) = client.search_runs([client.get_experiment_by_name("sites").experiment_id])
        sent = client.get_metric_history(found.info.run_id, "bytes_so_far")
        assert [one.step for one in sent] == [1, 2, 3, 4]
        assert sent[-1].value == summary["bytes_total"]
        assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
        assert client.get_metric_history(found.info.run_id, "accuracy")[-1].value == summary["final_accuracy"]
