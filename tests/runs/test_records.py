"""Reading of run directories: incomplete and invalid lines are left out, and nothing is written."""

from __future__ import annotations

import json

import pytest

from thinwire.errors import CheckpointError
from thinwire.runs.records import find_runs, read_records, read_run, totals
from thinwire.runs.run_directory import RunFolder, environment


def test_read_run_and_run_folder_agree(real_runs):
    for path in find_runs([real_runs]):
        run, folder = read_run(path), RunFolder.open(path)
        assert run.records == [record._asdict() for record in folder.history()]
        summary = folder.summary()
        assert summary == run.summary
        assert totals(run.records).items() <= summary.items()
        assert (run.name, run.task, run.rounds) == (summary["method"], "digits", 5)


@pytest.mark.parametrize("length", [1, 10, 60, 130])
def test_an_incomplete_last_line_is_left_out(write_run, length):
    file = write_run("x", rounds=3) / "metrics.jsonl"
    whole = file.read_bytes()
    second = whole.split(b"\n")[1]
    file.write_bytes(whole + second[:length])
    assert len(read_records(file)) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"bytes_up": -1},
        {"bytes_up": "many"},
        {"clients": 1.5},
        {"seconds": float("nan")},
        {"accuracy": float("inf")},
        {"accuracy": True},
        {"loss": None},
    ],
)
def test_reading_stops_at_an_invalid_line(write_run, change):
    file = write_run("x", rounds=3) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1].update(change)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_records(file)) == 1


def test_lines_may_have_unknown_keys(write_run):
    file = write_run("x", rounds=2) / "metrics.jsonl"
    file.write_text(file.read_text().replace('"round"', '"weather": "fine", "round"'))
    assert len(read_records(file)) == 2


def test_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds none"):
        find_runs([tmp_path])
    with pytest.raises(CheckpointError, match="not a run directory"):
        read_run(tmp_path)


def test_the_commit_of_copied_code_can_be_named(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_COMMIT", "0123456789abcdef0123456789abcdef01234567")
    assert environment()["commit"] == "0123456789ab"
