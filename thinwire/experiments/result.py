"""The result of `tw.simulate`, `tw.run_task` and `tw.load_run`: records, bytes, weights, and the trained model."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.experiments.peft_export import no_adapter_of_average, save_adapter
from thinwire.experiments.retry import Retry
from thinwire.experiments.run_files import Contents, write_run
from thinwire.experiments.run_text import Facts, as_frame, as_html, as_text
from thinwire.experiments.selection import Lead
from thinwire.metrics.objective import Objective
from thinwire.runtime.job import RoundRecord
from thinwire.spaces.base import Full, Space


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run that has ended.

    Args:
        history: one record a round.
        weights: the final trainable weights by name; with `evaluate = "average"` the averaged ones. In a loaded run,
            the buffers too.
        buffers: the final floating-point buffers by name, averaged alike.
        summary: its totals, as in `summary.json`.
        objective: what runs are ranked by.
        selected_by: what the best round is chosen by: the objective, or with validation examples the clients'
            validation accuracy or loss.
        backend: the backend: `graph`, `threads`, `vmap` or `loop`.
        backend_reason: the reason, if it is not the fastest.
        path: the run directory, if one was written.
        coords: the coordinates of the last version, the values that were trained, by name: for LoRA the factors A and
            B. Empty in a loaded run.
        retries: how often it went back, with round, reason and bytes (`on_divergence="retry"`).
    """

    history: list[RoundRecord]
    weights: Tree
    buffers: Tree
    summary: dict[str, Any] = field(default_factory=dict)
    objective: Objective = Objective()
    selected_by: Objective = Objective()
    backend: str = ""
    backend_reason: str = ""
    path: Path | None = None
    coords: Tree = field(default_factory=dict)
    retries: list[Retry] = field(default_factory=list)
    _contents: Contents = Contents()
    _start: nn.Module | None = None
    _best: Tree | None = None
    _space: Space | None = None
    _basis: Tree = field(default_factory=dict)
    _averaged: bool = False

    @property
    def name(self) -> str:
        """The label of its method."""
        return str(self.summary.get("method", ""))

    @property
    def status(self) -> str:
        """`finished`, `collapsed` (it had learned and ended at chance), `at chance` (it never learned), `diverged`."""
        return str(self.summary.get("status", "finished"))

    @property
    def status_reason(self) -> str:
        """One sentence about the status, if it is not `finished`."""
        return str(self.summary.get("status_why", ""))

    @property
    def ended_by(self) -> str:
        """Why it ended: `rounds`, `target accuracy`, `patience`, `stop function` or `divergence`."""
        return str(self.summary.get("ended_by", ""))

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
        return self.history[-1].accuracy if self.history else None

    @property
    def best(self) -> RoundRecord | None:
        """The record of the best round, by `selected_by`; None if no round was evaluated."""
        lead = Lead(self.selected_by).along(record._asdict() for record in self.history)
        return self.history[lead.round - 1] if lead.round else None

    def model(self, module: nn.Module | None = None) -> nn.Module:
        """A plain module with the final weights: a new copy for each call, on the CPU.

        Args:
            module: a module of the same architecture; needed for a loaded run only, and not changed.
        """
        return self._filled(module, {**self.weights, **self.buffers})

    def best_model(self, module: nn.Module | None = None) -> nn.Module:
        """A plain module with the weights of the best round; see `model`."""
        if self._best is None:
            why = (
                "no round was evaluated; give test=(inputs, targets) or validation_fraction=0.1"
                if self.best is None
                else "this run did not keep it; run it with --keep-best, or from Python"
            )
            raise ConfigError(f"there is no best model: {why}")
        return self._filled(module, self._best)

    def _filled(self, module: nn.Module | None, blocks: Tree) -> nn.Module:
        """A copy of a module, by default the initial one, with these weights and buffers."""
        given = self._start if module is None else module
        if given is None:
            raise ConfigError("a run directory holds no architecture; write run.model(module) with a module of yours")
        if not blocks:
            raise ConfigError(f"the run {self.status} and has no weights: {self.status_reason}")
        model = copy.deepcopy(given)
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        for name, block in blocks.items():
            if name not in own or own[name].shape != block.shape:
                found = f"has {tuple(own[name].shape)}" if name in own else "does not have it"
                raise ConfigError(f"{name} has shape {tuple(block.shape)} in the run, but this module {found}")
        with torch.no_grad():
            for name, block in blocks.items():
                own[name].copy_(block)
        return model

    def frame(self) -> Any:
        """The records as a `pandas.DataFrame`, one row a round; metrics are columns by their name."""
        return as_frame(self.history)

    def plot(self) -> Any:
        """The objective against all bytes so far, as a `matplotlib.figure.Figure`."""
        from thinwire.reports.figures import Curve, curves

        sent = itertools.accumulate(one.bytes_up + one.bytes_down + one.bytes_catchup for one in self.history)
        values = [self.objective.value(record._asdict()) for record in self.history]
        points = [(x, y, y, y) for x, y in zip(sent, values, strict=True) if y is not None]
        return curves([Curve(self.name, points)], "total bytes (log scale)", self.objective.label, log_x=True)

    def save(self, path: Path | str) -> Path:
        """Write a run directory, for `tw.load_run` and `tw.report`; it must not exist, or be empty."""
        best = self._best if self.best else None
        return write_run(Path(path), self._contents, self.history, self.summary, {**self.weights, **self.buffers}, best)

    def save_adapter(self, folder: Path | str) -> None:
        """Write the adapter of a LoRA run as a folder that `peft.PeftModel.from_pretrained` loads."""
        if self._averaged:
            raise no_adapter_of_average()
        if self._start is None:
            raise ConfigError("a loaded run holds no adapter; `thinwire export-peft RUN FOLDER` reads its checkpoint")
        save_adapter(folder, self._start, self._space or Full(), self._basis, self.coords, self.weights)

    def _facts(self) -> Facts:
        planned = self._contents.table.get("rounds", len(self.history))
        best = self.best, self.selected_by
        return Facts(self.summary, self.history, planned, self.objective, best, self.path)

    def __repr__(self) -> str:
        return as_text(self._facts())

    def _repr_html_(self) -> str:
        return as_html(self._facts())
