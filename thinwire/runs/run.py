"""`tw.run`: a method on a task, as `thinwire run METHOD --on TASK`; `tw.simulate`: on a model and data of your own.

>>> import torch, thinwire as tw
>>> run = tw.run("fedavg", "digits", rounds=2, set={"local.epochs": 1})
>>> len(run.history), run.ended_by
(2, 'rounds')
>>> clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
>>> run = tw.simulate(torch.nn.Linear(4, 2), clients, tw.Method(), rounds=2, test=clients[0])
>>> len(run.history), run.bytes_total == sum(r.bytes_up + r.bytes_down + r.bytes_catchup for r in run.history)
(2, True)
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from thinwire.core.text import visible
from thinwire.data.huggingface import from_datasets
from thinwire.data.losses import Loss, cross_entropy, loss_by_name
from thinwire.data.partition import Assignment, offsets_of
from thinwire.data.task import Task, as_examples, pool_clients
from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.job import RoundRecord
from thinwire.federation.settings import Cohort, Settings
from thinwire.protocol.method import Method
from thinwire.runs.build import OwnTask, task_name
from thinwire.runs.config import DEFAULT_TASK, resolve
from thinwire.runs.execute import RunPlan
from thinwire.runs.files import message_of
from thinwire.runs.loop import Loop
from thinwire.runs.options import Options, overrides_of
from thinwire.runs.presets import method_name
from thinwire.runs.progress import shown, style_of
from thinwire.runs.records import read_config, read_totals, rounds_in
from thinwire.runs.result import Run, result_of
from thinwire.runs.run_directory import RunFolder, rounds_of
from thinwire.runs.trackers import tracker


def run(method: Method | str = "fedavg", on: str | OwnTask = DEFAULT_TASK, **options: Unpack[Options]) -> Run:
    """Run a method on a task; every message is built, and its bytes are counted.

    Args:
        method: the name of a method (`thinwire list methods`), several joined by `+`, a file (`my.toml`), or a Method;
            what it states counts more than the recipe.
        on: the name of a task (`thinwire list tasks`), a reference (`my_task.py:task`), a file, or a `Task`, or a
            function of `seed` that returns one.
        **options: see `Options`; settings that are not given are those of the task's preset, the method, the file and
            the recipe. Without `out` nothing is written.
    """
    given, rounds = _rounds_of({"keep_best": True, **options})
    return _run(settings_of(method, on, given), options, rounds)


def simulate(
    model: nn.Module,
    clients: Sequence[Any],
    /,
    method: Method | str | None = None,
    *,
    test: Any = None,
    loss: Loss | str = cross_entropy,
    **options: Unpack[Options],
) -> Run:
    """Simulate a federation with your model and data: `run` on a `Task` of them.

    Args:
        model: any nn.Module; it is copied and stays unchanged.
        clients: one entry a client: a pair `(inputs, targets)` of tensors, or a torch Dataset of such pairs; or a
            `FederatedDataset` or a partitioner of flwr-datasets, with its test split, or a fifth of each client.
        method: as for `run`, or None for FedAvg; the task of a file is not used.
        test: a pair or a Dataset to evaluate on.
        loss: `loss(outputs, targets)`, one value for each example or their mean; or `cross-entropy`, `mse`, `bce`.
        **options: see `Options`; without `cohort`, all clients take part in each round. `metrics` may also be functions
            of outputs and targets by name, `{"f1": fn}`.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not {type(model).__name__}")
    if any(one.is_meta for one in model.parameters()):
        raise ConfigError("the model cannot be copied: its weights are on the device meta, which has no values")
    method = Method() if method is None else method
    name = {"name": method_name(method, model)} if isinstance(method, Method) else {}
    given, rounds = _rounds_of({"keep_best": True, **name, **options})
    functions = given.pop("metrics") if isinstance(given.get("metrics"), Mapping) else {}
    if hasattr(clients, "load_partition"):
        source: Any = from_datasets(clients, test)
        owned = Assignment(source.users.argsort(stable=True).numpy(), offsets_of(source.users.bincount().numpy()))
        pool, tests = source.train, source.test
    else:
        pool, owned = pool_clients(clients)
        tests = None if test is None else as_examples(test)
    criterion = loss_by_name(loss) if isinstance(loss, str) else loss
    task = Task(model, pool, owned, tests, None, criterion, metrics=functions)
    settings = settings_of(method, task_name(task, "own data"), given)
    if not settings.cohort.size:
        settings = replace(settings, cohort=Cohort(len(task.clients)))
    return _run(settings, given, rounds)


def reopen(path: Path, data_dir: Path | None = None) -> Run:
    """The result of the newest checkpoint of a run directory, with the module, as it was trained."""
    plan = RunPlan.of(RunFolder.open(path).experiment, path, data_dir)
    if plan.folder is None or not rounds_in(plan.folder.checkpoints):
        raise CheckpointError(f"{path} holds no checkpoint yet; `thinwire resume {path}` continues it")
    loop = Loop(plan.settings, plan.prepare(), plan.folder, resume=True)
    loop.summary = read_totals(path) or loop.totals()
    return result_of(loop, plan.table)


def settings_of(
    method: Method | str, on: str | OwnTask | None, options: Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> Settings:
    """The settings that options describe, for `run`, searches and the verbs of the command line.

    Args:
        method: as for `run`.
        on: as for `run`; None for the task of the file, or the default one.
        options: the options of a run.
        changes: further settings by dotted path.

    >>> settings_of("mapo", "digits", {"rounds": 5, "set": {"method.space.k": 64}}).method.space.k
    64
    """
    task = None if on is None else task_name(on)
    settings = resolve(method, task, overrides_of(options, changes), options.get("recipe"))
    if not (metrics := options.get("metrics")):
        return settings
    if isinstance(metrics, Mapping):
        raise ConfigError("metrics must be names, such as ['f1']; functions are for tw.simulate, or Task(metrics=...)")
    names = dict.fromkeys((*settings.eval.metrics, *metrics))
    return replace(settings, eval=replace(settings.eval, metrics=tuple(names)))


def _rounds_of(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Options with the number of rounds that the run in the folder `out` began with, and all numbers that it had."""
    given, wanted = dict(options), options.get("rounds")
    config = Path(options.get("out") or "") / "config.toml"
    if not options.get("out") or not isinstance(wanted, int) or options.get("overwrite") or not os.path.isfile(config):
        return given, []
    rounds = rounds_of(read_config(config.parent))
    if wanted > rounds[-1] and options.get("resume"):
        rounds.append(wanted)
    if wanted != rounds[-1] or len(rounds) == 1:
        return given, []
    return {**given, "rounds": rounds[0]}, rounds


def _run(settings: Settings, options: Mapping[str, Any], rounds: Sequence[int]) -> Run:
    """Train what is left of a run, or read it, and make its result."""
    given = {name: value for name, value in options.items() if value is not None}
    path, data_dir = (Path(given[name]) if name in given else None for name in ("out", "data_dir"))
    resume, overwrite, on_round = bool(given.get("resume")), bool(given.get("overwrite")), given.get("on_round")
    if path is None and (resume or overwrite):
        raise ConfigError(f"{'resume' if resume else 'overwrite'}=True needs the folder of the run: out='runs/mine'")
    if resume and overwrite:
        raise ConfigError("resume=True keeps the run in the folder and overwrite=True deletes it; write one of them")
    for name in ("stop", "on_round"):
        if not callable(given.get(name, print)):
            raise ConfigError(f"{name} must be a function of the record, not {given[name]!r}")
    style = style_of(given.get("progress"))
    with (
        _one_line(path, style != "nothing"),
        shown(settings.name, rounds[-1] if rounds else settings.rounds, style) as show,
        tracker(given.get("log"), path) as log,
    ):

        def seen(record: RoundRecord) -> None:
            if record.alarm:
                warnings.warn(f"round {record.round}: {record.alarm}", RuntimeWarning, stacklevel=2)
            show(record)
            log(record)
            if on_round:
                on_round(record)

        plan = RunPlan.of(settings, path, data_dir, rounds=rounds)
        done = None if overwrite else plan.finished(resume)
        watch = {name: given[name] for name in ("on_message", "stop") if name in given}
        loop = plan.reopen(done) if done else plan.train(resume, overwrite, on_round=seen, **watch)
        return result_of(loop, plan.table)


@contextmanager
def _one_line(path: Path | None, visibly: bool) -> Iterator[None]:
    """Errors of the run directory in one line; after Ctrl-C, how to continue."""
    try:
        yield
    except OSError as error:
        file = Path(str(error.filename or "/"))
        if path is None or not (file.is_relative_to(path) or path.is_relative_to(file)):
            raise
        left = f"; resume=True continues it from {path}" if os.path.isfile(path / "config.toml") else ""
        raise CheckpointError(f"{message_of(error)}{left}") from error
    except KeyboardInterrupt:
        if visibly:
            text = "nothing was saved, since out= names no folder"
            if path is not None:
                text = f"the same call with resume=True continues the run in {path}"
            print(visible(f"stopped; {text}"), file=sys.stderr)
        raise
