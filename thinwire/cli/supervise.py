"""`thinwire supervise`: keep a deployed run going until it is finished."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import AsJson


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

    Example: thinwire supervise my-app mine --run-dir /var/lib/thinwire/runs/first -c 'quorum=0.8 seconds=120.0'

    Runs on the machine of the SuperLink, as its user. After SIGTERM or Ctrl-C the server closes its round and saves it;
    the exit code is then 130, and the same command continues.
    """
    from thinwire.cli.execution import exit_if_failed
    from thinwire.cli.tables import print_json, show_facts
    from thinwire.flower.supervisor import supervise

    def log(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    summary = supervise(app, connection, run_dir, config or (), restarts, log)
    print_json(summary) if as_json else show_facts(summary, str(run_dir))
    exit_if_failed({str(run_dir): summary})
