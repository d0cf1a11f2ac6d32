"""Records of a deployment in its run directory: cohorts by round, and one line for each client and round.

`cohorts.jsonl` has which clients were there, were asked, and were accepted:

    {"round": 5, "available": [0, 1, 4, 7], "cohort": [4, 0, 7]}     before the requests are sent
    {"round": 5, "accepted": [0, 4], "late": [7]}                    after the round

In asynchronous rounds the second line also has the versions that the accepted uploads were trained from (`based`).
A round that was resumed may have several lines of the first kind: the last counts, and removes later rounds, since the
run went back.

`sites.jsonl` has what the server knows about a client in a round, written when the round is closed. If the run goes
back, the lines of the abandoned rounds stay: lines that follow have a higher `attempt`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thinwire.core.text import visible
from thinwire.runs.files import append_json, json_lines, read_lines, unpack, write_atomically

COHORTS = "cohorts.jsonl"
SITES = "sites.jsonl"
Status = Literal["accepted", "bounded", "refused", "absent", "late", "left out"]


class SiteRecord(NamedTuple):
    """One client in one round, as a line of `sites.jsonl`.

    Args:
        round: the round, from 1.
        site: the name of its site on the roster, with its number if the site has several; else its number.
        client: its number.
        status: `accepted`; `bounded`: accepted and scaled down; `refused`: not used; `absent`: no response in time;
            `late`: the round was closed before it responded; `left out`: because of earlier uploads.
        norm: of its update, as received; None if it was not compared with those of others.
        loss: its training loss, as reported; None if it is not a finite number.
        seconds: from the request to the response; None without a response.
        bytes_up: bytes that it sent in this round.
        bytes_down: bytes that were sent to it.
        why: the reason of its status, on one line of at most 300 characters; "" if it is `accepted`.
        attempt: how often the run had gone back before.
    """

    round: int
    site: str
    client: int
    status: Status
    norm: float | None = None
    loss: float | None = None
    seconds: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    why: str = ""
    attempt: int = 0


class RoundCohort(NamedTuple):
    """Who took part in a round.

    Args:
        available: the clients that were there when the cohort was drawn.
        cohort: the clients that were asked.
        accepted: those whose upload is in the next version; None while the round is open.
        late: those that had not responded when the round was closed.
        based: of asynchronous rounds, the version that each accepted upload was trained from.
    """

    available: tuple[int, ...]
    cohort: tuple[int, ...]
    accepted: tuple[int, ...] | None = None
    late: tuple[int, ...] = ()
    based: tuple[int, ...] = ()


class CohortLog:
    """The cohorts of a run by round.

    Args:
        run: the run directory, whose file is read when it is first needed; by default they are kept in memory.

    >>> log = CohortLog()
    >>> log.drawn(1, [0, 2, 3], [3, 0])
    >>> log.closed(1, [0], [3])
    >>> log.rounds[1]
    RoundCohort(available=(0, 2, 3), cohort=(3, 0), accepted=(0,), late=(3,), based=())
    """

    def __init__(self, run: Path | None = None) -> None:
        self.file = run / COHORTS if run else None

    @cached_property
    def rounds(self) -> dict[int, RoundCohort]:
        """The rounds so far, by number from 1; an incomplete last line of a killed process is removed."""
        rounds: dict[int, RoundCohort] = {}
        if self.file is None:
            return rounds
        lines = read_lines(self.file, lambda value: _applied(rounds, value))
        if self.file.is_file() and len(whole := self.file.read_bytes().splitlines(keepends=True)) > len(lines):
            write_atomically(self.file, b"".join(whole[: len(lines)]))
        return rounds

    def drawn(self, number: int, available: Sequence[int], cohort: Sequence[int]) -> None:
        """Record a cohort before it is asked."""
        self._add({"round": number, "available": [*available], "cohort": [*cohort]})

    def closed(
        self, number: int, accepted: Sequence[int], late: Sequence[int], based: Sequence[int] | None = None
    ) -> None:
        """Record whose uploads are in the next version, and in asynchronous rounds the versions they are based on."""
        versions = {} if based is None else {"based": [*based]}
        self._add({"round": number, "accepted": [*accepted], "late": [*late], **versions})

    def extremes(self) -> tuple[int, int]:
        """The most clients that were asked in a round, and the fewest that a cohort was drawn from; 0 if unknown."""
        rounds = [one for one in self.rounds.values() if one.cohort]
        most = max((len(one.cohort) for one in rounds), default=0)
        return most, min((len(one.available) for one in rounds), default=0)

    def _add(self, line: dict[str, Any]) -> None:
        _applied(self.rounds, line)
        if self.file is not None:
            append_json(self.file, line)


def _applied(rounds: dict[int, RoundCohort], line: dict[str, Any]) -> None:
    """Add a line to the rounds; one that is not valid raises an error."""
    number = unpack(int, line["round"])
    lists = unpack(dict[str, tuple[int, ...]], {key: one for key, one in line.items() if key != "round"})
    if "cohort" in lists:
        found = RoundCohort(**lists)
        for later in [one for one in rounds if one >= number]:
            del rounds[later]
        rounds[number] = found
    elif number in rounds:
        rounds[number] = rounds[number]._replace(**lists)


def append_sites(path: Path, records: Iterable[SiteRecord]) -> None:
    """Append the lines of a round to the file of a run directory."""
    append_json(path / SITES, *(record._asdict() for record in records))


def read_sites(path: Path) -> list[SiteRecord]:
    """The lines of a run directory up to the first that is incomplete or not valid; empty if it has none."""

    def parse(value: Any) -> SiteRecord:
        record: SiteRecord = unpack(SiteRecord, value)
        return record._replace(site=visible(record.site, 100), why=visible(record.why, 300))

    return read_lines(path / SITES, parse)


def by_site(path: Path) -> dict[str, Counter[str]]:
    """Of each site: bytes and seconds of all rounds, how often it was refused, and whether it is connected."""
    found: dict[str, Counter[str]] = {}
    for one in read_sites(path):
        site = found.setdefault(one.site.partition(",")[0], Counter())
        site.update({key: getattr(one, key) or 0 for key in ("bytes_up", "bytes_down", "seconds")})
        site.update(refused=one.status == "refused")
        site["connected"] = int(one.status != "absent")
    return found


def cut_sites(path: Path, rounds: int, attempt: int) -> None:
    """Remove the lines after a round from which the run continues; those of earlier attempts stay."""
    if (path / SITES).is_file():
        kept = (one._asdict() for one in read_sites(path) if one.round <= rounds or one.attempt < attempt)
        write_atomically(path / SITES, json_lines(*kept).encode())
