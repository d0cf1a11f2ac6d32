"""Settings and fixtures for all tests.

Hypothesis draws the same examples on every machine and has no time limit.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import settings

from thinwire.cli.app import main
from thinwire.runs.config import resolve
from thinwire.runs.execute import default_folder, execute

settings.register_profile("thinwire", max_examples=40, deadline=None, derandomize=True, database=None)
settings.load_profile("thinwire")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Examples are in the docstrings of the package: those of tests are not searched."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.fixture(autouse=True)
def seeded():
    """Draws of a test do not depend on the tests before it, whose order depends on the time that they take."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def three_cores():
    """Torch uses three threads on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory) -> Path:
    """A folder of runs on digits: two methods, two seeds each."""
    folder = tmp_path_factory.mktemp("real") / "runs"
    for method in ("fedavg", "mapo"):
        for seed in (0, 1):
            experiment = resolve(method, "digits", {"rounds": 5, "seed": seed, "local.epochs": 1})
            execute(experiment, default_folder(experiment, folder))
    return folder


@pytest.fixture
def write_run(tmp_path):
    """Write a run directory without training: `write_run("name", best=0.9, up=1000)`.

    `metrics` maps a metric to its final value; `clients_eval` is the distribution of accuracy over clients.
    """

    def write(
        name,
        *,
        folder="runs",
        seed=0,
        rounds=30,
        best=0.9,
        up=1000,
        catchup=0,
        layers=None,
        finished=True,
        metrics=None,
        clients_eval=None,
        **more,
    ):
        path = tmp_path / folder / f"{name.replace(' ', '-').replace('/', '-')}-s{seed}"
        path.mkdir(parents=True)
        settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
        config = f"name = {json.dumps(name)}\nscript = 'mine.py'\nseed = {seed}\nrounds = {rounds}\n{settings}"
        config += '[task]\nkind = "letters"\nclients = 20\nmodel = { kind = "Net" }\n[cohort]\nsize = 10\n'
        (path / "config.toml").write_text(config)
        done = rounds if finished else rounds // 2
        lines = []
        for i in range(1, done + 1):
            accuracy = best * (1 - math.exp(-6 * i / rounds)) - 0.01 * seed
            line = {"round": i, "loss": 2 / i, "accuracy": accuracy, "test_loss": 1 / i, "clients": 10, "seconds": 0.5}
            line |= {
                "bytes_up": up,
                "bytes_down": up,
                "bytes_catchup": catchup if i > 1 else 0,
                "client_accuracy": None,
            }
            if metrics is not None:
                line["metrics"] = {key: value * i / done for key, value in metrics.items()}
            if clients_eval is not None:
                line["clients_eval"] = clients_eval
            lines.append(json.dumps(line) + "\n")
        (path / "metrics.jsonl").write_text("".join(lines))
        if finished:
            summary = {"parameters": 1234, "layers": layers or []}
            summary |= {} if metrics is None else {"final_metrics": metrics}
            summary |= {} if clients_eval is None else {"final_clients_eval": clients_eval}
            (path / "summary.json").write_text(json.dumps(summary))
        return path

    return write


@pytest.fixture
def thinwire(monkeypatch, capsys, tmp_path):
    """Call the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["thinwire", *words])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
