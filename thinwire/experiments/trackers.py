"""Trackers: functions that are called with every record, for dashboards such as TensorBoard.

    with tensorboard("runs/x/tensorboard") as on_round:
        tw.simulate(model, clients, "mapo", on_round=on_round)

For MLflow or Weights & Biases the function is one line; `docs/reports.md` has both.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.records import honest_bytes

if TYPE_CHECKING:
    from thinwire.runtime.job import RoundRecord

TRACKERS = ("tensorboard",)


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numeric fields of a record by name, and its total bytes."""
    numeric = {key: value for key, value in record._asdict().items() if isinstance(value, int | float)}
    known = {key: value for key, value in numeric.items() if key != "round"}
    return {**known, "bytes_total": honest_bytes(record._asdict())}


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
def tracker(name: str | None, run: Path) -> Iterator[Callable[[RoundRecord], None]]:
    """The tracker of that name, writing into a run directory; for None, one that does nothing."""
    if name is None:
        yield lambda record: None
        return
    if name not in TRACKERS:
        raise UnknownName("tracker", name, TRACKERS)
    with tensorboard(run / "tensorboard") as on_round:
        yield on_round
