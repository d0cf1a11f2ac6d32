"""Lines of `sites.jsonl`: damaged ones end the file, and a run that continues removes those after its checkpoint."""

from __future__ import annotations

import json

import pytest

from thinwire.errors import ConfigError
from thinwire.runs.config import resolve, to_table
from thinwire.runs.deployment_records import SITES, SiteRecord, append_sites, cut_sites, read_sites
from thinwire.runs.run_directory import RunFolder

LINES = [SiteRecord(i, "north", 0, "accepted", 1.0, 0.25, 1.5, 10, 20) for i in (1, 2, 3)]


def test_lines_are_read_as_written_and_cut_after_a_round(tmp_path):
    assert read_sites(tmp_path) == []
    cut_sites(tmp_path, 0, 0)
    assert not (tmp_path / SITES).exists(), "a simulation has none"
    append_sites(tmp_path, LINES)
    append_sites(tmp_path, [LINES[1]._replace(attempt=1), LINES[2]._replace(attempt=1)])
    cut_sites(tmp_path, 2, attempt=1)
    assert read_sites(tmp_path) == [*LINES, LINES[1]._replace(attempt=1)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"round": -1},
        {"client": True},
        {"status": "excellent"},
        {"norm": "1.0"},
        {"loss": float("inf")},
        {"site": 3},
        {"why": None},
        {"more": 1},
    ],
    ids=str,
)
def test_reading_ends_at_a_line_that_is_not_valid(tmp_path, wrong):
    lines = [
        json.dumps(LINES[0]._asdict()),
        json.dumps({**LINES[1]._asdict(), **wrong}),
        json.dumps(LINES[2]._asdict()),
    ]
    (tmp_path / SITES).write_text("\n".join(lines) + "\n")
    assert read_sites(tmp_path) == LINES[:1]


def test_text_of_a_damaged_file_is_printable_and_short(tmp_path):
    append_sites(tmp_path, [LINES[0]._replace(site="\x1b[31m" * 1000, why="\n" * 10_000)])
    (found,) = read_sites(tmp_path)
    assert found.site.isprintable()
    assert len(found.site) < 600
    assert len(found.why) < 1300


def test_the_number_of_checkpoints_does_not_make_another_run(tmp_path):
    two, five = (
        RunFolder(tmp_path, to_table(resolve("fedavg", "digits", {"checkpoint.keep": keep}))) for keep in (2, 5)
    )
    assert (two.keep, five.keep) == (2, 5)
    assert two.configs == five.configs
    with pytest.raises(ConfigError, match="2 or more, not 1"):
        resolve("fedavg", "digits", {"checkpoint.keep": 1})
