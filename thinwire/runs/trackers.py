"""Trackers: functions that are called with every record, for the dashboards TensorBoard and MLflow.

    with tracker("tensorboard", "runs/x") as on_round:
        tw.simulate(model, clients, "mapo", on_round=on_round)

A resumed run reports all its rounds again; every round is written exactly once. For Weights & Biases the function is
one line; `docs/reports.md` has it.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.text import visible
from thinwire.errors import ConfigError, UnknownName
from thinwire.runs.files import read_json, write_json
from thinwire.runs.records import columns, honest_bytes

if TYPE_CHECKING:
    from thinwire.federation.job import RoundRecord

MLFLOW_RUN = "mlflow.json"  # in the run directory: the id of its run in MLflow

Log = Callable[[int, dict[str, float]], None]  # is called with the number of a round and its values
End = Callable[[bool], None]  # is called at the end, with whether the run finished


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record by column, with its metrics, and its total bytes."""
    values = {**columns(record._asdict()), "bytes_total": honest_bytes(record._asdict())}
    return {key: value for key, value in values.items() if isinstance(value, int | float) and key != "round"}


@contextmanager
def tracker(name: str | None, run: Path | str) -> Iterator[Callable[[RoundRecord], None]]:
    """Log the rounds of a run; yields a function to call with every record, which does nothing without a name.

    Args:
        name: `tensorboard`, which writes into the run directory for `tensorboard --logdir`; or `mlflow`, which logs to
            the server MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME ("thinwire").
        run: the run directory.
    """
    if name is None:
        yield lambda record: None
        return
    if name not in _TRACKERS:
        raise UnknownName("tracker", name, _TRACKERS)
    module, begin = _TRACKERS[name]
    try:
        package = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--log {name} needs {name}: pip install {name}") from error
    log: Log | None = None
    end: End | None = None  # nothing was begun before the first round
    sent = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal log, end, sent
        if log is None:  # not earlier: a run that is refused must not write anything
            log, end = begin(package, Path(run))
        sent += honest_bytes(record._asdict()) - record.bytes_abandoned  # those were counted when they were sent
        log(record.round, {**scalars(record), "bytes_so_far": sent})

    finished = False
    try:
        yield on_round
        finished = True
    finally:
        if end is not None:
            end(finished)


def _tensorboard(package: Any, run: Path) -> tuple[Log, End]:
    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    writer = package.SummaryWriter(str(run / "tensorboard"))

    def log(number: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, number)

    return log, lambda finished: writer.close()


def _mlflow(package: Any, run: Path) -> tuple[Log, End]:
    """Continue the run in MLflow whose id is in the run directory, without the rounds that it has; or begin one."""
    client, file, known, done = package.MlflowClient(), run / MLFLOW_RUN, None, 0
    try:
        if file.is_file():
            known = str(read_json(file).get("run_id"))
            done = max((one.step for one in client.get_metric_history(known, "bytes_so_far")), default=0)
        package.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "thinwire"))
        known = package.start_run(known, run_name=run.name).info.run_id
        if (run / "config.toml").is_file():  # one kept in memory has no files
            package.log_artifact(str(run / "config.toml"))
            write_json(file, {"run_id": known})
    except package.exceptions.MlflowException as error:
        raise ConfigError(f"MLflow refused the run: {visible(str(error), 300)}") from error

    def log(number: int, values: dict[str, float]) -> None:
        if number > done:
            package.log_metrics(values, step=number)

    return log, lambda finished: package.end_run("FINISHED" if finished else "KILLED")


_TRACKERS: dict[str, tuple[str, Callable[[Any, Path], tuple[Log, End]]]] = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
}
