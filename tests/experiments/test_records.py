"""Reading run directories: what is cut short or makes no sense is left out, and nothing is written."""

from __future__ import annotations

import json

import pytest

from thinwire.errors import CheckpointError
from thinwire.experiments.records import find_runs, read_records, read_run, totals
from thinwire.experiments.run_directory import RunFolder


def test_a_real_run_reads_as_its_folder_says(real_runs):
    for path in find_runs([real_runs]):
        run, folder = read_run(path), RunFolder.open(path)
        assert run.records == [record._asdict() for record in folder.history()]
        summary = folder.summary()
        assert summary == run.summary
        assert totals(run.records).items() <= summary.items()
        assert (run.name, run.task, run.rounds) == (summary["method"], "digits", 5)


@pytest.mark.parametrize("keep", [1, 10, 60, 130])
def test_a_line_that_is_still_being_written_is_not_there_yet(write_run, keep):
    file = write_run("x", rounds=3) / "metrics.jsonl"
    whole = file.read_bytes()
    second = whole.split(b"\n")[1]
    file.write_bytes(whole + second[:keep])
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
def test_a_line_that_makes_no_sense_ends_the_reading(write_run, change):
    file = write_run("x", rounds=3) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1].update(change)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_records(file)) == 1


def test_lines_of_later_versions_may_say_more(write_run):
    file = write_run("x", rounds=2) / "metrics.jsonl"
    file.write_text(file.read_text().replace('"round"', '"weather": "fine", "round"'))
    assert len(read_records(file)) == 2


def test_what_is_no_run_is_said_in_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="holds none"):
        find_runs([tmp_path])
    with pytest.raises(CheckpointError, match="not a run directory"):
        read_run(tmp_path)
