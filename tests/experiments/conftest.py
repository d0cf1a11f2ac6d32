"""Run directories for tests: real ones, trained once, and hand-written ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from thinwire.experiments.config import resolve
from thinwire.experiments.execute import default_folder, execute


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory) -> Path:
    """A folder with two methods and two seeds on digits."""
    folder = tmp_path_factory.mktemp("real") / "runs"
    for method in ("fedavg", "mapo"):
        for seed in (0, 1):
            experiment = resolve(method, "digits", {"rounds": 5, "seed": seed, "local.epochs": 1})
            execute(experiment, default_folder(experiment, folder))
    return folder


@pytest.fixture
def write_run(tmp_path):
    """Write a run directory by hand: `write_run("name", best=0.9, up=1000)`."""

    def write(
        name, *, folder="runs", seed=0, rounds=30, best=0.9, up=1000, catchup=0, layers=None, finished=True, **more
    ):
        path = tmp_path / folder / f"{name.replace(' ', '-').replace('/', '-')}-s{seed}"
        path.mkdir(parents=True)
        settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
        config = f"name = {json.dumps(name)}\nscript = 'own.py'\nseed = {seed}\nrounds = {rounds}\n{settings}"
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
            lines.append(json.dumps(line) + "\n")
        (path / "metrics.jsonl").write_text("".join(lines))
        if finished:
            (path / "summary.json").write_text(json.dumps({"parameters": 1234, "layers": layers or []}))
        return path

    return write
