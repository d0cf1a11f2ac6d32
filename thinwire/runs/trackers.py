"""Trackers: functions that are called with every record.

    with tensorboard("runs/x") as on_round:
        tw.simulate(model, clients, "mapo", on_round=on_round)

A resumed run reports all its rounds again; every round is written exactly once. If
TensorBoard fails, the run goes on without it. For MLflow and Weights & Biases the
function is one line; `docs/reports.md` has them.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError
from thinwire.runs.records import columns, honest_bytes

if TYPE_CHECKING:
    from thinwire.federation.job import RoundRecord


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record by column, with its metrics, and its total bytes."""
    values = {**columns(record._asdict()), "bytes_total": honest_bytes(record._asdict())}
    return {key: value for key, value in values.items() if isinstance(value, int | float) and key != "round"}


@contextmanager
def tensorboard(run: Path | str) -> Iterator[Callable[[RoundRecord], None]]:
    """Log the rounds of a run into its directory, for `tensorboard --logdir`; yields a function of a record."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("--log tensorboard needs tensorboard: pip install tensorboard") from error
    folder, sent, failed = Path(run) / "tensorboard", 0, False
    writer: Any = None

    def write(record: RoundRecord) -> None:
        nonlocal writer, sent
        if writer is None:  # not earlier: a run that is refused must not write anything
            shutil.rmtree(folder, ignore_errors=True)
            writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
        sent += honest_bytes(record._asdict()) - record.bytes_abandoned  # those were counted when they were sent
        for name, value in {**scalars(record), "bytes_so_far": sent}.items():
            writer.add_scalar(name, value, record.round)

    def on_round(record: RoundRecord) -> None:
        nonlocal failed
        try:
            if not failed:
                write(record)
        except Exception as error:  # of any kind: the run goes on without it
            failed = True
            warnings.warn(f"tensorboard has no rounds from {record.round} on: {error}", stacklevel=2)

    try:
        yield on_round
    finally:
        with suppress(Exception):
            if writer is not None:
                writer.close()
