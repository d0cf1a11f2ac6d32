"""Several runs at a time, in processes and by commands that share a folder: same tables, same bits, no run twice."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.data.task import pool_clients
from thinwire.errors import ConfigError, InUse, ThinwireError
from thinwire.runs import execute
from thinwire.runs.config import resolve
from thinwire.runs.execute import default_folder
from thinwire.runs.files import LOCK, held, locked
from thinwire.runs.jobs import Jobs, on_machine, run_one

TINY = ("--on", "digits", "--rounds", "2", "--clients", "10", "--cohort", "2", "--set", "local.steps=8")
PAGE = Path(__file__).parents[2] / "docs/tuning.md"
LONG = (*TINY, "--rounds", "40", "--set", "checkpoint.every=4")
PAIR = ("compare", "fedavg", "mapo", *LONG)
posix = pytest.mark.skipif(os.name != "posix", reason="signals and locks are those of POSIX")


def begin(log: Path, *words: str) -> subprocess.Popen:
    """A command in a process, on one thread, whose lines go to a file."""
    command = [sys.executable, "-m", "thinwire.cli.app", *words]
    with log.open("w") as lines, log.with_suffix(".out").open("w") as table:
        return subprocess.Popen(command, stdout=table, stderr=lines, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(log: Path, *words: str, code: int = 0) -> str:
    """The table of a command; its lines are in the file."""
    assert begin(log, *words).wait(600) == code, log.read_text()
    return log.with_suffix(".out").read_text()


def weights(out: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in sorted(out.glob("*/model.safetensors"))}


def starts(*logs: Path) -> Counter:
    """How often each run trained its first round."""
    return Counter(name for log in logs for name in re.findall(r"^(\S+)  round 1/", log.read_text(), re.MULTILINE))


def running(out: Path, rounds: int = 6) -> tuple[Path, int]:
    """A run with a checkpoint, before its end, and the process that writes it."""
    for _ in range(2000):
        for file in out.glob("*/process.json"):
            metrics = file.parent / "metrics.jsonl"
            if metrics.is_file() and metrics.read_bytes().count(b"\n") >= rounds and held(file.parent):
                return file.parent, json.loads(file.read_text())["pid"]
        time.sleep(0.02)
    raise AssertionError("no run began")


def is_gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.slow
@posix
def test_a_grid_of_24_runs_by_one_process_by_two_jobs_and_by_an_array_of_slurm(tmp_path):
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", PAGE.read_text(), re.DOTALL)[1]
    command = re.search(r"srun thinwire ((?:.*\\\n)*.*)", script)[1]
    words = shlex.split(command.replace("\\\n", " "))
    grid = [*words[: words.index("--device")], *TINY]
    one = finish(tmp_path / "one.log", *grid, "--out", str(tmp_path / "one"))
    two = finish(tmp_path / "two.log", *grid, "--out", str(tmp_path / "two"), "--jobs", "2")
    assert two == one
    (tmp_path / "array.sh").write_text(
        script.replace("srun thinwire", f"{sys.executable} -m thinwire.cli.app").replace(
            "--device cuda", " ".join(TINY)
        )
    )
    logs, tasks = [tmp_path / "0.log", tmp_path / "1.log"], []
    for i, log in enumerate(logs):
        slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": str(i), "SLURM_CPUS_PER_TASK": "1"}
        with log.open("w") as lines, log.with_suffix(".out").open("w") as table:
            bash = ["bash", str(tmp_path / "array.sh")]
            tasks.append(subprocess.Popen(bash, stdout=table, stderr=lines, env={**os.environ, **slurm}))
    assert [task.wait(1200) for task in tasks] == [0, 0], [log.read_text() for log in logs]
    assert [log.with_suffix(".out").read_text() for log in logs] == [one, one]
    assert all((tmp_path / f"sweep-{i}.html").is_file() for i in range(2))
    bits = weights(tmp_path / "one")
    assert len(bits) == 24
    assert weights(tmp_path / "two") == weights(tmp_path / "runs") == bits
    for ran in (starts(tmp_path / "two.log"), starts(*logs)):
        assert set(ran) == set(bits)
        assert set(ran.values()) == {1}, "no run is made twice"
    assert all(starts(log) for log in logs), "both took part"


@posix
def test_two_jobs_give_the_bits_and_the_table_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("compare", "fedavg", "mapo", "--seeds", "2", *TINY)
    one = finish(tmp_path / "one.log", *words, "--out", str(tmp_path / "one"))
    assert finish(tmp_path / "two.log", *words, "--out", str(tmp_path / "two"), "--jobs", "2") == one
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    lines = (tmp_path / "two.log").read_text()
    assert sorted(re.findall(r"^(\d)/4 \S+ done$", lines, re.MULTILINE)) == ["1", "2", "3", "4"]
    search = {"rates": 4, "rounds": 4, "clients": 10, "cohort": 2, "set": {"local.steps": 8}}
    seen = []
    alone, both = (
        tw.tune(
            "fedavg",
            "digits",
            jobs=jobs,
            out=tmp_path / f"search{jobs}",
            on_trial=lambda *it: seen.append(it),
            **search,
        )
        for jobs in (1, 2)
    )
    assert both.rungs == alone.rungs
    assert len(seen) == 2 * len(alone.trials)
    assert weights(tmp_path / "search2") == weights(tmp_path / "search1")


@posix
def test_a_job_that_is_killed_is_resumed_by_the_same_command(tmp_path):
    whole = finish(tmp_path / "whole.log", *PAIR, "--out", str(tmp_path / "whole"))
    out, log = tmp_path / "cut", tmp_path / "cut.log"
    command = begin(log, *PAIR, "--out", str(out), "--jobs", "2")
    path, pid = running(out)
    os.kill(pid, signal.SIGKILL)
    assert command.wait(600) == 2
    text = log.read_text()
    assert re.search(rf"^\d/2 {path.name} its process ended \(9\); the same command continues it$", text, re.MULTILINE)
    assert "Traceback" not in text
    other = {"fedavg", "mapo"} - {path.name.split("-")[0]}
    assert [name.split("-")[0] for name in weights(out)] == [*other], "the other run went on"
    kept = (path / "metrics.jsonl").read_text().splitlines()[:4]
    before = {name: (out / name / "summary.json").stat().st_mtime_ns for name in weights(out)}
    assert finish(log, *PAIR, "--out", str(out), "--jobs", "2") == whole
    assert weights(out) == weights(tmp_path / "whole")
    assert (path / "metrics.jsonl").read_text().splitlines()[:4] == kept, "it went on: seconds of rounds are the same"
    assert before.items() <= {name: (out / name / "summary.json").stat().st_mtime_ns for name in weights(out)}.items()


@posix
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_all_jobs_and_the_same_command_goes_on(tmp_path, how):
    out, log = tmp_path / "cut", tmp_path / "cut.log"
    command = begin(log, *PAIR, "--out", str(out), "--jobs", "2")
    path, pid = running(out)
    command.send_signal(how)
    assert command.wait(60) == 130
    assert "Traceback" not in log.read_text()
    assert is_gone(pid)
    assert not any(held(one) for one in out.iterdir() if one.is_dir())
    rounds = (path / "metrics.jsonl").read_bytes().count(b"\n")
    assert 6 <= rounds < 40
    assert (path / f"checkpoints/round-{rounds:06d}.json").is_file(), "the last round is saved"
    if how == signal.SIGINT:
        finish(log, *PAIR, "--out", str(out))
        finish(tmp_path / "whole.log", *PAIR, "--out", str(tmp_path / "whole"))
        assert weights(out) == weights(tmp_path / "whole")


@posix
def test_a_command_waits_for_another_one_and_takes_over_its_run_if_that_dies(tmp_path):
    out, words = tmp_path / "runs", ("compare", "fedavg", *LONG)
    first = begin(tmp_path / "first.log", *words, "--out", str(out))
    path, pid = running(out)
    assert pid == first.pid
    first.send_signal(signal.SIGSTOP)
    second = begin(tmp_path / "second.log", *words, "--out", str(out))
    while "waiting for 1 runs" not in (tmp_path / "second.log").read_text():
        assert second.poll() is None
        time.sleep(0.05)
    kept = (path / "metrics.jsonl").read_text().splitlines()[:4]
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert second.wait(600) == 0
    assert (path / "metrics.jsonl").read_text().splitlines()[:4] == kept
    finish(tmp_path / "whole.log", *words, "--out", str(tmp_path / "whole"))
    assert weights(out) == weights(tmp_path / "whole")


@posix
def test_a_run_that_another_process_has_just_finished_is_not_made_again(tmp_path, monkeypatch):
    settings = resolve("fedavg", "digits", {"rounds": 1, "task.clients": 10, "cohort.size": 2, "local.steps": 2})
    build = execute.build_job

    def slowly(*given):  # while this process reads its data, the other one makes the run
        monkeypatch.setattr(execute, "build_job", build)
        run_one(settings, tmp_path)
        return build(*given)

    monkeypatch.setattr(execute, "build_job", slowly)
    with pytest.raises(InUse, match="another process has just finished"):
        run_one(settings, tmp_path)
    file = default_folder(settings, tmp_path) / "summary.json"
    written = file.stat().st_mtime_ns
    assert [error for _, error in Jobs().results([settings], tmp_path)] == [None]
    assert file.stat().st_mtime_ns == written


def test_an_error_of_one_run_is_one_line_and_the_others_go_on(tmp_path, capfd):
    runs = [
        resolve("fedavg", "digits", {"rounds": 2, "seed": seed, "task.clients": 10, "cohort.size": 2, "local.steps": 2})
        for seed in range(3)
    ]
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        spoiled = default_folder(runs[0], out)
        spoiled.mkdir(parents=True)
        (spoiled / "mine.txt").write_text("not a run")
        with Jobs(jobs) as places, pytest.raises(ThinwireError, match="is not a run directory; name another"):
            assert [one.seed for one in sorted(places.finish(runs, out, style="lines"), key=lambda one: one.seed)] == [
                1,
                2,
            ]
        assert {name.split("-")[2] for name in weights(out)} == {"s1", "s2"}
    err = capfd.readouterr().err
    assert len(re.findall(r"^\d/3 \S+-s0-\S+ .*is not a run directory", err, re.MULTILINE)) == 1
    assert "Traceback" not in err
    diverging = {"lr": [1e30, 0.1]}
    found = tw.sweep("fedavg", diverging, "digits", seeds=1, rounds=2, cohort=2, out=tmp_path / "rows", jobs=2)
    assert [row.failed for row in found.rows] == ["-", "1 of 1 diverged"]


def test_each_process_has_a_share_of_the_threads_and_a_gpu(monkeypatch):
    def given(count, key, device="cuda"):
        return [place.environment.get(key) for place in on_machine(count, device)]

    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert given(3, "OMP_NUM_THREADS") == ["2"] * 3
    assert given(16, "OMP_NUM_THREADS")[0] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    assert given(5, "CUDA_VISIBLE_DEVICES") == ["4", "5", "GPU-7", "4", "5"]
    assert given(2, "CUDA_VISIBLE_DEVICES", "cpu") == ["4,5,GPU-7"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert given(2, "CUDA_VISIBLE_DEVICES") == ["3", "3"], "all have the only one"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert given(2, "CUDA_VISIBLE_DEVICES") == [None, None]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert given(3, "CUDA_VISIBLE_DEVICES") == ["0", "1", "0"]


def test_jobs_that_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="jobs must be 1 or more, not 0"):
        tw.compare(["fedavg"], "digits", jobs=0, out=tmp_path)
    data = [(torch.randn(8, 2), torch.randint(0, 2, (8,))) for _ in range(3)]
    task = tw.Task(torch.nn.Linear(2, 2), *pool_clients(data))
    with pytest.raises(ConfigError, match=r"is an object of this process.*jobs=1, or name it in a file"):
        tw.compare(["fedavg"], task, jobs=2, out=tmp_path, rounds=1)


@posix
def test_a_directory_with_nothing_but_a_lock_is_empty(tmp_path):
    settings = resolve("fedavg", "digits", {"rounds": 1, "task.clients": 10, "cohort.size": 2, "local.steps": 2})
    path = default_folder(settings, tmp_path)
    path.mkdir()
    (path / LOCK).touch()  # of a process that was killed before it wrote anything
    run_one(settings, tmp_path)
    with locked(path):
        assert held(path)
        with pytest.raises(InUse, match="another process is writing"):
            run_one(settings, tmp_path)
    assert not held(path)
    with pytest.raises(ConfigError, match="no"), locked(tmp_path / "new"):
        raise ConfigError("no")
    assert not (tmp_path / "new").exists()
