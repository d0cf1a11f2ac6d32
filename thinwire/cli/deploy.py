"""`thinwire deploy`, `app` and `site`: run over Flower between real processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import AsJson, Log, Method, Quiet, Task, verb
from thinwire.cli.run import exit_if_failed, show_summary, shown
from thinwire.cli.terminal import print_json, show_cells, show_facts
from thinwire.core.text import unfit_for_a_name, visible
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    pass


@verb("overwrite")
def deploy(
    what: Method,
    on: Task = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of SuperNodes; also of clients, without --clients.")] = 4,
    seconds: Annotated[float, typer.Option(help="Seconds the server waits for the uploads of a round.")] = 600.0,
    quorum: Annotated[float, typer.Option(help="Fraction of the cohort that must upload for a round to count.")] = 0.5,
    grace: Annotated[
        float | None, typer.Option(help="Seconds after the quorum at which a round is closed; by default it is not.")
    ] = None,
    over_select: Annotated[float, typer.Option(help="Fraction of the cohort that is asked in addition.")] = 0.0,
    log: Log = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run between real processes on this machine over Flower with TLS.

    Example: thinwire deploy fedavg --on digits --nodes 4 --rounds 5

    Starts a SuperLink and SuperNodes, and stops them when the run ends.
    """
    from thinwire.flower.local import deploy as run
    from thinwire.flower.transport import RoundPolicy
    from thinwire.runs.config import resolve
    from thinwire.runs.execute import default_folder
    from thinwire.runs.run import settings_of

    preset = resolve(what, on, recipe=options["recipe"])
    if preset.task.clients:  # a task of the user has its clients
        clients = options["clients"] = nodes if options["clients"] is None else options["clients"]
        options["cohort"] = min(clients, preset.cohort.size) if options["cohort"] is None else options["cohort"]
    settings = settings_of(what, on, options)
    path = options["out"] or default_folder(settings, Path("runs/deployed"))
    policy = {"seconds": seconds, "quorum": quorum, "over-select": over_select}
    policy |= {} if grace is None else {"grace": grace}
    RoundPolicy.of(policy)  # a wrong value is an error before anything is started
    with shown(settings, path, log, quiet) as on_round:
        how = {"nodes": nodes, "settings": policy, "data_dir": options["data_dir"]}
        summary = run(settings, path, on_round=on_round, **how)
    show_summary(summary, path, as_json)


@verb("out", "overwrite")
def app(
    what: Method,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    on: Task = None,
    template: Annotated[
        str | None, typer.Option(metavar="own-data", help="An app in which every site has data of its own.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Data of the template own-data: images, table or text.")] = "table",
    **options: Any,
) -> None:
    """Write a Flower app that `flwr run` runs unchanged.

    Example: thinwire app mapo my-app --on digits --clients 4 --cohort 4

    Example: thinwire app fedavg my-app --template own-data --kind table --clients 3
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
DEFAULT = Path("roster.toml")


@site.command("key")
def make_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; FILE.pub is written too.")],
) -> None:
    """Write a private key, which stays at the site, and its public key FILE.pub, which the server gets.

    Example: thinwire site key /etc/thinwire/north
    """
    from thinwire.flower import need_flower
    from thinwire.flower.processes import make_key

    need_flower()
    public = file.with_name(f"{file.name}.pub")
    for path in (file, public):
        if path.exists():
            raise ConfigError(f"{path} exists, and a key is not overwritten; name another file")
    make_key(file)
    print(visible(str(file)))
    print(visible(str(public)))


@site.command("add")
def add(
    name: Name,
    key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="Public key of the site.")],
    clients: Annotated[int | None, typer.Option(help="Number of its clients; by default 1.")] = None,
    roster: RosterPath = DEFAULT,
) -> None:
    """Add a site to the roster; a run that is going on takes it in.

    Example: thinwire site add north north.pub
    """
    from thinwire.flower.sites import Roster, changing
    from thinwire.secure.keys import fingerprint, read_public_key

    text = read_public_key(key)
    with changing(roster):
        known = Roster.read(roster) if roster.exists() else Roster()
        after = known.add(name, text, clients)
        after.write(roster)
    added = after.sites[-1]
    print(f"{name}: clients {list(added.clients)}, key {fingerprint(added.key)}")


@site.command("list")
def list_sites(roster: RosterPath = DEFAULT, as_json: AsJson = False) -> None:
    """Print the sites of the roster.

    Example: thinwire site list --roster /etc/thinwire/roster.toml
    """
    from thinwire.flower.sites import Roster
    from thinwire.reports.page import Cells
    from thinwire.secure.keys import fingerprint

    sites = Roster.read(roster).sites
    if as_json:
        rows = [
            {"name": one.name, "clients": list(one.clients), "revoked": one.revoked, "key": one.key} for one in sites
        ]
        print_json(rows)
        return
    cells = [
        (one.name, ", ".join(map(str, one.clients)), "revoked" if one.revoked else "active", fingerprint(one.key))
        for one in sites
    ]
    show_cells(Cells("", ("site", "clients", "state", "key"), cells, left=4))


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
def check(
    app: Annotated[Path, typer.Argument(metavar="DIR", help="The app: the folder that `thinwire app` wrote.")],
    data_dir: Annotated[Path, typer.Option("--data-dir", help="The folder of the site's data.")],
    site: Annotated[str, typer.Option("--site", metavar="NAME", help="The name of the site, for the title.")] = "",
    as_json: AsJson = False,
) -> None:
    """Try data, shapes, one local step, time and memory at a site, without the server.

    Example: thinwire site check my-app --data-dir /data/records
    """
    from thinwire.flower.app_folder import EXPERIMENT_FILE, PACKAGE
    from thinwire.flower.apps import read_experiment
    from thinwire.flower.site_check import check_site

    if site and (why := unfit_for_a_name(site, 64)):
        raise ConfigError(f"the name {visible(site, 80)!r} of a site cannot be used: {why}; write for example north")
    file = app / PACKAGE / EXPERIMENT_FILE
    if not file.is_file():
        raise ConfigError(f"{app} is not the folder of an app: it has no {PACKAGE}/{EXPERIMENT_FILE}")
    facts = check_site(read_experiment(file), data_dir)
    print_json(facts) if as_json else show_facts(facts, f"{site or data_dir.name}: ready to join")


# flower-supernode parses the options of a node
@site.command(
    "start", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def start(
    context: typer.Context,
    app: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run only this app; its data and model are loaded once, before any message."),
    ] = None,
) -> None:
    """Run a Flower SuperNode of a site, with low latency; takes the options of flower-supernode.

    Example: thinwire site start --superlink server:8000 --root-certificates ca.pem --auth-supernode-private-key node-0
    Example: thinwire site start --app my-app --superlink server:8000 --node-config 'partition-id=0 num-partitions=4'
    """
    if context.args in ([], ["--help"]) and app is None:
        context.get_help()  # prints it; `flower-supernode --help` lists the options
        return
    from thinwire.flower.node import node as run_node

    run_node(context.args, app)


@site.command("supervise")
def supervise(
    app: Annotated[Path, typer.Argument(metavar="APP_DIR", help="Folder of the app, as for `flwr run`.")],
    connection: Annotated[str, typer.Argument(metavar="CONNECTION", help="Connection of Flower's config.toml.")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Run directory, on this machine.")],
    config: Annotated[
        list[str] | None,
        typer.Option("-c", "--run-config", metavar="KEY=VALUE", help="As for `flwr run`; may be repeated."),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Restarts in a row without a finished round, before it gives up.")
    ] = 30,
    as_json: AsJson = False,
) -> None:
    """Run an app with `flwr run`, and again after a crash or restart of the server or the SuperLink, until it is done.

    Example: thinwire site supervise my-app mine --run-dir /var/lib/thinwire/runs/first -c 'quorum=0.8 seconds=120.0'

    Runs on the machine of the SuperLink, as its user. After SIGTERM or Ctrl-C the server closes its round and saves it;
    the exit code is then 130, and the same command continues.
    """
    from thinwire.flower.supervisor import supervise

    def log(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    summary = supervise(app, connection, run_dir, config or (), restarts, log)
    print_json(summary) if as_json else show_facts(summary, str(run_dir))
    exit_if_failed({str(run_dir): summary})
