"""`tw.simulate`: federated learning with your own model and data, in three lines of Python.

>>> import torch, thinwire as tw
>>> clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
>>> run = tw.simulate(torch.nn.Linear(4, 2), clients, tw.Method(client_opt=tw.SGD(0.1)), rounds=2, test=clients[0])
>>> len(run.history), run.bytes_total == sum(r.bytes_up + r.bytes_down + r.bytes_catchup for r in run.history)
(2, True)
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.core.tree import Tree
from thinwire.data.losses import Loss, cross_entropy, loss_by_name
from thinwire.data.task import Task, as_examples, pool_clients
from thinwire.errors import ConfigError, Diverged
from thinwire.experiments.chance import chance_of
from thinwire.experiments.collapse import judge
from thinwire.experiments.experiment import Checkpointing, Cohort, Evaluation, OnDivergence, method_table
from thinwire.experiments.load import values_from
from thinwire.experiments.loop import Stop
from thinwire.experiments.parts import plain
from thinwire.experiments.resolve import stated_settings
from thinwire.experiments.result import Run as Run
from thinwire.experiments.retry import Rescue, check_retry
from thinwire.experiments.retry_store import MemoryStore, Retry
from thinwire.experiments.run_directory import RunFolder
from thinwire.experiments.summary import diverged_summary, summarize
from thinwire.experiments.toml import Table
from thinwire.metrics.base import Metric, metrics_by_name
from thinwire.protocol.method import Method
from thinwire.runtime.engine import Mode
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import Job, RoundRecord, RunState
from thinwire.runtime.runner import Runner
from thinwire.simulation.engine import LocalEngine
from thinwire.spaces.lora import LoRA
from thinwire.training.batches import Local
from thinwire.training.precision import Precision

OWN_TASK = "own data"  # the label of the task in reports


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

    def changed(self, **given: Any) -> Settings:
        """A copy with other values; None leaves a value unchanged."""
        return replace(self, **{key: value for key, value in given.items() if value is not None})


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
    local: Local | None = None,
    device: str | None = None,
    backend: Mode | None = None,
    chunk: int | None = None,
    precision: Precision | None = None,
    eval_every: int | None = None,
    on_divergence: OnDivergence | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_message: OnMessage | None = None,
    out: Path | str | None = None,
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
        local: local training of a client in a round; one epoch with batches of 32.
        device: `cpu` or `cuda`; `cpu`.
        backend: `auto`, `graph`, `threads`, `vmap` or `loop`; `auto`.
        chunk: clients trained together; 0 for the whole cohort.
        precision: `float32`, or on a GPU `tf32` or `bf16`, which are faster and less exact; `float32`.
        eval_every: rounds between two evaluations; 1.
        on_divergence: `stop`, or `retry`: if training diverges or collapses, go back to the last good state with half
            the client learning rate, at most five times (docs/runs.md); `stop`.
        on_round: is called with every record, for progress bars and trackers (docs/reports.md).
        on_message: is called with every message: `on_message(round, "up" or "down", client, message)`.
        out: a run directory to write, for `tw.report` and `thinwire watch`; an earlier run of a script is replaced.
        name: the label of this run in reports; by default the name of the method, or of the directory.
        recipe: training settings that a method by name or a file does not state (docs/recipe.md); `paper` for none.
    """
    settings = Settings.of(method, recipe).changed(rounds=rounds, seed=seed, local=local)
    engine = {"device": device, "backend": backend, "chunk": chunk, "precision": precision}
    engine = {key: value for key, value in engine.items() if value is not None}
    settings = replace(settings, engine=replace(settings.engine, **engine))  # type: ignore[arg-type]
    if cohort is not None:
        settings = replace(settings, cohort=Cohort(cohort))
    if eval_every is not None:
        settings = replace(settings, eval=replace(settings.eval, every=eval_every))
    if on_divergence is not None:
        settings = replace(settings, checkpoint=replace(settings.checkpoint, on_divergence=on_divergence))
    label = name or settings.name or (Path(out).name if out else "fedavg")
    if metrics is None:
        metrics = settings.eval.metrics
    chosen = metrics if isinstance(metrics, Mapping) else metrics_by_name(metrics)
    criterion = loss_by_name(loss) if isinstance(loss, str) else loss or cross_entropy
    job = replace(_job(model, clients, test, criterion, settings), metrics=chosen)
    retry = settings.checkpoint.on_divergence == "retry"
    if retry:
        check_retry(job.method, settings.engine)
    simulation: Runner = settings.engine.prepare(job)
    state = simulation.start()
    folder = None if out is None else RunFolder(Path(out), _described(label, simulation))
    with folder.replaced() if folder else nullcontext():
        history: list[RoundRecord] = []
        stop = Stop(job.rounds, settings.eval.target_accuracy)
        rescue = Rescue(settings.engine.prepare, job, store := MemoryStore(folder), settings.checkpoint.every)
        rescue.active = retry
        loop = rescue.rounds(simulation, state, stop, history, on_message=on_message)
        try:
            for simulation, state, record in loop:  # noqa: B007 - the last state is used below
                if record.alarm:
                    warnings.warn(f"round {record.round}: {record.alarm}", RuntimeWarning, stacklevel=2)
                history.append(record)
                if folder:
                    folder.record(record)
                if on_round:
                    on_round(record)
        except Diverged as error:
            if folder:
                found = summarize(label, OWN_TASK, simulation, history, state.sync_counts, retries=store.retries)
                folder.record_diverged(str(error), diverged_summary(found, error))
            raise
        run = _finished(simulation, state, history, folder, store.retries)
        if folder:
            _write_results(folder, label, simulation, state, run)
    return run


def _job(model: nn.Module, clients: Sequence[Any], test: Any, loss: Loss, settings: Settings) -> Job:
    """The job of a model, its clients and the settings."""
    pool, assignment = pool_clients(clients)
    task = Task(model, pool, assignment, None if test is None else as_examples(test), loss=loss)
    cohort = settings.cohort.size if settings.cohort else len(assignment)
    return Job(task, settings.method, settings.rounds, cohort, settings.local, settings.seed, settings.eval.every)


def _finished(
    simulation: Runner, state: RunState, history: list[RoundRecord], folder: RunFolder | None, retries: list[Retry]
) -> Run:
    """The result of a run, with all tensors on the CPU."""
    public = state.server.public
    basis = simulation.contract.basis(public.version, simulation.federation.engine.device)
    space = simulation.contract.at(public.version).method.space
    verdict = judge((record._asdict() for record in history), chance_of(simulation))
    weights, buffers = map(_on_cpu, simulation.federation.final(state))
    return Run(
        history,
        weights,
        buffers,
        state.backend,
        state.backend_reason,
        copy.deepcopy(simulation.job.task.model).cpu(),
        folder.path if folder else None,
        _on_cpu(public.coords),
        verdict.status,
        verdict.why,
        space,
        _on_cpu(basis) if isinstance(space, LoRA) else {},
        retries,
        simulation.federation.averages,
    )


def _write_results(folder: RunFolder, label: str, simulation: Runner, state: RunState, run: Run) -> None:
    """Write the environment, the final weights and the totals."""
    chance = chance_of(simulation)
    facts = {
        "device": simulation.federation.engine.device,
        "clients_trained_by": state.backend,
        "because": state.backend_reason,
        "chance": chance._asdict() if chance else None,
    }
    folder.write_environment(facts)
    totals = summarize(label, OWN_TASK, simulation, run.history, state.sync_counts, retries=run.retries)
    folder.finish(totals, {**run.weights, **run.buffers})


def _on_cpu(tree: Tree) -> Tree:
    return {name: block.detach().cpu() for name, block in tree.items()}


def _described(name: str, simulation: Runner) -> Table:
    """The configuration of a simulation, for config.toml of its run directory."""
    job, engine = simulation.job, simulation.federation.engine
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
        },
        "cohort": {"size": job.cohort},
        "local": plain(job.local),
        "engine": plain(engine),
        "eval": {"every": job.eval_every},
        "method": method_table(job.method, strict=False),
    }
