"""`thinwire replay`: simulate a deployed run with its recorded cohorts, and compare the weights."""

from __future__ import annotations

import sys

from thinwire.cli.options import AsJson, DataDir, RunDirectory
from thinwire.core.text import visible


def replay(run: RunDirectory, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Simulate a deployed run with the clients that it accepted, and compare the final weights bit for bit.

    Example: thinwire replay runs/deployed/fedavg-digits-s0-1a2b3c

    It needs the data of all clients, and a machine of the same kind. Exit code 1 if a weight differs.
    """
    from thinwire.cli.tables import print_json
    from thinwire.experiments.replay import replay as replay_run

    found = replay_run(run, data_dir)
    done = f"{found.rounds} rounds, {found.uploads} accepted uploads"
    if as_json:
        print_json({**found._asdict(), "identical": found.identical})
    elif found.identical:
        print(f"{done}: the final weights are identical, bit for bit")
    else:
        since = f"; the test loss differs from round {found.first} on" if found.first else ""
        blocks = visible(", ".join(found.differ[:3]), 200)
        print(f"{done}: {len(found.differ)} blocks differ, by at most {found.largest:.3g} ({blocks}){since}")
    if not found.identical:
        sys.exit(1)
