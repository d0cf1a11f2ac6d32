"""How long a run would take over slow links, and what energy its messages would cost: arithmetic on recorded bytes.

Clients of a round work side by side, all on the same link, and the round is over when a client of average traffic is:

    seconds of a round = compute + 8 * bytes_up / (clients * up) + 8 * (bytes_down + bytes_catchup) / (clients * down)

with `up` and `down` in bits a second. `compute` is the time of one client's training: the measured seconds of the round
on the machine that ran it, divided by its clients (that machine trains them all), or a number that is given. This is
the model of FedPara's Tables 7 and 8, `t = t_comp + 2 * size / speed`, with messages that exist instead of a size; they
are what they are in each direction, so the two directions may differ in speed. Latency, retries, and clients slower
than others are not in it.

    energy = joules_per_byte * (bytes_up + bytes_down + bytes_catchup)

is the form of the user-to-data-centre model that FedPara uses (Yan et al., Energies 12(1), 2019): every byte crosses
the phone's radio, the access network, the core and the data centre, each at some joules a byte, and they add up.
FedPara prints no constant. The one here is 0.1 kWh a gigabyte, which the Carbon Trust's 2021 study of video streaming
takes for mobile networks. Estimates differ by more than ten times; ratios between methods do not depend on it.

>>> round(round_seconds(link("2 Mbps"), 1.64, bytes_up=58.775e6, bytes_down=58.775e6), 2)  # FedPara, Table 7: VGG16
471.84
>>> round(energy(1e9) / 1e6, 2)  # megajoules for a gigabyte
0.36
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from thinwire.errors import ConfigError

JOULES_PER_BYTE = 0.1 * 3.6e6 / 1e9  # 0.1 kWh/GB
SLOWER = 16  # how much slower uploads are on the asymmetric links, as in FLASC


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
    """One of `LINKS` by its name."""
    for known in LINKS:
        if known.name == name:
            return known
    raise ConfigError(f"unknown link {name!r}; known are {', '.join(known.name for known in LINKS)}")


def round_seconds(link: Link, compute: float, *, bytes_up: float, bytes_down: float) -> float:
    """The time of a round for one client: it computes, sends and receives.

    Args:
        link: its link.
        compute: seconds that it trains.
        bytes_up: what it sends.
        bytes_down: what it receives, catch-up included.
    """
    return compute + 8 * bytes_up / link.up + 8 * bytes_down / link.down


def seconds(records: Iterable[Mapping[str, Any]], link: Link, compute: float | None = None) -> float:
    """The time of some rounds one after another.

    Args:
        records: lines of `metrics.jsonl`.
        link: the link of every client.
        compute: seconds that a client trains in a round; by default the measured ones, divided by the clients.

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
    """The time of some rounds on each of `LINKS`, by its name."""
    lines = list(records)
    return {known.name: round(seconds(lines, known, compute), 3) for known in LINKS}


def energy(bytes_total: float, joules_per_byte: float = JOULES_PER_BYTE) -> float:
    """Joules that the network and both ends spend on so many bytes."""
    return joules_per_byte * bytes_total
