"""Trackers: the values of a record, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.runs.trackers import TRACKERS, scalars, tracker


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


def test_an_unknown_tracker_is_refused(thinwire):
    code, _, err = thinwire("run", "fedavg", "--log", "tensorbord")
    assert code == 2
    assert "unknown tracker 'tensorbord': did you mean 'tensorboard'" in err


@pytest.mark.parametrize("name", list(TRACKERS))
def test_without_its_package_the_error_names_it(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(tw.ConfigError, match=f"pip install {name}"), tracker(name, tmp_path):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_run_goes_on_without_a_tracker_that_fails(tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://here")
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.warns(UserWarning, match=f"{name} has no rounds from 1 on"), tracker(name, tmp_path) as on_round:
        assert len(tw.simulate(nn.Linear(3, 2), clients(), rounds=3, on_round=on_round).history) == 3


def test_tensorboard_reads_every_round_once_after_two_runs(tmp_path):
    pytest.importorskip("tensorboard")
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


def test_mlflow_has_a_run_for_each_row_of_a_comparison(tmp_path, monkeypatch, thinwire):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    words = ("compare", "fedavg", "mapo", "--rounds", "2", "--log", "mlflow", "-q", "--out", str(tmp_path / "runs"))
    assert thinwire(*words)[0] == 0
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = {one.info.run_name.partition("-")[0]: one for one in client.search_runs(["0"])}
    assert {name: one.info.status for name, one in found.items()} == {"fedavg": "FINISHED", "mapo": "FINISHED"}
    for name, one in found.items():
        (path,) = (tmp_path / "runs").glob(f"{name}-*/")
        sent = client.get_metric_history(one.info.run_id, "bytes_so_far")
        assert [value.step for value in sent] == [1, 2]
        assert sent[-1].value == tw.load_run(path).bytes_total


def test_wandb_writes_offline_runs(tmp_path):
    pytest.importorskip("wandb")
    path = tmp_path / "run"  # in a process of its own: wandb reads its settings once
    words = [sys.executable, "-m", "thinwire", "run", "mapo", "--rounds", "2", "--log", "wandb", "-q"]
    subprocess.run(
        [*words, "--out", str(path)], env={**os.environ, "WANDB_MODE": "offline"}, check=True, capture_output=True
    )
    (file,) = (path / "wandb").glob("offline-run-*/*.wandb")
    assert file.read_bytes().count(b"bytes_so_far") >= 2
    assert str(tw.load_run(path).bytes_total).encode() in file.read_bytes()


def test_a_tracker_needs_a_folder():
    pytest.importorskip("tensorboard")
    with pytest.raises(tw.ConfigError, match="needs the folder of the run"):
        tw.run("mapo", "digits", rounds=1, log="tensorboard")
