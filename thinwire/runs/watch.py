"""Progress of a run, read from its files: the run may be on another machine with a shared disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from thinwire.core.text import human_bytes, human_seconds, percent, visible
from thinwire.errors import CheckpointError, ConfigError
from thinwire.runs.collapse import BROKEN
from thinwire.runs.files import read_json, writer
from thinwire.runs.records import read_run
from thinwire.runs.toml import Table

RECENT = 20  # rounds for seconds per round


class Standing(NamedTuple):
    """The progress of a run at a moment."""

    run: str
    method: str
    task: str
    state: str  # starting, running, finished, stopped (its process is gone, and it is not finished)
    round: int
    rounds: int
    loss: float | None
    accuracy: float | None  # the latest
    best_accuracy: float | None
    bytes_up: int
    bytes_down: int
    bytes_catchup: int
    bytes_abandoned: int  # of rounds before the run went back
    bytes_total: int  # of all these
    seconds_per_round: float | None  # recently
    eta_seconds: float | None
    status: str  # `collapsed`, `at chance` or `diverged` if training fails so far (`collapse.py`)
    status_why: str
    resume: str  # what continues the run, if it is not finished


def standing(path: Path) -> Standing:
    """The progress of the run in a directory."""
    run = read_run(path)
    records, total = run.records, run.totals
    pace = statistics.median(record["seconds"] for record in records[-RECENT:]) if records else None
    rounds = (run.summary or {}).get("rounds", run.rounds)  # fewer if the run reached its target, or diverged
    finished = run.summary is not None and len(records) >= rounds
    state = "finished" if finished else "stopped" if writer(path) == "gone" else "running" if records else "starting"
    ways = ("up", "down", "catchup", "abandoned", "total")
    return Standing(
        run=str(path),
        method=run.name,
        task=run.task,
        state=state,
        round=len(records),
        rounds=run.rounds,
        loss=total["final_loss"],
        accuracy=total["final_accuracy"],
        best_accuracy=total["best_accuracy"],
        **{f"bytes_{way}": total[f"bytes_{way}"] for way in ways},
        seconds_per_round=pace,
        eta_seconds=None if pace is None else 0.0 if finished else pace * max(0, run.rounds - len(records)),
        status=run.verdict.status,
        status_why=run.verdict.why,
        resume="" if finished else how_to_resume(path, run.table),
    )


def how_to_resume(path: Path, table: Table) -> str:
    """What continues the run in a directory.

    >>> how_to_resume(Path("runs/x"), {"script": "mine.py"})
    'run `python mine.py` again, with resume=True'
    """
    if "script" in table:
        return f"run `python {table['script']}` again, with resume=True"
    with suppress(CheckpointError):
        if not read_json(path / "deployment.json").get("nodes"):  # `thinwire deploy` notes them, `flwr run` does not
            return f"`thinwire site supervise APP_DIR CONNECTION --run-dir {path}` continues it"
    return f"`thinwire resume {path}` continues it"


def follow(path: Path, every: float = 1.0) -> Iterator[Standing]:
    """The progress of a run every `every` seconds, until it is finished or stopped."""
    if not 0 < every <= 86_400:
        raise ConfigError(f"every must be above 0 and at most 86,400 seconds, not {every}")
    while True:
        now = standing(path)
        yield now
        if now.state in ("finished", "stopped"):
            return
        time.sleep(every)


def status_line(now: Standing) -> str:
    """Format the state of a run as one line."""
    parts = [f"{now.method} on {now.task}", f"round {now.round}/{now.rounds}"]
    if now.state != "starting":
        lost = f" ({human_bytes(now.bytes_abandoned)} abandoned)" if now.bytes_abandoned else ""
        parts += ["loss -" if now.loss is None else f"loss {now.loss:.4f}"]
        parts += [f"accuracy {percent(now.accuracy)} (best {percent(now.best_accuracy)})"]
        parts += [f"{human_bytes(now.bytes_total)} sent{lost}"]
    if now.seconds_per_round is not None:
        parts += [f"{human_seconds(now.seconds_per_round)} per round"]
    if now.status in BROKEN:
        parts += [f"{now.status}: {now.status_why}"]
    if now.state == "finished":
        parts += ["finished"]
    elif now.state == "stopped":
        parts += [f"stopped: its process is gone; {now.resume}"]
    elif now.eta_seconds is not None:
        parts += [f"{human_seconds(now.eta_seconds)} left"]
    return visible("  ".join(parts))
