"""`thinwire repro` at scale quick, for real: all tables, and a call with a budget that is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.experiments.presets import presets

DATA = Path(os.environ.get("THINWIRE_DATA", "no data"))
COMPLETE = all((DATA / name).exists() for name in ("mnist", "cifar10", "shakespeare"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPLETE, reason="THINWIRE_DATA names no folder of datasets")]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", "repro", *words]


def results(out: Path) -> dict[str, list[dict]]:
    """The records of all finished runs without `seconds`, which differ between equal runs."""
    found = {}
    for folder in sorted(out.iterdir()):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[folder.name] = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    return found


def test_all_tables_are_made_at_scale_quick(tmp_path):
    """No run is missing, diverges, collapses or ends at chance: such a run is named on stderr even if quiet."""
    words = ("all", "--scale", "quick", "--jobs", "2", "--json", "-q", "--out", str(tmp_path / "runs"))
    done = subprocess.run(command(*words), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    tables = json.loads(done.stdout)
    assert set(tables) == set(presets("repro"))
    assert not any(table["missing"] for table in tables.values())


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
def test_a_killed_call_with_a_budget_goes_on(tmp_path):
    """The table of the higher priority is first; finished runs stay; the results are those of a call without a kill."""
    tables = ("mapa-figure-7", "pfedpara-3")
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    words = (*tables, "--budget", "10h", "--out", str(cut))
    ended = []
    for kept in (2, 5):  # runs that have ended at the moment of the kill
        with subprocess.Popen(command(*words), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            for line in process.stderr:
                ended.append(line.split()[1])
                if len(ended) == kept:
                    process.send_signal(signal.SIGKILL)
                    break
    before = {file: file.stat().st_mtime_ns for file in cut.glob("*/summary.json")}
    assert len(before) >= 5
    last = subprocess.run(command(*words), check=True, capture_output=True, text=True)
    ended += [line.split()[1] for line in last.stderr.splitlines()]
    assert all(file.stat().st_mtime_ns == then for file, then in before.items()), "no finished run was made again"
    assert ["fashion" in name for name in ended] == sorted("fashion" in name for name in ended), "pfedpara-3 is first"
    subprocess.run(command(*tables, "--out", str(whole)), check=True, capture_output=True)
    assert results(cut) == results(whole)
