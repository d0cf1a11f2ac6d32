"""The examples of one client, for a trainer of one's own.

>>> import numpy as np
>>> from thinwire.core.key import Key
>>> from thinwire.data.examples import Arrays
>>> from thinwire.training.batches import Local, plan_batches
>>> pool = Arrays(torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1]))
>>> plan = plan_batches([3], [Key(0)], Local(batch=2))
>>> work = Workload(torch.from_numpy(plan.index), plan.rows, (3,), (Key(0),), pool.gather, examples=(np.arange(3),))
>>> records = Records(work)
>>> len(records), [target.item() for _, target in records], [len(x) for x, _ in records.batches()]
(3, [0, 1, 0], [2, 1])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from thinwire.metrics.labels import IGNORED
from thinwire.training.inputs import Workload

LABELS = "labels"  # the name that models of `transformers` have for targets


class Records(Dataset[Any]):
    """The examples of one client: a torch `Dataset`, and the batches that this round would train on.

        records[i]          (inputs, target); where inputs are named, a dictionary of them and `labels`
        records.inputs      the inputs of all examples, and records.targets
        records.batches()   pairs (inputs, targets), by `local.epochs`, `local.batch` and `local.steps`

    Rows of tokens (`TokenRows`) have labels as `transformers` counts them: the token itself, not the next one, and -100
    where nothing is learned.

    Args:
        work: the batches and examples of the client.
    """

    def __init__(self, work: Workload) -> None:
        self._work, self._index = work, torch.from_numpy(work.examples[0]).to(work.index.device)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Any:
        if not -len(self) <= i < len(self):
            raise IndexError(f"record {i} of {len(self)}")
        inputs, target = self._work.gather(self._index[i])
        return _named(inputs, target) if isinstance(inputs, dict) else (inputs, target)

    @property
    def inputs(self) -> Any:
        """The inputs of all examples."""
        return self._work.gather(self._index)[0]

    @property
    def targets(self) -> Tensor:
        """The targets of all examples."""
        return self._work.gather(self._index)[1]

    def batches(self) -> Iterator[tuple[Any, Tensor]]:
        """The batches of this round, in the order that our own steps would take them."""
        for step, rows in enumerate(self._work.rows[0].tolist()):
            if rows:
                yield self._work.gather(self._work.index[0, step, :rows])


def _named(inputs: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    """Inputs and labels of one example under the names of `transformers`."""
    if "label_positions" not in inputs:
        return {**inputs, LABELS: target}
    labels, known = torch.full_like(inputs["input_ids"], IGNORED), target != IGNORED
    labels[inputs["label_positions"][known] + 1] = target[known]  # the model itself looks one token ahead
    return {**{name: block for name, block in inputs.items() if name != "label_positions"}, LABELS: labels}
