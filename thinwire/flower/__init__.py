"""Deployment over Flower: the same protocol between real processes.

client.py            one client: a download in, an upload out; what it stores
collect.py           the cohort and the uploads of a round: requests, waits
secure_round.py      a round of secure aggregation: the phases on the server
server.py            the server: rounds over any transport; checks, decides; evaluation at the sites
transport.py         the contract of a transport, deadlines, how long the server waits
records.py           records as bytes: what is stored and sent
grid_transport.py    Flower as a transport
sites.py             the roster, what a node says of itself, and which nodes are used
apps.py              the ServerApp and the ClientApp of an experiment
app_folder.py        an experiment as the folder of an app; apps in which each site has data of its own
site_check.py        try an app at a site before it joins
node.py              SuperNodes with low latency; all private names of Flower
processes.py         processes, certificates and keys of a deployment on one machine
local.py             a deployment on one machine
supervisor.py        keeps a run going after crashes
"""

from __future__ import annotations

from thinwire.errors import ConfigError

INSTALL = "pip install 'thinwire[flower]'"


def need_flower() -> None:
    """Raise ConfigError, with the line that installs Flower, if it is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs Flower, which is not installed here; write: {INSTALL}") from error
