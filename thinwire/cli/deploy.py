"""`thinwire deploy`, `app` and `site`: run over Flower between real processes."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.options import AsJson, Log, Method, Quiet, Task, documented, verb
from thinwire.cli.run import exit_if_failed, show_summary, shown
from thinwire.cli.terminal import print_json, show_facts, show_list
from thinwire.core.text import visible
from thinwire.errors import ConfigError


@verb("overwrite")
def deploy(
    what: Method,
    on: Task = None,
    nodes: int = 4,
    seconds: float = 600.0,
    quorum: float = 0.5,
    grace: float = -1.0,
    over_select: float = 0.0,
    log: Log = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run between real processes on this machine over Flower with TLS.

    Example: thinwire deploy fedavg --on digits --nodes 4 --rounds 5

    Starts a SuperLink and SuperNodes, and stops them when the run ends.

    Options:
        nodes: Number of SuperNodes; also of clients, without --clients.
        seconds: Seconds the server waits for the uploads of a round.
        quorum: Fraction of the cohort that must upload for a round to count.
        grace: Seconds after the quorum at which a round is closed; below 0, it is not.
        over_select: Fraction of the cohort that is asked in addition.
    """
    from thinwire.flower.local import deploy as run
    from thinwire.flower.policy import RoundPolicy
    from thinwire.runs.config import resolve
    from thinwire.runs.execute import default_folder
    from thinwire.runs.run import settings_of

    preset = resolve(what, on, recipe=options["recipe"])
    if preset.task.clients:  # a task of the user has its clients
        clients = options["clients"] = nodes if options["clients"] is None else options["clients"]
        options["cohort"] = min(clients, preset.cohort.size) if options["cohort"] is None else options["cohort"]
    settings = settings_of(what, on, options)
    path = options["out"] or default_folder(settings, Path("runs/deployed"))
    policy = {"seconds": seconds, "quorum": quorum, "grace": grace, "over-select": over_select}
    RoundPolicy.of(policy)  # a wrong value is an error before anything is started
    with shown(settings, path, log, quiet) as on_round:
        how = {"nodes": nodes, "settings": policy, "data_dir": options["data_dir"]}
        summary = run(settings, path, on_round=on_round, **how)
    show_summary(summary, path, as_json)


@verb("out", "overwrite")
def app(
    what: Method, folder: Path, on: Task = None, template: str | None = None, kind: str = "table", **options: Any
) -> None:
    """Write a Flower app that `flwr run` runs unchanged.

    Example: thinwire app mapo my-app --on digits --clients 4 --cohort 4

    Example: thinwire app fedavg my-app --template own-data --kind table --clients 3

    Options:
        folder: A new folder.
        template: own-data: an app in which every site has data of its own.
        kind: Data of the template own-data: images, table or text.
    """
    from thinwire.flower.app_folder import DEFAULTS, TEMPLATE, write_app, write_own_data_app
    from thinwire.runs.run import settings_of

    if template is None:
        files = write_app(settings_of(what, on, options), folder)
    elif template != TEMPLATE or on is not None:
        raise ConfigError(f"--template must be {TEMPLATE}, without --on, not {template!r} with {on!r}")
    else:
        defaults = [f"{key}={value}" for key, value in DEFAULTS.items()]
        options["set"] = [*defaults, *(options["set"] or ())]
        files = write_own_data_app(kind, folder, lambda task: settings_of(what, task, options))
    for file in files:
        print(visible(str(file)))


site = typer.Typer(
    no_args_is_help=True,
    help="The sites that may take part in a deployment, by name and key.\n\n"
    "Example: thinwire site add north north.pub --roster /etc/thinwire/roster.toml",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the site: letters, digits, - and _.")]
RosterPath = Annotated[Path, typer.Option("--roster", help="File of the roster.")]
RunDir = Annotated[Path, typer.Option("--run-dir", help="Run directory, on this machine.")]
SiteData = Annotated[Path, typer.Option("--data-dir", help="The folder of the site's data.")]
DEFAULT = Path("roster.toml")


@site.command("key")
@documented
def make_key(file: Path) -> None:
    """Write a private key, which stays at the site, and its public key FILE.pub, which the server gets.

    A key that exists is not overwritten.

    Example: thinwire site key /etc/thinwire/north

    Options:
        file: A new file; FILE.pub is written too.
    """
    from thinwire.secure.keys import make_key

    make_key(file)
    print(visible(str(file)), visible(f"{file}.pub"), sep="\n")


@site.command("add")
@documented
def add(name: Name, key: Path, roster: RosterPath = DEFAULT) -> None:
    """Add a site to the roster; a run that is going on takes it in.

    Example: thinwire site add north north.pub

    Options:
        key: Public key of the site.
    """
    from thinwire.flower.sites import Roster, changing
    from thinwire.secure.keys import fingerprint, read_public_key

    text = read_public_key(key)
    with changing(roster):
        known = Roster.read(roster) if roster.exists() else Roster()
        after = known.add(name, text)
        after.write(roster)
    added = after.sites[-1]
    print(f"{name}: clients {list(added.clients)}, key {fingerprint(added.key)}")


@site.command("list")
def list_sites(roster: RosterPath = DEFAULT, as_json: AsJson = False) -> None:
    """Print the sites of the roster.

    Example: thinwire site list --roster /etc/thinwire/roster.toml
    """
    from thinwire.flower.sites import Roster
    from thinwire.secure.keys import fingerprint

    rows = [asdict(one) for one in Roster.read(roster).sites]
    print_json(rows) if as_json else show_list([{**row, "key": fingerprint(row["key"])} for row in rows])


@site.command("revoke")
def revoke(name: Name, roster: RosterPath = DEFAULT) -> None:
    """Revoke a site; a run that is going on stops using it.

    Example: thinwire site revoke north
    """
    from thinwire.flower.sites import Roster, changing

    with changing(roster):
        Roster.read(roster).revoke(name).write(roster)
    print(f"{name}: revoked")


@site.command("check")
@documented
def check(app: Path, data_dir: SiteData, as_json: AsJson = False) -> None:
    """Try data, model, loss and one step of training at a site, without the server.

    Example: thinwire site check my-app --data-dir /data/records

    Options:
        app: The folder that `thinwire app` wrote.
    """
    from thinwire.flower.app_folder import EXPERIMENT_FILE, PACKAGE
    from thinwire.flower.apps import read_experiment
    from thinwire.flower.site_check import check_site

    file = app / PACKAGE / EXPERIMENT_FILE
    if not file.is_file():
        raise ConfigError(f"{app} is not the folder of an app: it has no {PACKAGE}/{EXPERIMENT_FILE}")
    facts = check_site(read_experiment(file), data_dir)
    print_json(facts) if as_json else show_facts(facts, f"{data_dir}: ready to join")


# flower-supernode parses the options of a node
@site.command(
    "start", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
@documented
def start(context: typer.Context, app: Path | None = None) -> None:
    """Run a Flower SuperNode of a site, with low latency; takes the options of flower-supernode.

    Example: thinwire site start --superlink server:8000 --root-certificates ca.pem --auth-supernode-private-key node-0
    Example: thinwire site start --app my-app --superlink server:8000 --node-config 'partition-id=0 num-partitions=4'

    Options:
        app: Run only this app; its data and model are loaded once, before any message.
    """
    if context.args in ([], ["--help"]) and app is None:
        context.get_help()  # prints it; `flower-supernode --help` lists the options
        return
    from thinwire.flower.node import node as run_node

    run_node(context.args, app)


@site.command("supervise")
@documented
def supervise(
    app: Path,
    connection: str,
    run_dir: RunDir,
    config: Annotated[
        list[str] | None,
        typer.Option("-c", "--run-config", metavar="KEY=VALUE", help="As for `flwr run`; may be repeated."),
    ] = None,
    restarts: int = 30,
    as_json: AsJson = False,
) -> None:
    """Run an app with `flwr run`, and again after a crash or restart of the server or the SuperLink, until it is done.

    Example: thinwire site supervise my-app mine --run-dir /var/lib/thinwire/runs/first -c 'quorum=0.8 seconds=120.0'

    Runs on the machine of the SuperLink, as its user. SIGTERM or Ctrl-C stops the server; the exit code is then
    130, and the same command continues after the last round.

    Options:
        app: Folder of the app, as for `flwr run`.
        connection: Connection of Flower's config.toml.
        restarts: Restarts in a row without a finished round, before it gives up.
    """
    from thinwire.flower.supervisor import supervise

    def log(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    summary = supervise(app, connection, run_dir, config or (), restarts, log)
    print_json(summary) if as_json else show_facts(summary, str(run_dir))
    exit_if_failed({str(run_dir): summary})
