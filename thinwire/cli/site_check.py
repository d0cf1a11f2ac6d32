"""`thinwire site check`: try the data of a site with an app, before the site joins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import AsJson
from thinwire.core.text import unfit_for_a_name, visible
from thinwire.errors import ConfigError


def site_check(
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
