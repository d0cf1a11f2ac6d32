"""Progress of a run, read from its files: the run may be on another machine with a shared disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import human_bytes, human_seconds, percent, visible
from thinwire.errors import CheckpointError, ConfigError
from thinwire.runs.collapse import BROKEN
from thinwire.runs.files import read_json, writer
from thinwire.runs.records import honest_bytes, read_run
from thinwire.runs.toml import Table

WAYS = ("up", "down", "catchup", "total", "abandoned")
RECENT = 20  # rounds for bytes and seconds per round


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
    bytes_total: int
    bytes_per_round: float | None  # recently
    seconds_per_round: float | None  # recently
    eta_seconds: float | None
    idle_seconds: float | None  # since the last line was written, by the clock of this machine
    status: str = "finished"  # `collapsed`, `at chance` or `diverged` if training fails so far (`collapse.py`)
    status_why: str = ""
    bytes_abandoned: int = 0  # of rounds before the run went back; in bytes_total
    resume: str = ""  # what continues the run, if it is not finished

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return self._asdict()


def standing(path: Path, now: float | None = None) -> Standing:
    """The progress of a run.

    Args:
        path: the run directory.
        now: the time, for tests; by default that of the clock.
    """
    run = read_run(path)
    records, total = run.records, run.totals
    recent = records[-RECENT:]
    pace = statistics.median(record["seconds"] for record in recent) if recent else None
    each = statistics.fmean(honest_bytes(r) - r.get("bytes_abandoned", 0) for r in recent) if recent else None
    rounds = (run.summary or {}).get("rounds", run.rounds)  # fewer if the run reached its target, or diverged
    finished = run.summary is not None and len(records) >= rounds
    state = "finished" if finished else "stopped" if writer(path) == "gone" else "running" if records else "starting"
    idle = None
    with suppress(OSError):
        changed = (path / "metrics.jsonl").stat().st_mtime
        idle = round(max(0.0, (time.time() if now is None else now) - changed), 1)
    return Standing(
        run=str(path),
        method=run.name,
        task=run.task,
        state=state,
        round=len(records),
        rounds=run.rounds,
        loss=total["final_loss"],
        accuracy=total["final_accuracy"],
        **{key: total[key] for key in ("best_accuracy", *(f"bytes_{way}" for way in WAYS))},
        bytes_per_round=each,
        seconds_per_round=pace,
        eta_seconds=None if pace is None else 0.0 if finished else pace * max(0, run.rounds - len(records)),
        idle_seconds=idle,
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


def status_line(status: Standing) -> str:
    """Format the state of a run as one line."""
    parts = [f"{status.method} on {status.task}", f"round {status.round}/{status.rounds}"]
    if status.state != "starting":
        parts += ["loss -" if status.loss is None else f"loss {status.loss:.4f}"]
        parts += [f"accuracy {percent(status.accuracy)} (best {percent(status.best_accuracy)})"]
        lost = f" ({human_bytes(status.bytes_abandoned)} abandoned)" if status.bytes_abandoned else ""
        parts += [f"{human_bytes(status.bytes_total)} sent{lost}"]
    if status.bytes_per_round is not None:
        parts += [f"{human_bytes(status.bytes_per_round)} per round"]
    if status.seconds_per_round is not None:
        parts += [f"{human_seconds(status.seconds_per_round)} per round"]
    if status.status in BROKEN:
        parts += [f"{status.status}: {status.status_why}"]
    if status.state == "finished":
        parts += ["finished"]
    elif status.state == "stopped":
        parts += [f"stopped: its process is gone; {status.resume}"]
    elif status.eta_seconds is not None:
        parts += [f"{human_seconds(status.eta_seconds)} left"]
    idle, pace = status.idle_seconds, status.seconds_per_round or 0.0
    if status.state not in ("finished", "stopped") and idle is not None and idle > max(60.0, 10 * pace):
        parts += [f"no new round for {human_seconds(idle)}; if it was stopped, {status.resume}"]
    return visible("  ".join(parts))
