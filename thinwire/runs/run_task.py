"""`tw.run_task`: a method on a task, as `thinwire run METHOD --on TASK`, from Python.

>>> import thinwire as tw
>>> run = tw.run_task("fedavg", "digits", rounds=2, overrides={"local.epochs": 1})
>>> len(run.history), run.ended_by
(2, 'rounds')

How a run is started from Python: where it is written, what is in that folder already, and what is shown.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.core.tree import to_device
from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.federation import OnMessage
from thinwire.federation.job import RoundRecord
from thinwire.protocol.method import Method
from thinwire.runs.best import selected_by
from thinwire.runs.config import resolve
from thinwire.runs.execute import (
    Finished,
    Plan,
    environment_facts,
    final_model,
    must_repeat,
    refuse_diverged,
    reopen,
    run_plan,
)
from thinwire.runs.experiment import Experiment, OnDivergence
from thinwire.runs.files import message_of
from thinwire.runs.load import DEFAULT_TASK
from thinwire.runs.loop import CallbackFailed, OnRound, Watchers
from thinwire.runs.own_task import task_name
from thinwire.runs.progress import Style, shown, style_of
from thinwire.runs.records import rounds_in
from thinwire.runs.result import Run
from thinwire.runs.run_directory import RunFolder, environment, identity
from thinwire.runs.toml import Table, flat
from thinwire.spaces.exact_lora import LoRASB
from thinwire.spaces.lora import LoRA


def run_task(
    method: Method | str = "fedavg",
    on: Any = DEFAULT_TASK,
    *,
    rounds: int | None = None,
    clients: int | None = None,
    cohort: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    metrics: Sequence[str] = (),
    objective: str | None = None,
    validation_fraction: float | None = None,
    eval_every: int | None = None,
    patience: int | None = None,
    target_accuracy: float | None = None,
    overrides: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    stop: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] = (),
    on_divergence: OnDivergence | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_message: OnMessage | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int | None = None,
    progress: bool | None = None,
    name: str | None = None,
    data_dir: Path | str | None = None,
) -> Run:
    """Run a method on a task. Settings that are not given are those of the task's preset, the method and the recipe.

    Args:
        method: the name of a method, several joined by `+`, a file (`my.toml`), or a Method, which is used as it is.
        on: the name of a task (`thinwire list tasks`), a reference (`my_task.py:task`), a file, or a `Task`, or a
            function of `seed` that returns one.
        rounds: number of rounds.
        clients: number of clients.
        cohort: clients in a round.
        seed: the root of all randomness.
        device: `cpu` or `cuda`.
        metrics: names of metrics, besides those of the task and the file.
        objective: what rounds are ranked by: `accuracy`, `loss` or a metric.
        validation_fraction: fraction of each client's examples that is kept from training (docs/runs.md).
        eval_every: rounds between two evaluations.
        patience: end after so many evaluations without a new best one.
        target_accuracy: end after a round that reaches this accuracy on the test set.
        overrides: other settings by dotted path, `{"method.client_opt.lr": 0.05}`; they win over the arguments.
        recipe: training settings where nothing else states them (docs/recipe.md).
        stop: end after a round for which `stop(record)`, or `stop(record, records)`, is true.
        callbacks: functions of the record, or objects with `on_round(record)` and perhaps `on_end(records)`.
        on_divergence: `stop` or `retry` (docs/runs.md).
        on_round: is called with every record.
        on_message: is called with every message.
        out: the run directory; nothing is written without it.
        resume: continue the run in `out`; return it if it is finished.
        overwrite: delete the run in `out` and start again.
        checkpoint_every: rounds between two checkpoints.
        progress: a progress bar: True, False, or None for terminals and notebooks.
        name: the label of this run in reports; by default the name of the method.
        data_dir: the folder of datasets.
    """
    given = {
        "rounds": rounds,
        "task.clients": clients,
        "cohort.size": cohort,
        "seed": seed,
        "engine.device": device,
        "eval.objective": objective,
        "task.validation_fraction": validation_fraction,
        "eval.every": eval_every,
        "eval.patience": patience,
        "eval.target_accuracy": target_accuracy,
        "checkpoint.every": checkpoint_every,
        "checkpoint.on_divergence": on_divergence,
        "checkpoint.best": True,
    }
    values = {key: value for key, value in given.items() if value is not None} | dict(overrides or {})
    experiment = _experiment(method, task_name(on), values, recipe, name)
    if metrics:
        names = dict.fromkeys((*experiment.eval.metrics, *metrics))
        experiment = replace(experiment, eval=replace(experiment.eval, metrics=tuple(names)))
    plan = Plan.of(experiment, None if data_dir is None else Path(data_dir))
    destination = Destination.of(out, resume, overwrite, progress)
    return start(plan, destination, Watchers.of(on_round, on_message, callbacks, stop))


def _experiment(
    method: Method | str, on: str, values: dict[str, Any], recipe: str | None, name: str | None
) -> Experiment:
    if isinstance(method, str):
        experiment = resolve(method, on, values, recipe)
        return replace(experiment, name=name) if name else experiment
    if not isinstance(method, Method):
        raise ConfigError(f"method must be the name of a method or a Method, not {type(method).__name__}")
    return replace(resolve("fedavg", on, values, recipe or "paper"), method=method, name=name or "method")


class Destination(NamedTuple):
    """Where a run is written.

    Args:
        path: the run directory; None to write nothing.
        resume: continue the run in it.
        overwrite: delete the run in it.
        style: how progress is shown.
    """

    path: Path | None = None
    resume: bool = False
    overwrite: bool = False
    style: Style = "nothing"

    @classmethod
    def of(cls, out: Path | str | None, resume: bool, overwrite: bool, progress: bool | None) -> Destination:
        """Check what a caller gave."""
        if out is None and (resume or overwrite):
            raise ConfigError(
                f"{'resume' if resume else 'overwrite'}=True needs the folder of the run: out='runs/mine'"
            )
        if resume and overwrite:
            raise ConfigError(
                "resume=True keeps the run in the folder and overwrite=True deletes it; write one of them"
            )
        return cls(None if out is None else Path(out), resume, overwrite, style_of(progress))


def start(plan: Plan, destination: Destination, watchers: Watchers) -> Run:
    """Run a plan, or return the finished run in its folder."""
    folder = None if destination.path is None else RunFolder(destination.path, plan.table)
    with _one_line(destination), shown(plan.name, plan.rounds, destination.style, plan.accounting) as show:
        watchers = replace(watchers, on_round=_seen(watchers.on_round, show))
        finished = _finished(plan, folder, destination, watchers)
    return _result(plan, finished, destination.path)


def _finished(plan: Plan, folder: RunFolder | None, destination: Destination, watchers: Watchers) -> Finished:
    """The run after its last round."""
    again = False
    if folder is not None and _holds_run(folder):
        again = destination.overwrite
        if not again:
            _check_same(folder, destination.resume)
            if done := folder.summary():
                again = must_repeat(plan, folder, done, "write on_divergence='retry', or overwrite=True")
                if not again:
                    refuse_diverged(done, "overwrite=True")
                    return reopen(plan, folder, done)
    return run_plan(plan, folder, watchers, resume=destination.resume, again=again)


def _holds_run(folder: RunFolder) -> bool:
    """Whether there is a run in the folder; anything else in it is an error."""
    path = folder.path
    if (path / "config.toml").is_file():
        return True
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "and is not a run directory" if path.is_dir() else "and is a file, not a run directory"
        raise CheckpointError(f"{path} exists {what}; name another folder with out=")
    return False


def _check_same(folder: RunFolder, resume: bool) -> None:
    """Refuse a folder with another run, and one that the caller did not ask to continue."""
    theirs = RunFolder.open(folder.path)
    if not resume:
        done, rounds = len(theirs.history()), theirs.table.get("rounds", "?")
        raise CheckpointError(
            f"{folder.path} holds a run already ({theirs.table.get('name', '?')}, {done} of {rounds} rounds); "
            "name another folder, or write resume=True to continue it or overwrite=True to delete it"
        )
    if theirs.config == folder.config:
        return
    what = _difference(identity(theirs.table), identity(folder.table))
    raise CheckpointError(
        f"{folder.path} holds another run: {what}; a run continues with its own settings only: "
        "name another folder, or write overwrite=True to delete it"
    )


def _difference(theirs: Table, ours: Table) -> str:
    """The first settings in which two runs differ.

    >>> _difference({"rounds": 5, "eval": {"every": 1}}, {"rounds": 9, "eval": {"every": 1}})
    'rounds = 5 there, 9 here'
    """
    one, two = flat(theirs), flat(ours)
    differ = [key for key in dict.fromkeys((*one, *two)) if one.get(key) != two.get(key)]
    named = [f"{key} = {one.get(key, 'unset')} there, {two.get(key, 'unset')} here" for key in differ]
    if "fingerprint" in differ:
        told = "other data, or other initial weights of the model (call torch.manual_seed before the model is made)"
        named = [told, *(text for text in named if not text.startswith("fingerprint"))]
    more = f" (and {len(named) - 2} more)" if len(named) > 2 else ""
    return visible("; ".join(named[:2]), 300) + more


def _seen(on_round: OnRound | None, show: OnRound) -> OnRound:
    """The caller's function, with progress and alarms."""

    def on_record(record: RoundRecord) -> None:
        if record.alarm:
            warnings.warn(f"round {record.round}: {record.alarm}", RuntimeWarning, stacklevel=2)
        show(record)
        if on_round:
            on_round(record)

    return on_record


@contextmanager
def _one_line(destination: Destination) -> Iterator[None]:
    """Errors of the run directory in one line; after Ctrl-C and errors of callbacks, how to continue."""
    path = destination.path
    try:
        yield
    except OSError as error:
        if path is None or not _about(error, path):
            raise
        left = f"; resume=True continues it from {path}" if os.path.isfile(path / "config.toml") else ""
        raise CheckpointError(f"{message_of(error)}{left}") from error
    except CallbackFailed as error:
        if path is None:
            raise
        raise CallbackFailed(f"{error}; resume=True continues the run in {path}") from error.__cause__
    except KeyboardInterrupt:
        if destination.style != "nothing":
            print(visible(_stopped(path)), file=sys.stderr)
        raise


def _about(error: OSError, path: Path) -> bool:
    """Whether an error of the system is about a file in a run directory, or a folder above it."""
    file = Path(str(error.filename or "/"))
    return file.is_relative_to(path) or path.is_relative_to(file)


def _stopped(path: Path | None) -> str:
    if path is None:
        return "stopped; nothing was saved, since out= names no folder"
    rounds = rounds_in(path / "checkpoints")
    at = f"round {rounds[-1]} is saved" if rounds else "before its first round"
    return f"stopped, {at}; the same call with resume=True continues the run in {path}"


def _result(plan: Plan, finished: Finished, path: Path | None) -> Run:
    """The run with all tensors on the CPU."""
    simulation, state = finished.simulation, finished.state
    public = state.server.public
    space = simulation.contract.at(public.version).method.space
    basis = {}
    if isinstance(space, LoRA | LoRASB):
        basis = to_device(simulation.contract.basis(public.version, simulation.federation.engine.device), "cpu")
    weights, buffers = final_model(simulation, state)
    return Run(
        finished.records,
        weights,
        buffers,
        finished.summary,
        simulation.job.ranked_by,
        selected_by(simulation.job),
        state.backend,
        state.backend_reason,
        path,
        to_device(public.coords, "cpu"),
        finished.retries,
        plan.table,
        {**environment(), **environment_facts(plan, simulation, state)},
        copy.deepcopy(simulation.job.task.model).cpu(),
        finished.best.weights if finished.best else None,
        space,
        basis,
        simulation.federation.averages,
    )
