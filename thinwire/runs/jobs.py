"""Many runs: one after another, or several at a time in processes of their own or as tasks of Ray.

    thinwire compare ... --jobs 2                          two processes of this machine
    RAY_ADDRESS=head:6379 thinwire compare ... --jobs 16   tasks of a cluster that was started with `ray start`

A run is sent to a process as its table, and the answer says why it did not end, if so; all else is in its directory. So
several commands, also on several machines, may share a folder: a run that another process is writing is left for later,
and then read. One whose process died is continued. Folders of Ray's machines, and of several commands, must be the
same file system, with locks (`flock`) that all its machines see.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE
from typing import Any

import torch

from thinwire.core.reference import OWN
from thinwire.core.text import visible
from thinwire.errors import ConfigError, Diverged, InUse, ThinwireError
from thinwire.federation.backends import first_line
from thinwire.federation.job import RoundRecord
from thinwire.federation.ray_workers import need_ray, shares
from thinwire.federation.settings import Settings
from thinwire.runs.config import from_table, to_table
from thinwire.runs.execute import default_folder, execute, stopped_by_sigterm
from thinwire.runs.files import held, message_of
from thinwire.runs.progress import Style, shown
from thinwire.runs.trackers import tracker

SPENT = "interrupted: the budget is spent"
PAUSE = 0.5  # seconds between two looks at runs that other processes write


def run_one(
    settings: Settings,
    out: Path,
    data_dir: Path | None = None,
    overwrite: bool = False,
    until: float | None = None,
    style: Style = "nothing",
    log: str | None = None,
) -> None:
    """Run settings in their default directory, or continue or read the run that is there.

    Args:
        settings: the settings.
        out: the folder of run directories.
        data_dir: the folder of datasets.
        overwrite: delete the run in the directory and start again.
        until: the wall-clock time (`time.time`) at which the run is interrupted, after the round in progress.
        style: how progress is shown.
        log: the tracker.
    """
    path = default_folder(settings, out)
    if until is not None and time.time() >= until:
        raise ThinwireError(SPENT)
    if held(path):
        raise InUse(f"another process is writing to {path}")

    with shown(path.name, settings.rounds, style) as show, tracker(log, path) as follow:

        def on_round(record: RoundRecord) -> None:
            show(record)
            follow(record)
            if until is not None and time.time() >= until and record.round < settings.rounds:
                raise KeyboardInterrupt  # the last complete round is saved

        try:
            execute(settings, path, data_dir=data_dir, resume=True, overwrite=overwrite, on_round=on_round)
        except KeyboardInterrupt:
            if until is None or time.time() < until:
                raise
            raise ThinwireError(SPENT) from None
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                gc.collect()  # recordings and weights stay in cycles, and other processes need the memory
                torch.cuda.empty_cache()


def why(error: Exception) -> str:
    """An error as one line."""
    expected = isinstance(error, ThinwireError | OSError)
    return message_of(error) if expected else f"{type(error).__name__}: {first_line(error)}"


class Jobs:
    """Where runs are made: in this process, in others, or where Ray places them.

    Args:
        count: the number of runs at a time; 1 for this process.
        device: the device of the runs.
    """

    def __init__(self, count: int = 1, device: str = "cpu") -> None:
        if count < 1:
            raise ConfigError(f"jobs must be 1 or more, not {count}")
        self.count, self.device = count, device
        self.places = list[Place]()
        self._free = SimpleQueue[Place]()

    def __enter__(self) -> Jobs:
        if self.count > 1:
            on_ray = os.environ.get("RAY_ADDRESS")
            self.places = on_cluster(self.count, self.device) if on_ray else on_machine(self.count, self.device)
        for place in self.places:
            self._free.put(place)
        return self

    def __exit__(self, *_: object) -> None:
        for place in self.places:
            place.close()

    def finish(self, runs: Iterable[Settings], out: Path, **how: Any) -> Iterator[Settings]:
        """Make runs, and yield each that has ended, also one that diverged; at last raises the first other error."""
        failed = list[Exception]()
        for one, error in self.results(runs, out, **how):
            if error is None or isinstance(error, Diverged):
                yield one
            else:
                failed.append(error)
        if failed:
            raise failed[0]

    def results(
        self, runs: Iterable[Settings], out: Path, style: Style = "nothing", **how: Any
    ) -> Iterator[tuple[Settings, Exception | None]]:
        """Make runs, and yield each when it has ended, with the error that it ended with; see `run_one`.

        Runs that another process is writing are tried again after the others, until that process has ended.
        """
        todo, ended, say = list(runs), 0, partial(print, file=sys.stderr)
        total, waits, several = len(todo), False, self.count > 1
        if several and (own := [one for one in todo if one.task.kind.startswith(OWN)]):
            raise ConfigError(
                f"{own[0].task.label} is an object of this process, which others do not have; write jobs=1, or name it "
                "in a file, such as my_task.py:task"
            )
        style = "lines" if several and style == "terminal" else style
        while todo:
            busy = list[Settings]()
            for one, error in self._once(todo, {"out": out, "style": style, **how}):
                if isinstance(error, InUse):
                    busy.append(one)
                    continue
                ended += 1
                if several and style != "nothing":
                    say(
                        visible(
                            f"{ended}/{total} {default_folder(one, out).name} {why(error) if error else 'done'}", 1000
                        )
                    )
                yield one, error
            if len(busy) == len(todo):
                if not waits:
                    say(f"waiting for {len(busy)} runs that other processes are writing")
                waits = True
                time.sleep(PAUSE)
            todo = busy

    def _once(self, runs: Sequence[Settings], how: dict[str, Any]) -> Iterator[tuple[Settings, Exception | None]]:
        """Try every run."""
        if not self.places:
            for one in runs:
                error: Exception | None = None
                try:
                    run_one(one, **how)
                except Exception as raised:  # the other runs go on
                    error = raised
                yield one, error
            return
        with ThreadPoolExecutor(self.count) as threads, stopped_by_sigterm():
            lines = [json.dumps([to_table(one), how], default=os.path.abspath) for one in runs]
            waiting = {threads.submit(self._made, line): one for line, one in zip(lines, runs, strict=True)}
            try:
                for job in as_completed(waiting):
                    yield waiting[job], job.result()
            except BaseException:  # Ctrl-C: runs in progress save their last round
                threads.shutdown(wait=False, cancel_futures=True)
                for place in self.places:
                    place.stop()
                raise

    def _made(self, line: str) -> Exception | None:
        """Make a run at a place that is free."""
        place = self._free.get()
        try:
            kind, text = json.loads(place.make(line))
        finally:
            self._free.put(place)
        return {"": None, "InUse": InUse(text), "Diverged": Diverged(text)}.get(kind, ThinwireError(text))


def answer(line: str) -> str:
    """Make a run in this process; returns the kind of its error and the message as JSON, both "" if there is none.

    Args:
        line: the table of its settings and the arguments of `run_one`, as JSON.
    """
    table, how = json.loads(line)
    paths = {name: Path(how[name]) for name in ("out", "data_dir") if how.get(name)}
    try:
        run_one(from_table(table), **how | paths)
    except Exception as error:
        return json.dumps([type(error).__name__, why(error)])
    return '["", ""]'


class Place:
    """Makes one run after another: a process of this machine, which starts when it is first needed.

    Args:
        environment: what its environment has besides that of this process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
        self.process: subprocess.Popen[str] | None = None

    def make(self, line: str) -> str:
        """Make a run; see `answer`."""
        if (process := self.process) is None:
            # in a session of its own: Ctrl-C reaches this process alone, which stops the others once
            command = [sys.executable, "-m", "thinwire.runs.jobs"]
            given: Any = {"env": self.environment, "text": True, "start_new_session": True}
            process = self.process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, **given)
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError):
            print(line, file=process.stdin, flush=True)
        if text := process.stdout.readline():
            return text
        with process:  # it has ended, and its pipes are closed
            code, self.process = abs(process.wait()), None
        return json.dumps(["Killed", f"its process ended ({code}); the same command continues it"])

    def stop(self) -> None:
        """Interrupt the run in progress, whose last round is saved."""
        if self.process:
            self.process.terminate()

    def close(self) -> None:
        """End the process, which makes no run."""
        if process := self.process:
            with process:
                process.terminate()


class RayTask(Place):
    """A task of Ray at a time; one that is killed is repeated.

    Args:
        ray: Ray.
        task: `answer`, with its share of the cores and GPUs.
    """

    def __init__(self, ray: Any, task: Any) -> None:
        super().__init__({})
        self.ray, self.task, self.job = ray, task, None

    def make(self, line: str) -> str:
        """Make a run; see `answer`."""
        self.job = self.task.remote(line)
        try:
            return str(self.ray.get(self.job))
        except self.ray.exceptions.RayError as error:
            return json.dumps(["Ray", first_line(error)])

    def stop(self) -> None:
        """Interrupt the run in progress."""
        if self.job:
            self.ray.cancel(self.job)


def on_cluster(count: int, device: str) -> list[Place]:
    """Places on the cluster that RAY_ADDRESS names."""
    ray = need_ray()
    cores, gpus = shares(count, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    task = ray.remote(answer).options(num_cpus=cores, num_gpus=gpus if device == "cuda" else 0)
    return [RayTask(ray, task) for _ in range(count)]


def on_machine(count: int, device: str) -> list[Place]:
    """Places on this machine, each with its share of the threads and, of several GPUs, one in turn.

    >>> [place.environment["OMP_NUM_THREADS"] for place in on_machine(1000, "cpu")[:2]]
    ['1', '1']
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = seen.split(",") if device == "cuda" and "," in seen else []
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}
    return [Place(threads | ({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {})) for i in range(count)]


def serve() -> None:
    """Make the runs of the lines of the standard input; what they print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.showwarning = lambda message, *_, **__: print(f"thinwire: note: {message}", file=sys.stderr)
    with suppress(KeyboardInterrupt, BrokenPipeError):
        for line in sys.stdin:
            print(answer(line), file=answers, flush=True)


if __name__ == "__main__":
    serve()
