"""Trackers: the values of a record, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.runs.trackers import scalars, tensorboard


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


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_without_tensorboard_the_error_names_the_package(tmp_path):
    with pytest.raises(tw.ConfigError, match="pip install tensorboard"), tensorboard(tmp_path):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="pip install tensorboard")
def test_a_run_goes_on_without_a_tracker_that_fails(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="tensorboard has no rounds from 1 on"), tensorboard(tmp_path) as on_round:
        assert len(tw.simulate(nn.Linear(3, 2), clients(), rounds=3, on_round=on_round).history) == 3


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="pip install tensorboard")
def test_tensorboard_reads_every_round_once_after_two_runs(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for _ in range(2):
            with tensorboard(tmp_path) as on_round:
                run = tw.simulate(nn.Linear(3, 2), clients(), rounds=3, on_round=on_round)
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
    sent = events.Scalars("bytes_so_far")
    assert [event.step for event in sent] == [1, 2, 3]
    assert sent[-1].value == run.bytes_total
