"""`thinwire deploy`, `thinwire node` and `thinwire flower-app`: run over Flower between real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.execution import execute_and_show
from thinwire.cli.options import (
    AsJson,
    Clients,
    CohortSize,
    DataDir,
    Imports,
    Log,
    Method,
    Overrides,
    Quiet,
    Recipe,
    Rounds,
    RunOut,
    Seed,
    Task,
    resolve_experiment,
)
from thinwire.core.text import visible
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.experiments.config import Experiment
    from thinwire.experiments.run_directory import Summary


def deploy(
    what: Method,
    on: Task = None,
    recipe: Recipe = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of SuperNodes; also of clients, without --clients.")] = 4,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    set_: Overrides = None,
    seconds: Annotated[float, typer.Option(help="Seconds the server waits for the uploads of a round.")] = 600.0,
    quorum: Annotated[float, typer.Option(help="Fraction of the cohort that must upload for a round to count.")] = 0.5,
    grace: Annotated[
        float | None, typer.Option(help="Seconds after the quorum at which a round is closed; by default it is not.")
    ] = None,
    over_select: Annotated[float, typer.Option(help="Fraction of the cohort that is asked in addition.")] = 0.0,
    out: RunOut = None,
    data_dir: DataDir = None,
    log: Log = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Run between real processes on this machine over Flower with TLS.

    Example: thinwire deploy fedavg --on digits --nodes 4 --rounds 5

    Starts a SuperLink and SuperNodes, and stops them when the run ends.
    """
    from thinwire.experiments.config import resolve
    from thinwire.experiments.execute import default_folder
    from thinwire.flower.transport import RoundPolicy

    preset = resolve(what, on, recipe=recipe)
    if preset.task.clients:  # a task of one's own has its clients
        clients = nodes if clients is None else clients
        cohort = min(clients, preset.cohort.size) if cohort is None else cohort
    experiment = resolve_experiment(
        what, on, set_, rounds=rounds, clients=clients, cohort=cohort, seed=seed, recipe=recipe
    )
    path = out or default_folder(experiment, Path("runs/deployed"))
    settings = {"seconds": seconds, "quorum": quorum, "over-select": over_select}
    settings |= {} if grace is None else {"grace": grace}
    RoundPolicy.of(settings)  # a wrong value is an error before anything is started
    runner = local_runner(nodes, settings)
    execute_and_show(experiment, path, data_dir=data_dir, log=log, as_json=as_json, quiet=quiet, runner=runner)


def local_runner(nodes: int, settings: dict[str, Any]) -> Callable[..., Summary]:
    """Return a function that runs an experiment between processes on this machine.

    Args:
        nodes: number of SuperNodes.
        settings: of the server, the fields of `RoundPolicy`.
    """
    from thinwire.flower.local import deploy as deploy_locally

    return partial(deploy_locally, nodes=nodes, settings=settings)


def node(
    context: typer.Context,
    app: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run only this app; its data and model are loaded once, before any message."),
    ] = None,
) -> None:
    """Run a Flower SuperNode with low latency; takes the options of flower-supernode.

    Example: thinwire node --superlink server:8000 --root-certificates ca.pem --auth-supernode-private-key node-0
    Example: thinwire node --app my-app --superlink server:8000 --node-config 'partition-id=0 num-partitions=4'
    """
    if context.args in ([], ["--help"]) and app is None:
        context.get_help()  # prints it; `flower-supernode --help` lists the options
        return
    from thinwire.flower.node import node as run_node

    run_node(context.args, app)


def flower_app(
    what: Method,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    on: Task = None,
    recipe: Recipe = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    set_: Overrides = None,
    template: Annotated[
        str | None, typer.Option(metavar="own-data", help="An app in which every site has data of its own.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Data of the template own-data: images, table or text.")] = "table",
) -> None:
    """Write a Flower app that `flwr run` runs unchanged.

    Example: thinwire flower-app mapo my-app --on digits --clients 4 --cohort 4

    Example: thinwire flower-app fedavg my-app --template own-data --kind table --clients 3
    """
    from thinwire.flower.app_folder import DEFAULTS, TEMPLATE, write_app, write_own_data_app

    def experiment_on(task: str | None, more: Sequence[str] = ()) -> Experiment:
        given = [*more, *(set_ or ())]
        return resolve_experiment(
            what, task, given, rounds=rounds, clients=clients, cohort=cohort, seed=seed, recipe=recipe
        )

    if template is None:
        files = write_app(experiment_on(on), folder)
    elif template != TEMPLATE or on is not None:
        raise ConfigError(f"--template must be {TEMPLATE}, without --on, not {template!r} with {on!r}")
    else:
        defaults = [f"{key}={value}" for key, value in DEFAULTS.items()]
        files = write_own_data_app(kind, folder, lambda task: experiment_on(task, defaults))
    for file in files:
        print(visible(str(file)))
