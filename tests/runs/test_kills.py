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

import pytest
import torch

from thinwire.federation.simulated import SimulatedClients
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.records import rounds_in
from thinwire.runs.run_directory import RunFolder

QUICK = {"rounds": 4, "checkpoint.every": 2, "local.epochs": 1}


def quick(**overrides):
    return resolve("fedavg", overrides={**QUICK, **overrides})


def metrics(folder: Path) -> list[dict]:
    """The lines of a run without `seconds`, which differs between equal runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


# -- kills between rounds --------------------------------------------------------------------------------------------


def test_a_run_killed_before_its_first_checkpoint_begins_again_with_the_same_bits(tmp_path):
    wanted = quick(**{"checkpoint.every": 100})
    execute(wanted, tmp_path / "whole")

    def kill(record):
        if record.round == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        execute(wanted, tmp_path / "cut", on_round=kill)
    assert rounds_in(tmp_path / "cut/checkpoints") == []
    execute(wanted, tmp_path / "cut", resume=True)
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_a_round_that_changes_the_chunk_is_saved_at_once(tmp_path, monkeypatch):
    train = SimulatedClients.train

    def little_memory(self, task, *more):
        if len(task.group.clients) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, task, *more)

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


def start(*words: str) -> subprocess.Popen:
    return subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finish(*words: str) -> None:
    done = subprocess.run(command(*words), capture_output=True, text=True)
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


def test_sigterm_saves_the_last_complete_round_and_the_run_resumes_to_the_same_bits(tmp_path):
    few = ["--rounds", "40", "--set", "checkpoint.every=1000", "--set", "local.epochs=1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = command("run", "fedavgm", *few, "--out", str(cut))
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while rounds_done(cut) < 3:
        assert process.poll() is None
        time.sleep(0.001)
    process.terminate()
    assert process.communicate()[1] == f"stopped; `thinwire resume {cut}` continues it\n"
    assert process.returncode == 130
    assert 40 > rounds_in(cut / "checkpoints")[-1] >= 3
    execute(RunFolder.open(cut).experiment, cut, resume=True)
    execute(RunFolder.open(cut).experiment, whole)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert metrics(cut) == metrics(whole)


def test_a_slow_round_is_saved_whatever_the_number_of_rounds(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("thinwire.runs.loop.LONGEST", 0.0)

    def look(record):
        seen.append(rounds_in(tmp_path / "run/checkpoints")[-1:])

    execute(quick(**{"checkpoint.every": 100}), tmp_path / "run", on_round=look)
    assert seen == [[], [1], [2], [3]]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
@pytest.mark.parametrize("seed", range(8))
def test_a_run_killed_many_times_resumes_to_the_same_bits(tmp_path, seed):
    print("killed:", kill_and_resume(tmp_path, kills=5, seed=seed))  # shown by pytest -rP


LATE = [*KILL, "--set", "checkpoint.every=1000"]  # the first checkpoint is that of the last round


def inode(file: Path) -> int:
    return file.stat().st_ino if file.exists() else 0


def kill_before_the_first_checkpoint(tmp_path: Path, kills: int, seed: int) -> list[str]:
    """Kill a run several times: at its start, or after a few rounds."""
    rng = random.Random(seed)
    whole, cut, moments = tmp_path / "whole", tmp_path / "cut", list[str]()
    for _ in range(kills):
        begun = (cut / "config.toml").is_file()
        words = ("resume", str(cut)) if begun else ("run", "fedavgm", *LATE, "--out", str(cut))
        old = inode(cut / "metrics.jsonl")  # a resumed run writes this file again from the first round
        process = start(*words)
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
        moments.append(f"after {rounds_done(cut)} rounds")
    finish("resume", str(cut))
    finish("run", "fedavgm", *LATE, "--out", str(whole))
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
