"""The same rounds between real machines, over Flower: only what carries the bytes is different.

client.py      one client's side: a message in, a message out, and what it keeps in between
client_store.py        what a client keeps, as bytes
server.py      the server's side: asks, checks, waits, decides; over any transport
transport.py   what a transport is, and one in memory
grid.py        Flower as a transport; the only file that needs it
"""

from __future__ import annotations

from thinwire.errors import ConfigError

INSTALL = "pip install 'thinwire[flower]'"


def need_flower() -> None:
    """Say in one line how to install Flower, if it is not there."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs Flower, which is not installed here; write: {INSTALL}") from error
