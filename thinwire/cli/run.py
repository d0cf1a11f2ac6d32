"""`thinwire run` and `thinwire resume`: train, and continue a run that was interrupted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from thinwire.cli.execution import execute_and_show
from thinwire.cli.options import (
    Accounting,
    Again,
    AsJson,
    Clients,
    CohortSize,
    DataDir,
    Device,
    Imports,
    KeepBest,
    Log,
    Method,
    Metrics,
    Objective,
    OnDivergence,
    Overrides,
    Patience,
    Quiet,
    Recipe,
    Rounds,
    RunDirectory,
    RunOut,
    Seed,
    Task,
    resolve_experiment,
)
from thinwire.errors import ConfigError


def run(
    what: Method,
    on: Task = None,
    recipe: Recipe = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    accounting: Accounting = None,
    on_divergence: OnDivergence = None,
    patience: Patience = None,
    objective: Objective = None,
    metric: Metrics = None,
    keep_best: KeepBest = False,
    set_: Overrides = None,
    out: RunOut = None,
    data_dir: DataDir = None,
    log: Log = None,
    again: Again = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Train, and write a run directory.

    Example: thinwire run fedavg --on digits --rounds 20 --set method.client_opt.lr=0.05

    Rescue a learning rate that is too large: thinwire run fedavg --set method.client_opt.lr=5 --on-divergence retry

    Methods that set different parts of a round can be combined: thinwire run fedpara+scaffold+int8

    End early, and keep the best model: thinwire run fedavg --rounds 200 --patience 10 --keep-best
    """
    from thinwire.experiments.execute import default_folder

    experiment = resolve_experiment(
        what,
        on,
        set_,
        rounds=rounds,
        clients=clients,
        cohort=cohort,
        seed=seed,
        device=device,
        accounting=accounting,
        on_divergence=on_divergence,
        recipe=recipe,
        patience=patience,
        objective=objective,
        metrics=metric,
        keep_best=keep_best,
    )
    path = out or default_folder(experiment)
    execute_and_show(experiment, path, data_dir=data_dir, log=log, as_json=as_json, quiet=quiet, again=again)


def resume(
    run: RunDirectory,
    on_divergence: OnDivergence = None,
    data_dir: DataDir = None,
    log: Log = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue an interrupted run from its last checkpoint; the result is the same as without interruption.

    Example: thinwire resume runs/fedavg-digits-s0-1a2b3c

    A run that diverged or collapsed is run again, and rescued, by: thinwire resume RUN --on-divergence retry
    """
    from thinwire.cli.terminal import print_start
    from thinwire.experiments.run_directory import RunFolder

    experiment = RunFolder.open(run).experiment
    if on_divergence is not None:
        saving = replace(experiment.checkpoint, on_divergence=on_divergence)  # type: ignore[arg-type]
        experiment = replace(experiment, checkpoint=saving)
    options: dict[str, Any] = {"resume": True}
    if (run / "deployment.json").is_file():
        from thinwire.cli.deploy import local_runner
        from thinwire.flower.apps import read_deployment

        settings = read_deployment(run) or {}
        settings.pop("run", None)
        if not (nodes := settings.pop("nodes", 0)):
            raise ConfigError(f"{run} was started with `flwr run`; start its app again with the same run-dir")
        options["runner"] = local_runner(nodes, settings)
    elif not quiet:
        options["on_continue"] = lambda done: print_start(run, done, experiment.rounds)
    execute_and_show(experiment, run, data_dir=data_dir, log=log, as_json=as_json, quiet=quiet, **options)
