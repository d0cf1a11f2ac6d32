"""`thinwire site`: the sites that may take part in a deployment, by name and key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import AsJson
from thinwire.core.text import unfit_for_a_name, visible
from thinwire.errors import ConfigError

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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from thinwire.cli.tables import print_json
    from thinwire.cli.terminal import out
    from thinwire.flower.sites import Roster
    from thinwire.secure.keys import fingerprint

    sites = Roster.read(roster).sites
    if as_json:
        rows = [
            {"name": one.name, "clients": list(one.clients), "revoked": one.revoked, "key": one.key} for one in sites
        ]
        print_json(rows)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("site", "clients", "state", "key"):
        table.add_column(head, overflow="fold")
    for one in sites:
        numbers = ", ".join(str(client) for client in one.clients)
        table.add_row(one.name, numbers, "revoked" if one.revoked else "active", fingerprint(one.key))
    out.print(table)


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
    app: Annotated[Path, typer.Argument(metavar="DIR", help="The app: the folder that `thinwire flower-app` wrote.")],
    data_dir: Annotated[Path, typer.Option("--data-dir", help="The folder of the site's data.")],
    site: Annotated[str, typer.Option("--site", metavar="NAME", help="The name of the site, for the title.")] = "",
    as_json: AsJson = False,
) -> None:
    """Try data, shapes, one local step, time and memory at a site, without the server.

    Example: thinwire site check my-app --data-dir /data/records
    """
    from thinwire.cli.tables import print_json, show_facts
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
