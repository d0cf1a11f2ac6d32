"""Estimated time of a run over slow links, computed from recorded bytes.

The clients of a round work in parallel on equal links, and a round takes as long as a client with average traffic:

    seconds of a round = compute + 8 * bytes_up / (clients * up) + 8 * (bytes_down + bytes_catchup) / (clients * down)

with `up` and `down` in bits a second. `compute` is the training time of one client: the measured seconds of the round,
divided by its clients (one machine trained them all). This is the model of FedPara's Tables 7 and 8,
`t = t_comp + 2 * size / speed`, with the lengths of actual messages instead of a size; the two directions may differ in
speed. Latency, retries and differences between clients are not included.

>>> line = {"clients": 10, "seconds": 5.0, "bytes_up": 2.5e6, "bytes_down": 2e6, "bytes_catchup": 0.5e6}
>>> seconds([line, line], "2 Mbps"), seconds([line], "2 Mbps (uploads 16x slower)")
(5.0, 17.5)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.errors import UnknownName

SLOWER = 16  # download speed / upload speed of the asymmetric links, as in FLASC

# name -> bits a second of uploads and of downloads
LINKS = {
    f"{mbps} Mbps{' (uploads 16x slower)' if slower > 1 else ''}": (mbps * 1e6 / slower, mbps * 1e6)
    for slower in (1, SLOWER)
    for mbps in (2, 10, 50)
}


def seconds(records: Iterable[Mapping[str, Any]], link: str) -> float:
    """Seconds of some rounds.

    Args:
        records: lines of `metrics.jsonl`.
        link: the name of the link of every client.
    """
    if link not in LINKS:
        raise UnknownName("link", link, LINKS)
    (up, down), total = LINKS[link], 0.0
    for record in records:
        clients = max(1, record["clients"])
        total += record["seconds"] / clients
        total += 8 * record["bytes_up"] / clients / up
        total += 8 * (record["bytes_down"] + record["bytes_catchup"]) / clients / down
    return total


def seconds_by_link(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of some rounds on each of `LINKS`, by its name."""
    lines = list(records)
    return {name: round(seconds(lines, name), 3) for name in LINKS}
