"""Watching a run: from its files, incomplete ones too, until it is finished."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from thinwire.runs.files import PROCESS, locked, note_process, writer
from thinwire.runs.watch import follow, how_to_resume, standing, status_line


def test_standing_of_a_finished_run(real_runs):
    now = standing(next(iter(sorted(real_runs.iterdir()))))
    assert (now.state, now.round, now.rounds, now.eta_seconds) == ("finished", 5, 5, 0.0)
    assert now.bytes_total == now.bytes_up + now.bytes_down + now.bytes_catchup > 0
    assert "finished" in status_line(now)


def test_standing_of_a_running_run_has_the_remaining_time(write_run):
    path = write_run("x", rounds=30, finished=False)
    now = standing(path)
    assert (now.state, now.round) == ("running", 15)
    assert now.eta_seconds == 15 * 0.5
    assert "7.5 s left" in status_line(now)


def test_standing_of_a_run_without_rounds(write_run):
    path = write_run("x", finished=False)
    (path / "metrics.jsonl").unlink()
    now = standing(path)
    assert (now.state, now.round, now.eta_seconds) == ("starting", 0, None)
    assert "round 0/30" in status_line(now)


def test_follow_ends_with_the_run_and_ignores_incomplete_lines(write_run):
    path = write_run("x", rounds=6)
    lines, summary = (path / "metrics.jsonl").read_bytes(), (path / "summary.json").read_bytes()
    (path / "metrics.jsonl").write_bytes(b"")
    (path / "summary.json").unlink()

    def write_slowly():
        with (path / "metrics.jsonl").open("ab", buffering=0) as file:
            for start in range(0, len(lines), 97):
                file.write(lines[start : start + 97])
                time.sleep(0.01)
        (path / "summary.json").write_bytes(summary)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    seen = list(follow(path, every=0.005))
    writer.join()
    rounds = [now.round for now in seen]
    assert rounds == sorted(rounds)
    assert len(set(rounds)) > 3
    assert seen[-1].state == "finished"
    assert all(now.state != "finished" for now in seen[:-1])


def test_a_run_whose_process_is_gone_is_stopped(write_run, thinwire):
    path = write_run("x", finished=False)
    with locked(path):
        note_process(path)
        assert (writer(path), standing(path).state) == ("running", "running")
        (path / PROCESS).write_text('{"host": "another machine", "pid": 1}')
        assert writer(path) == "unknown"
        note_process(path)
    now = standing(path)
    assert (now.state, [status.state for status in follow(path)]) == ("stopped", ["stopped"])
    line = "stopped: its process is gone; run `python mine.py` again, with resume=True"
    assert line in status_line(now)
    code, out, _ = thinwire("watch", str(path))
    assert (code, line in out) == (1, True)
    assert thinwire("watch", str(path), "--once")[0] == 0


def test_watching_does_not_import_torch(write_run):
    code = "import sys; from thinwire.runs.watch import standing; from pathlib import Path\n"
    code += f"standing(Path({str(write_run('x'))!r}))\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_deployed_run_is_continued_by_its_own_command(tmp_path):
    assert how_to_resume(tmp_path, {}) == f"`thinwire resume {tmp_path}` continues it"
    for nodes, command in ((2, "resume"), (0, "site supervise APP_DIR CONNECTION --run-dir")):
        (tmp_path / "deployment.json").write_text(f'{{"run": "x", "nodes": {nodes}}}')
        assert how_to_resume(tmp_path, {}) == f"`thinwire {command} {tmp_path}` continues it"
