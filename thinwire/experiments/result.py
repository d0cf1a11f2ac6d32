"""The result of `tw.simulate`: records, bytes, final weights, and the trained model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from thinwire.core.tree import Tree
from thinwire.experiments.peft_export import no_adapter_of_average, save_adapter
from thinwire.experiments.retry_store import Retry
from thinwire.runtime.job import RoundRecord
from thinwire.spaces.base import Space
from thinwire.spaces.full import Full


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Args:
        history: one record a round.
        weights: the final trainable weights by name; with `evaluate = "average"` the averaged ones.
        buffers: the final floating-point buffers by name, averaged alike.
        backend: the backend: `graph`, `threads`, `vmap` or `loop`.
        backend_reason: the reason, if it is not the fastest.
        path: the run directory, if one was written.
        coords: the coordinates of the last version, the values that were trained, by name: for LoRA the factors A and
            B.
        status: `finished`, `collapsed` (it had learned and ended at chance) or `at chance` (it never learned).
        status_reason: one sentence about the status, if it is not `finished`.
        retries: how often it went back, with round, reason and bytes (`on_divergence="retry"`).
    """

    history: list[RoundRecord]
    weights: Tree
    buffers: Tree
    backend: str
    backend_reason: str
    _start: nn.Module
    path: Path | None = None
    coords: Tree = field(default_factory=dict)
    status: str = "finished"
    status_reason: str = ""
    _space: Space | None = None
    _basis: Tree = field(default_factory=dict)
    retries: list[Retry] = field(default_factory=list)
    _averaged: bool = False

    @property
    def bytes_up(self) -> int:
        """Bytes that clients uploaded."""
        return sum(record.bytes_up for record in self.history)

    @property
    def bytes_down(self) -> int:
        """Bytes that clients downloaded, without `bytes_catchup`."""
        return sum(record.bytes_down for record in self.history)

    @property
    def bytes_catchup(self) -> int:
        """Additional bytes that clients downloaded because they had missed rounds."""
        return sum(record.bytes_catchup for record in self.history)

    @property
    def bytes_abandoned(self) -> int:
        """Bytes of rounds that were trained and then abandoned; they are not in `bytes_up` and `bytes_down`."""
        return sum(retry.bytes for retry in self.retries)

    @property
    def bytes_total(self) -> int:
        """All bytes that were sent."""
        return self.bytes_up + self.bytes_down + self.bytes_catchup + self.bytes_abandoned

    @property
    def bytes_ideal(self) -> int:
        """The total as many papers count it: without `bytes_catchup` and `bytes_abandoned`."""
        return self.bytes_up + self.bytes_down

    @property
    def accuracy(self) -> float | None:
        """The accuracy on the test set after the last round; None without test examples."""
        return self.history[-1].accuracy

    def model(self) -> nn.Module:
        """A plain module with the final weights: a new copy for each call, on the CPU."""
        model = copy.deepcopy(self._start)
        final = {**self.weights, **self.buffers}
        with torch.no_grad():
            for name, block in (*model.named_parameters(), *model.named_buffers()):
                if name in final:
                    block.copy_(final[name])
        return model

    def save_adapter(self, folder: Path | str) -> None:
        """Write the adapter of a LoRA run as a folder that `peft.PeftModel.from_pretrained` loads."""
        if self._averaged:
            raise no_adapter_of_average()
        save_adapter(folder, self._start, self._space or Full(), self._basis, self.coords, self.weights)
