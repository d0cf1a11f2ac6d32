"""Trackers: TensorBoard, MLflow and Weights & Biases, by `--log`; other functions are called with every record.

    with tracker("tensorboard", "runs/x") as on_round:
        tw.simulate(model, clients, "mapo", on_round=on_round)

A resumed run reports all its rounds again: TensorBoard's files are written again, and the others get a new run
with every round once. If a tracker fails, the run goes on without it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError, UnknownName
from thinwire.runs.records import columns, honest_bytes

if TYPE_CHECKING:
    from thinwire.federation.job import RoundRecord


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record by column, with its metrics, and its total bytes."""
    values = {**columns(record._asdict()), "bytes_total": honest_bytes(record._asdict())}
    return {key: value for key, value in values.items() if isinstance(value, int | float) and key != "round"}


Board = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]  # log values of a round; end


def _tensorboard(run: Path) -> Board:
    """Files in the run directory, for `tensorboard --logdir`."""
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    writer: Any = SummaryWriter(str(run / "tensorboard"))  # type: ignore[no-untyped-call]
    return lambda values, step: [writer.add_scalar(name, one, step) for name, one in values.items()], writer.close


def _mlflow(run: Path) -> Board:
    """A run of MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say."""
    import mlflow

    mlflow.start_run(run_name=run.name)
    return lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


def _wandb(run: Path) -> Board:
    """A run of Weights & Biases, as WANDB_PROJECT, WANDB_MODE and others say."""
    import wandb

    board = wandb.init(name=run.name, dir=str(run))
    return lambda values, step: board.log(values, step=step), board.finish


TRACKERS = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}  # the names of their packages


@contextmanager
def tracker(name: str | None, run: Path | str | None) -> Iterator[Callable[[RoundRecord], None]]:
    """Log the rounds of a run directory to a tracker; yields a function of a record, which does nothing for None."""
    if name is None:
        yield lambda record: None
        return
    if name not in TRACKERS:
        raise UnknownName("tracker", name, TRACKERS)
    if find_spec(name) is None:
        raise ConfigError(f"--log {name} needs {name}: pip install {name}")
    if run is None:
        raise ConfigError(f"log={name!r} needs the folder of the run: out='runs/mine'")
    folder, sent, failed = Path(run), 0, False
    board: Board | None = None

    def on_round(record: RoundRecord) -> None:
        nonlocal board, sent, failed
        try:
            if not failed:
                board = board or TRACKERS[name](folder)  # not earlier: a run that is refused must not write anything
                sent += honest_bytes(record._asdict()) - record.bytes_abandoned  # counted when they were sent
                board[0]({**scalars(record), "bytes_so_far": sent}, record.round)
        except Exception as error:  # of any kind: the run goes on without it
            failed = True
            warnings.warn(f"{name} has no rounds from {record.round} on: {error}", stacklevel=2)

    try:
        yield on_round
    finally:
        with suppress(Exception):
            if board:
                board[1]()
