"""The result of `tw.simulate`, `tw.run` and `tw.load_run`: records, bytes, weights, and the trained model.

For readers a run is a few lines, and a pandas frame.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from thinwire.core.text import html_text, human_bytes, visible
from thinwire.core.tree import Tree, to_device
from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.job import RoundRecord
from thinwire.metrics.objective import Objective
from thinwire.runs.best import Lead, recorded_objective, selected_by
from thinwire.runs.hub import save_folder, upload
from thinwire.runs.loop import Loop
from thinwire.runs.peft_export import no_adapter_of_average, save_adapter
from thinwire.runs.records import BEST, columns, read_clients, read_run, verify
from thinwire.runs.retry import Retry, read_retries
from thinwire.runs.run_directory import environment, records_of
from thinwire.runs.toml import Table
from thinwire.runs.watch import how_to_resume
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
        path: the run directory, if one was written.
        coords: the coordinates of the last version as it is evaluated, the values that were trained, by name: for LoRA
            the factors A and B. Empty in a loaded run.
        retries: how often it went back, with round, reason and bytes.
        clients: the numbers of each client at the end, the worst first: its name, training examples, validation
            examples, accuracy, loss and metrics. Empty if clients have no validation examples.
    """

    history: list[RoundRecord]
    weights: Tree
    buffers: Tree
    summary: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    coords: Tree = field(default_factory=dict)
    retries: list[Retry] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)
    _table: Table = field(default_factory=dict)
    _environment: dict[str, Any] = field(default_factory=dict)
    _best: Tree | None = None
    _start: nn.Module | None = None
    _space: Space | None = None
    _basis: Tree = field(default_factory=dict)

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
    def objective(self) -> Objective:
        """What runs are ranked by."""
        return recorded_objective(self.summary) or Objective()

    @property
    def selected_by(self) -> Objective:
        """What the best round is chosen by: the objective, or the clients' validation accuracy or loss."""
        validated = any(one.client_accuracy is not None or one.client_loss is not None for one in self.history)
        return selected_by(self.objective, validated)

    @property
    def backend(self) -> str:
        """The training backend: `graph`, `chain`, `threads`, `vmap` or `loop`."""
        return str(self._environment.get("clients_trained_by", ""))

    @property
    def backend_reason(self) -> str:
        """The reason for the backend, if it is not the default."""
        return str(self._environment.get("because", ""))

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
        return sum(retry.bytes_abandoned for retry in self.retries)

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
        """The records as a `pandas.DataFrame`, one row a round.

        A metric is a column of its name; a value over clients is one of its name after `clients_`.
        """
        import pandas

        return pandas.DataFrame([columns(record._asdict()) for record in self.history]).set_index("round")

    def plot(self) -> Any:
        """The objective against all bytes so far, as a `matplotlib.figure.Figure`."""
        from thinwire.reports.figures import Curve, curves

        sent = itertools.accumulate(one.bytes_up + one.bytes_down + one.bytes_catchup for one in self.history)
        values = [self.objective.value(record._asdict()) for record in self.history]
        points = [(x, y, y, y) for x, y in zip(sent, values, strict=True) if y is not None]
        return curves([Curve(self.name, points)], "total bytes (log scale)", self.objective.label, log_x=True)

    def save_adapter(self, folder: Path | str) -> None:
        """Write the adapter of a LoRA run as a folder that `peft.PeftModel.from_pretrained` loads."""
        if self._table.get("method", {}).get("evaluate") == "average":
            raise no_adapter_of_average()
        if self._start is None:
            raise ConfigError("a loaded run holds no adapter; `thinwire export RUN FOLDER` reads its checkpoint")
        save_adapter(folder, self._start, self._space or Full(), self._basis, self.coords, self.weights)

    def save_pretrained(self, folder: Path | str) -> list[Path]:
        """Write the model with a card that has its bytes: an adapter, a checkpoint of transformers, or a state dict."""
        return save_folder(self, Path(folder))

    def push_to_hub(self, repo: str, **options: Any) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face hub, such as to me/mapo; `private=True` hides it."""
        return upload(self, repo, **options)

    def __repr__(self) -> str:
        """At most five lines.

        >>> record = RoundRecord(1, 0.5, 0.9, 0.4, 1000, 1000, 0, 1, 0.1)
        >>> Run([record], {}, {}, {"method": "mapo", "task": "digits", "ended_by": "patience"}, _table={"rounds": 20})
        Run mapo on digits: 1 of 20 rounds, ended by patience
          test accuracy 90.00 % (best 90.00 % in round 1); training loss 0.5000
          sent 2 kB: 1 kB up, 1 kB down, 0 B catch-up
        """
        planned, objective = self._table.get("rounds", len(self.history)), self.objective
        why = (
            f"ended by {self.ended_by or '-'}" if self.status == "finished" else f"{self.status}: {self.status_reason}"
        )
        if self.summary.get("still_improving"):
            why += "; still improving: resume with more rounds, or tune"
        head = f"Run {self.name or 'run'} on {self.summary.get('task', 'a task')}"
        lines, evaluated = [f"{head}: {len(self.history)} of {planned} rounds, {why}"], ""
        if best := self.best:
            values = [value for one in self.history if (value := objective.value(one._asdict())) is not None]
            at = f"{objective.text(objective.value(best._asdict()))} in round {best.round}"
            by = f" (best {at})" if self.selected_by == objective else f"; {at}, the best by {self.selected_by.label}"
            evaluated = f"{objective.label} {objective.text(values[-1] if values else None)}{by}; "
        if self.history:
            lines.append(f"{evaluated}training loss {self.history[-1].loss:.4f}")
        for worst in self.clients[:1]:
            kind = Objective() if "accuracy" in worst else Objective("loss")
            at = f"{kind.name} {kind.text(worst[kind.name])} on {worst['examples']:,} validation examples"
            lines.append(f"client {worst['client']}: {at}, the worst of {len(self.clients):,} clients")
        sizes = {"up": self.bytes_up, "down": self.bytes_down, "catch-up": self.bytes_catchup}
        sizes |= {"abandoned": self.bytes_abandoned} if self.bytes_abandoned else {}
        parts = ", ".join(f"{human_bytes(size)} {way}" for way, size in sizes.items())
        lines.append(f"sent {human_bytes(self.bytes_total)}: {parts}")
        return "\n  ".join(visible(line, 300) for line in [*lines, *([f"directory {self.path}"] if self.path else [])])

    def _repr_html_(self) -> str:
        return "<pre>" + "\n".join(map(html_text, repr(self).splitlines())) + "</pre>"


def load_run(path: Path | str) -> Run:
    """Read a finished run, whose files are verified; one that diverged has no weights.

    The architecture is not stored: `run.model(module)` takes a module of yours.

    Args:
        path: a run directory, written by `out=` or the command line.
    """
    path = Path(path)
    if (path / "summary.json").is_file():
        verify(path)
    run = read_run(path)
    if run.summary is None:
        how = how_to_resume(path, run.table)
        raise CheckpointError(f"{path} is not finished ({len(run.records)} of {run.rounds} rounds); {how}")
    weights, best = (
        dict(load_file(file)) if file.is_file() else None for file in (path / "model.safetensors", path / BEST)
    )
    return Run(
        records_of(run.records),
        weights or {},
        {},
        run.summary,
        path=path,
        retries=read_retries(path),
        clients=read_clients(path),
        _table=run.table,
        _environment=run.environment,
        _best=best,
    )


def result_of(loop: Loop, table: Table) -> Run:
    """The result of a run that has ended, with all tensors on the CPU."""
    federation = loop.federation
    public = federation.evaluated(loop.state.server.public)
    space, device = federation.contract.at(public.version).method.space, federation.engine.device
    weights, buffers = federation.final(loop.state)
    return Run(
        records_of(loop.lines),
        to_device(weights, "cpu"),
        to_device(buffers, "cpu"),
        loop.summary,
        loop.folder.path if loop.folder else None,
        to_device(public.coords, "cpu"),
        loop.retries,
        loop.clients,
        table,
        {**environment(), **loop.facts()},
        dict(loop.best) or None,
        copy.deepcopy(loop.job.task.model).cpu(),
        space,
        to_device(federation.contract.basis(public.version, device), "cpu") if space.exports_adapter else {},
    )
