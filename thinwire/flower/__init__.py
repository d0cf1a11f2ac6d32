"""Deployment over Flower: the same protocol between real processes; only the transport is different.

client.py            one client: a download in, an upload out
client_store.py      what a client stores between messages
server.py            the server: rounds over any transport; checks, decides
collect.py           the uploads of a round: requests, waits, closes
cohorts.py           the cohort of a round, from the clients that are there; the record of all cohorts
policy.py            how long the server waits, how many clients it asks and needs
deadline.py          the end of a wait
transport.py         the contract of a transport, and one in memory
site_evaluation.py   evaluation at the sites, for a server without test data
secure/              secure aggregation: the phases on clients and on the server
grid_transport.py    Flower as a transport; the only file that needs it
hello.py             what a node says of itself, and how the server checks it
admission.py         which nodes are used, and for which clients
site_key.py          keys and signatures of sites
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
