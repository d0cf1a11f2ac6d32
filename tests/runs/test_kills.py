"""Runs that are killed: the backend stays the same, and a resumed run has the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.federation.federation import Federation
from thinwire.federation.simulated import SimulatedClients
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.records import rounds_in
from thinwire.runs.run_directory import RunFolder
from thinwire.training import autotune

QUICK = {"rounds": 4, "checkpoint.every": 2, "local.epochs": 1}


def quick(**overrides):
    return resolve("fedavg", overrides={**QUICK, **overrides})


def metrics(folder: Path) -> list[dict]:
    """The lines of a run without `seconds`, which differs between equal runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


# -- the backend -----------------------------------------------------------------------------------------------------


def other_cache(kept: Path, folder: Path) -> str:
    """Write a cache in which another backend was the fastest; returns its name."""
    folder.mkdir()
    (file,) = kept.glob("backend-*.npz")
    with np.load(file, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    other = "vmap" if str(found["backend"]) != "vmap" else "loop"
    np.savez(folder / file.name, **(found | {"backend": np.array(other)}))
    return other


def test_a_run_killed_before_its_first_checkpoint_keeps_its_backend(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_PROBE", "on")
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "_known", {})
    wanted = quick(**{"checkpoint.every": 100, "engine.precision": "bf16"})  # in 16 bits backends differ
    execute(wanted, tmp_path / "whole")
    seen = []

    def kill(record):
        seen.append(json.loads((tmp_path / "cut/training.json").read_text()))
        if record.round == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        execute(wanted, tmp_path / "cut", on_round=kill)
    assert rounds_in(tmp_path / "cut/checkpoints") == []
    other = other_cache(tmp_path / "cache", tmp_path / "other")
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "other"))
    autotune._known.clear()  # as another process
    execute(wanted, tmp_path / "cut", resume=True)
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert (
        json.loads((tmp_path / "cut/environment.json").read_text())["clients_trained_by"] == seen[0]["backend"] != other
    )
    execute(wanted, tmp_path / "another")
    assert json.loads((tmp_path / "another/training.json").read_text())["backend"] == other, (
        "the cache decides for a new run"
    )


def test_the_backend_is_written_before_the_first_round(tmp_path, monkeypatch):
    def no_round(*_):
        raise RuntimeError("killed")

    monkeypatch.setattr(Federation, "round", no_round)
    with pytest.raises(RuntimeError, match="killed"):
        execute(quick(), tmp_path / "run")
    kept = json.loads((tmp_path / "run/training.json").read_text())
    assert (kept["backend"], kept["backend_reason"], kept["chunk"], kept["onednn"]) == (
        "vmap",
        "THINWIRE_PROBE is off",
        0,
        None,
    )
    monkeypatch.undo()
    monkeypatch.setenv("THINWIRE_PROBE", "on")
    execute(quick(), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run/environment.json").read_text())["because"] == "THINWIRE_PROBE is off"


def test_a_round_that_changes_the_chunk_is_saved_at_once(tmp_path, monkeypatch):
    train = SimulatedClients.train

    def little_memory(self, task, work):
        if len(task.group.clients) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, task, work)

    def stop(record):
        if record.round == 2:
            raise RuntimeError("killed")

    wanted = quick(**{"checkpoint.every": 100})
    monkeypatch.setattr(SimulatedClients, "train", little_memory)
    with pytest.raises(RuntimeError, match="killed"):
        execute(wanted, tmp_path / "run", on_round=stop)
    assert rounds_in(tmp_path / "run/checkpoints") == [1]
    monkeypatch.undo()  # now all ten clients fit into memory, but the run continues with five at a time
    execute(wanted, tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run/checkpoints/round-000004.json").read_text())["state"]["chunk"] == 5


# -- real kills ------------------------------------------------------------------------------------------------------

# a model large enough that writing a checkpoint takes a while, and a checkpoint after every round
KILL = ["--rounds", "7", "--set", "checkpoint.every=1", "--set", "task.model.hidden=2000", "--set", "local.epochs=1"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", *words, "-q"]


def start(*words: str, **env: str) -> subprocess.Popen:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command(*words), env={**os.environ, **env}, **quiet)


def finish(*words: str, **env: str) -> None:
    done = subprocess.run(command(*words), env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def rounds_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_once(process: subprocess.Popen, folder: Path, rng: random.Random) -> str:
    """Kill for real, either at a random moment between rounds or as soon as a checkpoint is being written."""
    goal = rounds_done(folder) + rng.randint(1, 3)
    while_writing = rng.random() < 0.5
    while process.poll() is None:
        if rounds_done(folder) >= goal:
            if not while_writing:
                time.sleep(rng.random() * 0.2)
                break
            if list(folder.glob("checkpoints/.*.tmp")):
                break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return "while a checkpoint was written" if list(folder.glob("checkpoints/.*.tmp")) else "between"


def kill_and_resume(tmp_path: Path, kills: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = (word.split("=") for word in KILL[3::2])
    execute(resolve("fedavgm", overrides={"rounds": 7, **{key: int(value) for key, value in settings}}), whole)
    moments = []
    for attempt in range(kills):
        process = start("resume", str(cut)) if attempt else start("run", "fedavgm", *KILL, "--out", str(cut))
        moments.append(kill_once(process, cut, rng))
    execute(RunFolder.open(cut).experiment, cut, resume=True)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert metrics(cut) == metrics(whole)
    assert not list(cut.rglob("*.tmp")), "a resumed run removes the temporary files of a killed one"
    return moments


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    kill_and_resume(tmp_path, kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
@pytest.mark.parametrize("seed", range(8))
def test_a_run_killed_many_times_resumes_to_the_same_bits(tmp_path, seed):
    print("killed:", kill_and_resume(tmp_path, kills=5, seed=seed))  # shown by pytest -rP


LATE = [*KILL, "--set", "checkpoint.every=1000"]  # the first checkpoint is that of the last round


def inode(file: Path) -> int:
    return file.stat().st_ino if file.exists() else 0


def kill_before_the_first_checkpoint(tmp_path: Path, kills: int, seed: int) -> list[str]:
    """Kill a run, each time with an empty cache: at its start, while backends are timed, or after a few rounds."""
    rng = random.Random(seed)
    whole, cut, moments = tmp_path / "whole", tmp_path / "cut", list[str]()
    decided = None  # the cache of the process that chose the backend
    for attempt in range(kills):
        cache = tmp_path / f"cache-{attempt}"
        env = {"THINWIRE_CACHE": str(cache), "THINWIRE_PROBE": "on"}
        begun = (cut / "config.toml").is_file()
        words = ("resume", str(cut)) if begun else ("run", "fedavgm", *LATE, "--out", str(cut))
        old = inode(cut / "metrics.jsonl")  # a resumed run writes this file again from the first round
        process = start(*words, **env)
        goal = rng.choice([0, 1, 2, 3])
        seconds, began = rng.uniform(2, 8), time.monotonic()

        def waits(old: int = old, goal: int = goal, end: float = began + seconds) -> bool:
            trained = rounds_done(cut) if inode(cut / "metrics.jsonl") != old else 0
            return trained < goal if goal else time.monotonic() < end

        while process.poll() is None and waits():
            time.sleep(0.01)
        assert process.poll() is None, "it was too fast to be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert rounds_in(cut / "checkpoints") == []
        if decided is None and (cut / "training.json").is_file():
            decided = cache
        moments.append(f"after {rounds_done(cut)} rounds" if decided else "before the choice")
    env = {"THINWIRE_CACHE": str(tmp_path / "cache-last"), "THINWIRE_PROBE": "on"}
    finish("resume", str(cut), **env)
    env["THINWIRE_CACHE"] = str(decided or tmp_path / "cache-last")
    finish("run", "fedavgm", *LATE, "--out", str(whole), **env)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert metrics(cut) == metrics(whole)
    return moments


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_before_its_first_checkpoint_resumes_to_the_same_bits(tmp_path, seed):
    print("killed:", kill_before_the_first_checkpoint(tmp_path, kills=5, seed=seed))


@pytest.mark.skipif(os.name != "posix", reason="flock is a POSIX call")
def test_two_processes_cannot_write_to_one_run(thinwire, tmp_path):
    process = start("run", "fedavg", "--rounds", "100000", "--out", str(tmp_path / "run"))
    try:
        while rounds_done(tmp_path / "run") < 1:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)  # it keeps its lock, and leaves the processor to this one
        code, _, err = thinwire("resume", str(tmp_path / "run"))
        assert code == 2
        assert "another process" in err
    finally:
        process.kill()
        process.wait()
