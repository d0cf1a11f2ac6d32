"""Deployment over Flower: the same protocol between real processes.

client.py            one client: a download in, an upload out; what it stores
collect.py           the cohort and the uploads of a round: requests, waits
secure_round.py      a round of secure aggregation: the phases on the server
server.py            the server: rounds over any transport; checks, decides; evaluation at the sites
policy.py            how long the server waits, and for how many
records.py           records as bytes: what is stored and sent
grid_transport.py    Flower as a transport
sites.py             the roster, what a node says of itself, and which nodes are used
apps.py              the ServerApp and the ClientApp of an experiment
app_folder.py        an experiment as the folder of an app; apps in which each site has data of its own
site_check.py        try an app at a site before it joins
node.py              SuperNodes with low latency; all private names of Flower
local.py             a deployment on one machine
supervisor.py        keeps a run going after crashes
compressed.py        compressed messages in a Flower app of one's own
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigError

INSTALL = "pip install 'thinwire[flower]'"
FLOWER_ENV = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_COLOR": "1",
}


def need_flower() -> None:
    """Raise ConfigError, with the line that installs Flower, if it is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs Flower, which is not installed here; write: {INSTALL}") from error


def with_path(command: Sequence[str]) -> list[str]:
    """A command with the whole path of its program, which is beside this Python or in PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (program := shutil.which(command[0], path=path)) is None:
        raise ConfigError(f"the program {command[0]} was not found in the folder of {sys.executable} or in PATH")
    return [program, *command[1:]]
