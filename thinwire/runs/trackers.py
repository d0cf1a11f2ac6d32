"""Trackers: functions that are called with every record, for the dashboards TensorBoard and MLflow.

    with tensorboard("runs/x/tensorboard") as on_round:
        tw.simulate(model, clients, "mapo", on_round=on_round)

For Weights & Biases the function is one line; `docs/reports.md` has it.
"""

from __future__ import annotations

import os
import shutil
import time
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

TRACKERS = ("tensorboard", "mlflow")
MLFLOW_RUN = "mlflow.json"  # in the run directory: the id of its run in MLflow


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record by column, with its metrics, and its total bytes."""
    values = {**columns(record._asdict()), "bytes_total": honest_bytes(record._asdict())}
    return {key: value for key, value in values.items() if isinstance(value, int | float) and key != "round"}


@contextmanager
def tensorboard(folder: Path | str) -> Iterator[Callable[[RoundRecord], None]]:
    """Write rounds for `tensorboard --logdir`; the folder is replaced.

    A resumed run reports all its rounds again, so every round is written exactly once.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("--log tensorboard needs tensorboard: pip install tensorboard") from error
    writer = None
    sent = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal sent, writer
        if writer is None:  # not earlier: a run that is refused must not write anything
            shutil.rmtree(folder, ignore_errors=True)
            writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
        sent += honest_bytes(record._asdict()) - record.bytes_abandoned  # those were counted when they were sent
        for name, value in {**scalars(record), "bytes_so_far": sent}.items():
            writer.add_scalar(name, value, record.round)  # type: ignore[no-untyped-call]

    try:
        yield on_round
    finally:
        if writer is not None:
            writer.close()  # type: ignore[no-untyped-call]


@contextmanager
def mlflow(run: Path | str) -> Iterator[Callable[[RoundRecord], None]]:
    """Log rounds to MLflow: to the server MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME ("thinwire").

    The id of the run in MLflow is stored in the run directory; a resumed run continues it. It reports all its rounds
    again, of which those that MLflow has are left out, so every round is logged exactly once.
    """
    try:
        import mlflow as package
    except ImportError as error:
        raise ConfigError("--log mlflow needs mlflow: pip install mlflow") from error
    client = package.MlflowClient()
    known, sent, done = "", 0, 0

    def on_round(record: RoundRecord) -> None:
        nonlocal known, sent, done
        if not known:  # not earlier: a run that is refused must not write anything
            try:
                known, done = _mlflow_run(client, Path(run))
            except package.exceptions.MlflowException as error:
                raise ConfigError(f"MLflow refused the run: {visible(str(error), 300)}") from error
        sent += honest_bytes(record._asdict()) - record.bytes_abandoned  # those were counted when they were sent
        if record.round > done:
            now = int(time.time() * 1000)
            values = {**scalars(record), "bytes_so_far": sent}
            client.log_batch(known, [package.entities.Metric(*one, now, record.round) for one in values.items()])

    try:
        yield on_round
    except BaseException:
        if known:
            client.set_terminated(known, "KILLED")
        raise
    if known:
        client.set_terminated(known, "FINISHED")


def _mlflow_run(client: Any, run: Path) -> tuple[str, int]:
    """The id of the run in MLflow, and the newest round that it has; a new one if there is none."""
    file = run / MLFLOW_RUN
    if file.is_file():
        known = str(read_json(file).get("run_id"))
        client.update_run(known, "RUNNING")
        return known, max((one.step for one in client.get_metric_history(known, "bytes_so_far")), default=0)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "thinwire")
    experiment = client.get_experiment_by_name(name)
    where = experiment.experiment_id if experiment else client.create_experiment(name)
    known = client.create_run(where, run_name=run.name).info.run_id
    if (run / "config.toml").is_file():  # one kept in memory has no files
        client.log_text(known, (run / "config.toml").read_text("utf-8"), "config.toml")
        write_json(file, {"run_id": known})
    return known, 0


@contextmanager
def tracker(name: str | None, run: Path) -> Iterator[Callable[[RoundRecord], None]]:
    """The tracker of that name, writing into a run directory; for None, one that does nothing."""
    if name is None:
        yield lambda record: None
        return
    if name not in TRACKERS:
        raise UnknownName("tracker", name, TRACKERS)
    with tensorboard(run / "tensorboard") if name == "tensorboard" else mlflow(run) as on_round:
        yield on_round
