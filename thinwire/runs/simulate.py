"""`tw.simulate`: federated learning with your own model and data, in three lines of Python.

>>> import torch, thinwire as tw
>>> clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
>>> run = tw.simulate(torch.nn.Linear(4, 2), clients, tw.Method(client_opt=tw.SGD(0.1)), rounds=2, test=clients[0])
>>> len(run.history), run.bytes_total == sum(r.bytes_up + r.bytes_down + r.bytes_catchup for r in run.history)
(2, True)

The settings of a simulation of one's own model and data: those of a method, of a file, or the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.core.key import Key
from thinwire.data.fingerprint import fingerprint
from thinwire.data.losses import Loss, cross_entropy, loss_by_name
from thinwire.data.task import Task, as_examples, pool_clients, validation_fraction
from thinwire.errors import ConfigError
from thinwire.federation.attacks import Attack
from thinwire.federation.engine import Mode
from thinwire.federation.federation import Federation as Runner, OnMessage
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.local_engine import LocalEngine
from thinwire.federation.speed import Speed
from thinwire.metrics.base import Metric, metrics_by_name
from thinwire.protocol.method import Method
from thinwire.runs.config import stated_settings
from thinwire.runs.execute import Plan
from thinwire.runs.experiment import Checkpointing, Cohort, Evaluation, OnDivergence, method_table
from thinwire.runs.load import values_from
from thinwire.runs.loop import Watchers
from thinwire.runs.parts import describe, plain
from thinwire.runs.result import Run as Run
from thinwire.runs.run_task import Destination, start
from thinwire.runs.toml import Table
from thinwire.training.batches import Local
from thinwire.training.precision import Precision

OWN_TASK = "own data"  # the label of the task in reports


def simulate(
    model: nn.Module,
    clients: Sequence[Any],
    method: Method | str | None = None,
    *,
    rounds: int | None = None,
    cohort: int | None = None,
    test: Any = None,
    seed: int | None = None,
    loss: Loss | str | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    objective: str | None = None,
    validation_fraction: float = 0.0,
    local: Local | None = None,
    trainer: str | Callable[..., Any] | None = None,
    speed: Speed | None = None,
    device: str | None = None,
    backend: Mode | None = None,
    chunk: int | None = None,
    precision: Precision | None = None,
    eval_every: int | None = None,
    patience: int | None = None,
    target_accuracy: float | None = None,
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
    recipe: str | None = None,
) -> Run:
    """Simulate a federation of clients on this machine; every message is built, and its bytes are counted.

    Settings that are not given are those of the experiment file, if `method` is one, and otherwise the defaults below.

    Args:
        model: any nn.Module; it is copied and stays unchanged.
        clients: one entry a client: a pair `(inputs, targets)` of tensors, or a torch Dataset of such pairs.
        method: a Method, the name of one (`thinwire list methods`) or of several (`mapo+int8`), the path of an
            experiment file (`my.toml`, of which `[task]` is not used), or None for FedAvg. A Method, and None, is used
            as it is; names and files have a recipe.
        rounds: number of rounds; 10.
        cohort: clients in a round; all of them.
        test: a pair or a Dataset to evaluate on.
        seed: the root of all randomness; 0.
        loss: `loss(outputs, targets)`, one value for each example or their mean; or `cross-entropy`, `mse`, `bce`.
        metrics: metrics of the test set: functions of outputs and targets by name, `{"f1": fn}`, or names of built-in
            ones, `["f1"]` (docs/metrics.md).
        objective: what rounds are ranked by: `accuracy`, `loss` or a metric; accuracy if targets are class labels.
        validation_fraction: fraction of each client's examples that is kept from training; `patience` and the best
            model then go by the accuracy or loss on these, and the test set has no part in the choice.
        local: local training of a client in a round; one epoch with batches of 32.
        trainer: a function `fit(model, records)` that trains a client instead of our steps: a loop of your own, a
            `transformers.Trainer` (docs/own-trainer.md); or a reference to one, `my_trainer.py:fit`.
        speed: how long simulated clients take, for the simulated clock of the records (docs/methods/fedavg.md).
        device: `cpu` or `cuda`; `cpu`.
        backend: `auto`, `graph`, `threads`, `vmap` or `loop`; `auto`.
        chunk: clients trained together; 0 for the whole cohort.
        precision: `float32`, or on a GPU `tf32` or `bf16`, which are faster and less exact; `float32`.
        eval_every: rounds between two evaluations; 1.
        patience: end after so many evaluations without a new best one; 0 for never.
        target_accuracy: end after a round that reaches this accuracy on the test set.
        stop: end after a round for which `stop(record)`, or `stop(record, records)`, is true.
        callbacks: functions of the record, or objects with `on_round(record)` and perhaps `on_end(records)`
            (docs/runs.md).
        on_divergence: `stop`, or `retry`: if training diverges or collapses, go back to the last good state with half
            the client learning rate, at most five times (docs/runs.md); `stop`.
        on_round: is called with every record, for trackers (docs/reports.md).
        on_message: is called with every message: `on_message(round, "up" or "down", client, message)`.
        out: a run directory to write, for `resume`, `tw.load_run`, `tw.report` and `thinwire watch`.
        resume: continue the run in `out` from its newest checkpoint, with the same bits as without interruption; start
            it if there is none; return it if it is finished. Model, data and settings must be the same.
        overwrite: delete the run in `out` and start again.
        checkpoint_every: rounds between two checkpoints; 10.
        progress: a progress bar: True, False, or None for terminals and notebooks.
        name: the label of this run in reports; by default the name of the method, or of the directory.
        recipe: training settings that a method by name or a file does not state (docs/recipe.md); `paper` for none.
    """
    settings = Settings.of(method, recipe).changed(rounds=rounds, seed=seed, local=local, speed=speed)
    settings = settings.changed("local", trainer=trainer)
    settings = settings.changed("engine", device=device, backend=backend, chunk=chunk, precision=precision)
    settings = settings.changed(cohort=None if cohort is None else Cohort(cohort))
    settings = settings.changed("checkpoint", on_divergence=on_divergence, every=checkpoint_every, best=True)
    watchers = Watchers.of(on_round, on_message, callbacks, stop)
    destination = Destination.of(out, resume, overwrite, progress)
    chosen = settings.eval.metrics if metrics is None else metrics
    known = chosen if isinstance(chosen, Mapping) else metrics_by_name(chosen)
    given = {"every": eval_every, "patience": patience, "target_accuracy": target_accuracy, "objective": objective}
    settings = settings.changed("eval", metrics=tuple(known), **given)
    criterion = loss_by_name(loss) if isinstance(loss, str) else loss or cross_entropy
    task = _task(model, clients, test, criterion, validation_fraction, settings.seed)
    _check_early(settings, task)
    size = settings.cohort.size if settings.cohort else len(task.clients)
    early = settings.eval.every, known, settings.eval.objective, settings.attack, settings.speed
    job = Job(task, settings.method, settings.rounds, size, settings.local, settings.seed, *early)
    label = name or settings.name or (Path(out).name if out else "fedavg")
    simulation: Runner = settings.engine.prepare(job)
    table = _described(label, simulation, settings, validation_fraction)
    if out is not None:
        table = {"fingerprint": fingerprint(task), **table}
    parts = settings.method, settings.engine, settings.eval, settings.checkpoint, settings.rounds
    return start(Plan(label, OWN_TASK, table, *parts, lambda: simulation), destination, watchers)


def _task(model: nn.Module, clients: Sequence[Any], test: Any, loss: Loss, fraction: float, seed: int) -> Task:
    """The task of a model and its clients."""
    pool, assignment = pool_clients(clients)
    held_out = None
    if fraction:
        assignment, held_out = validation_fraction(assignment, fraction, Key(seed).fold("hold-out"))
    return Task(model, pool, assignment, None if test is None else as_examples(test), held_out, loss)


def _check_early(settings: Settings, task: Task) -> None:
    """Refuse an early end that nothing could bring about."""
    if settings.eval.patience and task.test is None and task.client_tests is None:
        raise ConfigError(
            f"patience = {settings.eval.patience} counts evaluations, but there is nothing to evaluate on; "
            "give test=(inputs, targets) or validation_fraction=0.1"
        )
    if settings.eval.target_accuracy < 1 and task.test is None:
        raise ConfigError(
            f"target_accuracy = {settings.eval.target_accuracy} is an accuracy on the test set, but there is none; "
            "give test=(inputs, targets)"
        )


def _described(name: str, simulation: Runner, settings: Settings, fraction: float) -> Table:
    """The configuration of a simulation, for config.toml of its run directory."""
    job = simulation.job
    return {
        "name": name,
        "script": sys.argv[0] or "your script",
        "seed": job.seed,
        "rounds": job.rounds,
        "task": {
            "kind": OWN_TASK,
            "clients": len(job.task.clients),
            "examples": len(job.task.train),
            "model": {"kind": type(job.task.model).__name__, "parameters": simulation.federation.model.parameters()},
            **({"validation_fraction": fraction} if fraction else {}),
        },
        "cohort": {"size": job.cohort},
        "local": plain(job.local),
        **({"speed": plain(job.speed)} if job.speed != Speed() else {}),
        "engine": plain(simulation.federation.engine),
        "eval": plain(settings.eval),
        "checkpoint": plain(replace(settings.checkpoint, best=False)),
        **({"attack": describe("attack", job.attack)} if job.attack else {}),
        "method": method_table(job.method, strict=False),
    }


@dataclass(frozen=True)
class Settings:
    """The settings of a simulation, without model and data: those of a method, of a file, or the defaults."""

    name: str | None = None
    method: Method = Method()
    local: Local = Local()
    cohort: Cohort | None = None
    engine: LocalEngine = LocalEngine()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpointing = Checkpointing()
    seed: int = 0
    rounds: int = 10
    attack: Attack | None = None
    speed: Speed = Speed()

    @classmethod
    def of(cls, method: Method | str | None, recipe: str | None = None) -> Settings:
        """The settings of a Method, of methods by name, or of an experiment file; names and files have a recipe.

        >>> Settings.of("mapo+int8").method.up.bits
        8
        """
        if method is None or isinstance(method, Method):
            if recipe is not None:
                raise ConfigError(
                    f"recipe = {recipe!r} is for methods by name and files; a Method is used as it is: set lr_schedule "
                    "and client_opt in it, or write the method's name"
                )
            return cls(method=method or Method())
        if not isinstance(method, str):
            raise ConfigError(
                f"method must be a Method, the name of one or a file (.toml), not {type(method).__name__}; "
                "write for example 'fedavg'"
            )
        name, table = stated_settings(method, recipe)
        given = values_from(table)
        known = {key: value for key, value in given.items() if key in cls.__dataclass_fields__}
        return cls(**{**known, "name": name})

    def changed(self, part: str = "", **given: Any) -> Settings:
        """A copy with other values; None leaves a value unchanged.

        Args:
            part: the field whose values are meant, such as `engine`; "" for the settings themselves.
            **given: the values.

        >>> Settings().changed("eval", every=5, patience=None).eval.every
        5
        """
        known = {key: value for key, value in given.items() if value is not None}
        return replace(self, **({part: replace(getattr(self, part), **known)} if part else known))
