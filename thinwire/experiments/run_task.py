"""`tw.run_task`: a method on a task, as `thinwire run METHOD --on TASK`, from Python.

>>> import thinwire as tw
>>> run = tw.run_task("fedavg", "digits", rounds=2, overrides={"local.epochs": 1})
>>> len(run.history), run.ended_by
(2, 'rounds')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.experiments.experiment import Experiment, OnDivergence
from thinwire.experiments.load import DEFAULT_TASK
from thinwire.experiments.plan import Plan
from thinwire.experiments.resolve import resolve
from thinwire.experiments.result import Run
from thinwire.experiments.start import Destination, start
from thinwire.experiments.watchers import Watchers
from thinwire.protocol.method import Method
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import RoundRecord


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
        on: the name of a task (`thinwire list tasks`).
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
    experiment = _experiment(method, _task_name(on), values, recipe, name)
    if metrics:
        names = dict.fromkeys((*experiment.eval.metrics, *metrics))
        experiment = replace(experiment, eval=replace(experiment.eval, metrics=tuple(names)))
    plan = Plan.of(experiment, None if data_dir is None else Path(data_dir))
    destination = Destination.of(out, resume, overwrite, progress)
    return start(plan, destination, Watchers.of(on_round, on_message, callbacks, stop))


def _task_name(on: Any) -> str:
    """The name of a task; the one place where tasks of one's own are given a name."""
    if isinstance(on, str):
        return on
    raise ConfigError(f"on must be the name of a task, such as 'digits', not {type(on).__name__}")


def _experiment(
    method: Method | str, on: str, values: dict[str, Any], recipe: str | None, name: str | None
) -> Experiment:
    if isinstance(method, str):
        experiment = resolve(method, on, values, recipe)
        return replace(experiment, name=name) if name else experiment
    if not isinstance(method, Method):
        raise ConfigError(f"method must be the name of a method or a Method, not {type(method).__name__}")
    return replace(resolve("fedavg", on, values, recipe or "paper"), method=method, name=name or "method")
