"""`thinwire rollback`: go back to an earlier checkpoint of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli.options import RunDirectory
from thinwire.core.text import visible


def rollback(
    run: RunDirectory,
    number: Annotated[int, typer.Argument(metavar="ROUND", help="A round with a checkpoint; 0 for the start.", min=0)],
    leave_out: Annotated[
        list[int] | None,
        typer.Option("--leave-out", metavar="CLIENT", help="Leave a client of a deployment out for some rounds."),
    ] = None,
) -> None:
    """Go back to the checkpoint of a round and give up the rounds after it.

    Example: thinwire rollback runs/fedavg-digits-s0-1a2b3c 20 --leave-out 3
    """
    from thinwire.core.text import human_bytes
    from thinwire.experiments.retry import roll_back

    found = roll_back(run, number, leave_out or [])
    where = f"round {found.round}" if found.round else "the start"
    without = f" without clients {', '.join(map(str, found.left_out))}" if found.left_out else ""
    print(
        visible(
            f"{run} is back at {where}{without}: {found.abandoned} rounds and {human_bytes(found.bytes)} given up. "
            f"`thinwire resume {run}` continues it."
        )
    )
