"""The live page of a run, its metrics for Prometheus and its health: all from the files of the run directory.

    /          `live_page`: state, curves, newest rounds, sites, the end of server.log
    /metrics   `metrics_text`: the text format of Prometheus
    /health    `health`: 200 and JSON while the run makes progress or is finished, else 503

Texts in these files may come from clients; all of them are escaped and bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.core.units import human_bytes, human_seconds, percent
from thinwire.errors import ThinwireError
from thinwire.experiments.collapse import BROKEN
from thinwire.experiments.records import Record, honest_bytes, read_run
from thinwire.experiments.watch import Standing, standing, status_line
from thinwire.reports.curve_figure import curve_figure
from thinwire.reports.objectives import objective_key
from thinwire.reports.page import Chapter, Command, Lead, Piece, Table, as_html
from thinwire.reports.seed_groups import group

REFRESH = 5  # seconds between two loads of the page
SILENCE = 900.0  # seconds without a new round after which a run is not healthy; ten rounds if they take longer
_ROUNDS, _LOG_LINES, _TAIL = 12, 15, 1 << 20
_OUTCOMES = ("refused", "bounded", "absent", "late")


class Health(NamedTuple):
    """Whether a run makes progress, and why not."""

    healthy: bool
    why: str
    state: str
    round: int = 0
    rounds: int = 0
    idle_seconds: float | None = None

    @property
    def code(self) -> int:
        """The status code of HTTP."""
        return 200 if self.healthy else 503


def health(path: Path, now: float | None = None) -> Health:
    """The health of a run.

    Args:
        path: the run directory.
        now: the time, for tests; by default that of the clock.
    """
    try:
        status = standing(path, now)
    except (ThinwireError, OSError) as error:
        return Health(False, visible(str(error), 300), "unknown")
    return _health(status)


def _health(status: Standing) -> Health:
    idle, limit = status.idle_seconds or 0.0, max(SILENCE, 10 * (status.seconds_per_round or 0.0))
    if status.status in BROKEN:
        why = f"{status.status}: {status.status_why}"
    elif status.state == "stopped":
        why = f"its process is gone; {status.resume}"
    elif status.state != "finished" and idle > limit:
        why = f"no new round for {human_seconds(idle)}"
    else:
        why = ""
    return Health(not why, visible(why, 300), status.state, status.round, status.rounds, status.idle_seconds)


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics_text(path: Path) -> str:
    """The metrics of a run in the text format of Prometheus; only `thinwire_healthy` if it cannot be read."""
    try:
        status, records = standing(path), read_run(path).records
    except (ThinwireError, OSError):
        return _family("thinwire_healthy", "gauge", "1 while the run makes progress or is finished.", [({}, 0)])
    labels = {"method": status.method, "task": status.task}
    gauges = {
        "healthy": ("1 while the run makes progress or is finished.", int(_health(status).healthy)),
        "round": ("Rounds done.", status.round),
        "rounds": ("Rounds of the run.", status.rounds),
        "loss": ("Mean training loss of the newest round.", status.loss),
        "accuracy": ("Newest accuracy on the test set.", status.accuracy),
        "round_seconds": ("Median seconds of the recent rounds.", status.seconds_per_round),
        "idle_seconds": ("Seconds since the newest round.", status.idle_seconds),
    }
    parts = [
        _family(f"thinwire_{name}", "gauge", text, [(labels, value)])
        for name, (text, value) in gauges.items()
        if value is not None
    ]
    states = [({**labels, "state": one}, int(one == status.state)) for one in _STATES]
    parts.append(_family("thinwire_state", "gauge", "1 for the state of the run.", states))
    sent = {"up": status.bytes_up, "down": status.bytes_down, "catchup": status.bytes_catchup}
    sent["abandoned"] = status.bytes_abandoned
    parts.append(
        _family(
            "thinwire_bytes_total",
            "counter",
            "Bytes of messages.",
            [({**labels, "direction": way}, count) for way, count in sent.items()],
        )
    )
    uploads = {"accepted": sum(record["clients"] for record in records)}
    uploads |= {name: sum(_count(record, name) for record in records) for name in _OUTCOMES}
    rows: list[tuple[dict[str, str], float]] = [({**labels, "outcome": k}, n) for k, n in uploads.items()]
    parts.append(_family("thinwire_uploads_total", "counter", "Uploads of clients by outcome.", rows))
    sites = newest_by_site(path)
    if sites:
        last: list[tuple[dict[str, str], float]] = [({**labels, "site": k}, one["round"]) for k, one in sites.items()]
        text = "The newest round that the site was asked in."
        parts.append(_family("thinwire_site_round", "gauge", text, last))
        state: list[tuple[dict[str, str], float]] = [
            ({**labels, "site": k, "status": visible(str(one.get("status", "?")), 40)}, 1) for k, one in sites.items()
        ]
        parts.append(_family("thinwire_site_status", "gauge", "1 for what became of its newest upload.", state))
    return "".join(parts)


_STATES = ("starting", "running", "finished", "stopped")


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> str:
    """One metric with its samples.

    >>> print(_family("a", "gauge", "Text.", [({"x": 'q"1'}, 2), ({}, float("inf"))]), end="")
    # HELP a Text.
    # TYPE a gauge
    a{x="q\\"1"} 2
    a +Inf
    """
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{key}="{_label(one)}"' for key, one in labels.items())
        lines.append(f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return visible(text, 200).replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


# -- page --------------------------------------------------------------------------------------------------------------


def live_page(path: Path) -> str:
    """The page of a run, which a browser loads again every few seconds; a run that cannot be read has one too."""
    try:
        chapters = _chapters(path)
    except (ThinwireError, OSError) as error:
        chapters = [Chapter("State", [Lead(visible(str(error), 300))])]
    return as_html(f"thinwire: {visible(path.name, 200)}", chapters, "Progress", refresh=REFRESH)


def _chapters(path: Path) -> list[Chapter]:
    status, run = standing(path), read_run(path)
    found = _health(status)
    pieces: list[Piece] = [Lead(status_line(status))]
    if found.why:
        pieces.append(f"Note: {found.why}.")
    chapters = [Chapter("State", pieces)]
    if run.records:
        groups = group([run])
        metrics = dict.fromkeys((objective_key(groups[0].objective), "loss"))
        figures = [curve_figure(run.task, groups, one, (), "rounds") for one in metrics if groups[0].curve(one)]
        chapters.append(Chapter("Rounds", [*figures, _rounds_table(run.records)]))
    if sites := newest_by_site(path):
        chapters.append(Chapter("Sites", [_sites_table(sites)]))
    if lines := tail(path / "server.log", _LOG_LINES):
        chapters.append(Chapter("Log", [Command("\n".join(visible(line, 300) for line in lines))]))
    return chapters


def _rounds_table(records: Sequence[Record]) -> Table:
    heads = ("round", "loss", "accuracy", "clients", *_OUTCOMES, "bytes", "seconds")
    rows = [
        (
            str(one["round"]),
            f"{one['loss']:.4g}",
            percent(one["accuracy"]),
            str(one["clients"]),
            *(str(_count(one, name)) for name in _OUTCOMES),
            human_bytes(honest_bytes(one)),
            human_seconds(one["seconds"]),
        )
        for one in reversed(records[-_ROUNDS:])
    ]
    return Table("Newest rounds", heads, rows)


def _sites_table(sites: Mapping[str, Mapping[str, Any]]) -> Table:
    fields = ("round", "status", "loss", "norm", "cosine", "seconds", "why")
    rows = [(name, *(_text(one.get(field)) for field in fields)) for name, one in sorted(sites.items())]
    return Table("Newest round of every site", ("site", *fields), rows)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value in (None, "") else visible(str(value), 120)


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    return value if type(value) is int else 0


# -- files -------------------------------------------------------------------------------------------------------------


def newest_by_site(path: Path) -> dict[str, dict[str, Any]]:
    """The newest line of each site in `sites.jsonl`, of its last megabyte; empty if there is no such file."""
    newest: dict[str, dict[str, Any]] = {}
    for line in tail(path / "sites.jsonl", 10_000):
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(one, dict) and type(one.get("round")) is int:
            newest[visible(str(one.get("site") or f"client {one.get('client')}"), 64)] = one
    return newest


def tail(file: Path, lines: int) -> list[str]:
    """The last lines of a file, of its last megabyte; empty if there is no such file."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL))
            data = stream.read(_TAIL)
    except OSError:
        return []
    found = data.decode("utf-8", "replace").split("\n")
    return found[1 if size > _TAIL else 0 : -1][-lines:]  # neither the cut first line nor one that is being written
