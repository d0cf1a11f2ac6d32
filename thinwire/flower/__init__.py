"""Deployment over Flower: the same protocol between real processes; only the transport is different.

client.py            one client: a download in, an upload out
client_store.py      what a client stores between messages
server.py            the server: requests, checks, waits, decides; over any transport
transport.py         the contract of a transport, and one in memory
site_evaluation.py   evaluation at the sites, for a server without test data
grid_transport.py    Flower as a transport; the only file that needs it
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
