"""`thinwire site ...`: what a site needs to take part in a deployment."""

from __future__ import annotations

import typer

from thinwire.cli.site_check import site_check

site = typer.Typer(no_args_is_help=True)


@site.callback()
def sites() -> None:
    """Sites of a deployment: try their data.

    Example: thinwire site check my-app --data-dir /data/records
    """


site.command("check")(site_check)
