"""Estimated time of a run over slow links, computed from recorded bytes.

The clients of a round work in parallel on equal links, and a round takes as long as a client with average traffic:

    seconds of a round = compute + 8 * bytes_up / (clients * up) + 8 * (bytes_down + bytes_catchup) / (clients * down)

with `up` and `down` in bits a second. `compute` is the training time of one client: by default the measured seconds of
the round, divided by its clients (one machine trained them all). This is the model of FedPara's Tables 7 and 8,
`t = t_comp + 2 * size / speed`, with the lengths of actual messages instead of a size; the two directions may differ in
speed. Latency, retries and differences between clients are not included.

>>> round(round_seconds(link("2 Mbps"), 1.64, bytes_up=58.775e6, bytes_down=58.775e6), 2)  # FedPara, Table 7: VGG16
471.84
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from thinwire.errors import ConfigError

SLOWER = 16  # download speed / upload speed of the asymmetric links, as in FLASC


class Link(NamedTuple):
    """The link of one client, in bits a second."""

    name: str
    up: float
    down: float


LINKS = tuple(
    Link(f"{mbps} Mbps{' (uploads 16x slower)' if slower > 1 else ''}", mbps * 1e6 / slower, mbps * 1e6)
    for slower in (1, SLOWER)
    for mbps in (2, 10, 50)
)


def link(name: str) -> Link:
    """The link of `LINKS` with this name."""
    for known in LINKS:
        if known.name == name:
            return known
    raise ConfigError(f"unknown link {name!r}; known are {', '.join(known.name for known in LINKS)}")


def round_seconds(link: Link, compute: float, *, bytes_up: float, bytes_down: float) -> float:
    """Seconds of a round for one client: training, upload and download.

    Args:
        link: its link.
        compute: seconds of its training.
        bytes_up: bytes of its upload.
        bytes_down: bytes of its download, catch-up included.
    """
    return compute + 8 * bytes_up / link.up + 8 * bytes_down / link.down


def seconds(records: Iterable[Mapping[str, Any]], link: Link, compute: float | None = None) -> float:
    """Seconds of some rounds.

    Args:
        records: lines of `metrics.jsonl`.
        link: the link of every client.
        compute: seconds of training of a client in a round; by default the measured ones, divided by the clients.

    >>> line = {"clients": 10, "seconds": 5.0, "bytes_up": 2.5e6, "bytes_down": 2e6, "bytes_catchup": 0.5e6}
    >>> seconds([line, line], link("2 Mbps")), seconds([line], link("2 Mbps (uploads 16x slower)"), compute=0.0)
    (5.0, 17.0)
    """
    total = 0.0
    for record in records:
        clients = max(1, record["clients"])
        total += round_seconds(
            link,
            record["seconds"] / clients if compute is None else compute,
            bytes_up=record["bytes_up"] / clients,
            bytes_down=(record["bytes_down"] + record["bytes_catchup"]) / clients,
        )
    return total


def seconds_by_link(records: Iterable[Mapping[str, Any]], compute: float | None = None) -> dict[str, float]:
    """Seconds of some rounds on each of `LINKS`, by its name."""
    lines = list(records)
    return {known.name: round(seconds(lines, known, compute), 3) for known in LINKS}
