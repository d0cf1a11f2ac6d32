"""Damaged, swapped, truncated or forged files of a run: refused in one line, or restored."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import thinwire as tw
from thinwire.errors import CheckpointError, Diverged
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.files import append, read_checked, with_checksum
from thinwire.runs.records import COVERED, read_run, verify
from thinwire.runs.run_directory import RunFolder
from thinwire.runs.watch import standing


def quick(**overrides):
    return resolve("fedavg", overrides={"rounds": 4, "checkpoint.every": 2, "local.epochs": 1, **overrides})


def metrics(folder):
    """The lines of a run without `seconds`, which differs between equal runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


class Killed(Exception):
    """A simulated kill: nothing is saved."""


def killed_after(rounds, path, **overrides):
    """A run that was killed in the round after `rounds`."""

    def stop(record):
        if record.round == rounds + 1:
            raise Killed

    with pytest.raises(Killed):
        execute(quick(**overrides), path, on_round=stop)
    return path


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two finished runs of different seeds."""
    folder = tmp_path_factory.mktemp("two")
    for seed in (0, 1):
        execute(quick(seed=seed), folder / str(seed))
    return folder


@pytest.fixture
def copies(two_runs, tmp_path):
    """Copies of the two runs, to be damaged."""
    for seed in "01":
        shutil.copytree(two_runs / seed, tmp_path / seed)
    return tmp_path


def damage(file, how, other):
    if how == "swapped":
        shutil.copy(other, file)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-20])
    elif how == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def test_checksums_of_a_finished_run_match_in_the_format_of_sha256sum(copies):
    verify(copies / "0")
    text = (copies / "0/SHA256SUMS").read_text()
    assert [line.split()[1] for line in text.splitlines()] == [*COVERED, "config.toml"]
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=copies / "0", check=True)


@pytest.mark.parametrize("how", ["swapped", "one bit", "truncated", "missing"])
@pytest.mark.parametrize("name", COVERED)
def test_a_damaged_file_of_a_finished_run_is_named(copies, name, how):
    path = copies / "0"
    damage(path / name, how, copies / "1" / name)
    readers = {
        "resume": lambda: execute(quick(), path, resume=True),
        "verify": lambda: verify(path),
        "summary": lambda: RunFolder.open(path).summary(),
        "load": lambda: tw.load_run(path),
    }
    if (name, how) == ("summary.json", "missing"):
        return  # a run without a summary is unfinished
    for reader in readers.values():
        with pytest.raises(CheckpointError) as error:
            reader()
        assert str(path / name) in str(error.value)
        assert "thinwire resume" in str(error.value)
        assert "\n" not in str(error.value)
    tw.report([copies / "1"])


@pytest.mark.parametrize("name", COVERED)
def test_the_remedy_in_the_error_restores_a_damaged_file(copies, two_runs, name):
    damage(copies / "0" / name, "one bit", None)
    (copies / "0/summary.json").unlink()
    execute(quick(), copies / "0", resume=True)
    verify(copies / "0")
    for file in COVERED:
        assert (copies / "0" / file).read_bytes() == (two_runs / "0" / file).read_bytes()


def test_a_diverged_run_has_totals_and_checksums(tmp_path):
    wanted = quick(**{"method.client_opt.lr": 1e30})
    with pytest.raises(Diverged, match="round 1: "):
        execute(wanted, tmp_path / "run")
    path = tmp_path / "run"
    assert [line.split()[1] for line in (path / "SHA256SUMS").read_text().splitlines()] == [
        COVERED[0],
        COVERED[2],
        "config.toml",
    ]
    with pytest.raises(Diverged, match="known from an earlier run"):
        execute(wanted, path, resume=True)
    assert read_run(path).summary["status"] == "diverged"
    damage(path / "summary.json", "one bit", None)
    with pytest.raises(CheckpointError, match=r"summary\.json is damaged"):
        execute(wanted, path, resume=True)


def test_an_edited_configuration_of_a_finished_run_is_noticed(copies):
    path = copies / "0"
    file = path / "config.toml"
    file.write_text(file.read_text() + "# another line\n")
    for reader in (
        lambda: execute(quick(), path, resume=True),
        lambda: verify(path),
        lambda: RunFolder.open(path).summary(),
        lambda: tw.load_run(path),
    ):
        with pytest.raises(CheckpointError, match=r"config\.toml is damaged.*restore the file, or run it again"):
            reader()
    (path / "SHA256SUMS").write_text("".join((path / "SHA256SUMS").read_text().splitlines(keepends=True)[:-1]))
    verify(path)  # of an earlier version


def test_damaged_checksums_are_refused(copies):
    for text in ("", "nonsense\n", "0" * 64 + "  summary.json\n", "\xff" * 9000):
        (copies / "0/SHA256SUMS").write_text(text)
        with pytest.raises(CheckpointError, match=r"its SHA-256 is not the one in .*SHA256SUMS"):
            verify(copies / "0")


def test_a_run_without_checksums_is_refused(copies):
    (copies / "0/SHA256SUMS").unlink()
    assert len(read_run(copies / "0").records) == 4
    with pytest.raises(CheckpointError, match=r"its SHA-256 is not the one in .*SHA256SUMS"):
        execute(quick(), copies / "0")


# -- resumed runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["half a line", "the file", "one bit", "other lines"])
def test_lost_metrics_are_restored_from_the_checkpoint(tmp_path, two_runs, lost):
    path = killed_after(2, tmp_path / "cut", **{"checkpoint.every": 2})
    file = path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    if lost == "the file":
        file.unlink()
    else:
        broken = lines[0][:20] + bytes([lines[0][20] ^ 1]) + lines[0][21:]
        short = {"half a line": [*lines[:1], lines[1][:30]]}
        other = {"one bit": [broken, *lines[1:]], "other lines": [(two_runs / "1/metrics.jsonl").read_bytes()]}
        file.write_bytes(b"".join((short | other)[lost]))
    execute(quick(), path, resume=True)
    assert metrics(path) == metrics(two_runs / "0")
    assert (path / "model.safetensors").read_bytes() == (two_runs / "0/model.safetensors").read_bytes()


@pytest.mark.parametrize("more", [b'{"round": 3', b"\xff\xfe\n", b'{"round": 1' + b"0" * 5000])
def test_lines_after_the_checkpoint_are_removed(tmp_path, two_runs, more):
    path = killed_after(2, tmp_path / "cut", **{"checkpoint.every": 2})
    file = path / "metrics.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]) + more)
    assert standing(path).round == 2
    execute(quick(), path, resume=True)  # without a warning, which would be an error here
    assert metrics(path) == metrics(two_runs / "0")


def change(path, change_meta):
    """Change the JSON of the newest checkpoint, with a valid checksum."""
    file = max((path / "checkpoints").glob("*.json"))
    meta = read_checked(file)
    change_meta(meta)
    file.write_bytes(with_checksum(meta))


@contextmanager
def a_gigabyte_more():
    """Limit this process to one more gigabyte of memory; a list of a billion integers takes eight."""
    file = Path("/proc/self/statm")
    if not file.is_file():  # this system has no such file: no limit
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(file.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


FORGED = [
    (lambda meta: meta["state"].update(round=-1), "it holds -1, expected int"),
    (lambda meta: meta["state"].update(round=True), "it holds True, expected int"),
    (lambda meta: meta["state"].update(round=10**30), "expected int"),
    (lambda meta: meta["state"].update(clock="soon"), "it holds 'soon', expected float"),
    (lambda meta: meta["state"].update(recent={"medians": {"loss": [float("nan")]}, "far": []}), "it holds nan"),
    (lambda meta: meta["state"]["server"]["ledger"].update(entries=["nothing"]), "nothing"),
    (lambda meta: meta.update(sha256="0" * 64), "its SHA-256 does not match"),
    (lambda meta: meta["state"].update(backend="magic"), "it holds 'magic', expected"),
    (lambda meta: meta["state"].update(server=[]), "cannot be read"),
    (lambda meta: meta["state"].update(clients={"x": client(1)}), "cannot be read"),
    (lambda meta: meta["state"].pop("cohort"), "cannot be read"),
]


def client(version):
    return {"version": version, "unsent": {}, "correction": {}, "codec": {}, "opt": {}}


@pytest.mark.parametrize(("forge", "message"), FORGED, ids=[message for _, message in FORGED])
def test_a_checkpoint_with_impossible_values_is_refused_before_memory_is_allocated(copies, forge, message):
    (copies / "0/summary.json").unlink()
    change(copies / "0", forge)
    with a_gigabyte_more(), pytest.raises(CheckpointError) as error:
        execute(quick(), copies / "0", resume=True)
    assert message in str(error.value)
    assert "round-000004" in str(error.value)


def test_a_checkpoint_of_another_model_is_refused(copies):
    (copies / "0/summary.json").unlink()
    change(copies / "0", lambda meta: meta["state"]["server"]["public"]["coords"].pop("head.bias"))
    with pytest.raises(CheckpointError, match="other blocks than this model"):
        execute(quick(), copies / "0", resume=True)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{" + '"a":{' * 5000, '{"round": ' + "9" * 5000 + "}", "\xff", "[]", ""]
)
def test_a_checkpoint_that_is_not_json_is_refused(copies, text):
    (copies / "0/summary.json").unlink()
    (copies / "0/checkpoints/round-000004.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=r"round-000004\.json cannot be read .*remove it to continue from round 2"
    ):
        execute(quick(), copies / "0", resume=True)


# -- writing ---------------------------------------------------------------------------------------------------------


def test_a_failed_append_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep truncated bytecode
    file = tmp_path / "metrics.jsonl"
    append(file, b"first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as error:
            append(file, b"second line\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(file)
