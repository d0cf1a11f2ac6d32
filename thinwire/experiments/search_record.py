"""`search.json` of a run directory: how a setting of the run was found, and what the search cost.

It is written beside the run that uses the setting, so that every page about the run can state it. No result depends on
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import CheckpointError
from thinwire.experiments.files import read_json, write_atomically

FILE = "search.json"


class SearchRecord(NamedTuple):
    """A search for a setting.

    Args:
        setting: the key, such as `method.client_opt.lr`.
        value: the value that was found.
        tried: all values that were tried, ascending.
        rungs: number of runs and rounds of each rung.
        seed: the seed of the search.
        chosen_by: the criterion.
        rounds: rounds of all runs of the search.
        bytes: bytes that they sent.
    """

    setting: str
    value: float
    tried: tuple[float, ...]
    rungs: tuple[tuple[int, int], ...]
    seed: int
    chosen_by: str
    rounds: int
    bytes: int

    @property
    def at_end(self) -> bool:
        """Whether the value is the smallest or the largest that was tried."""
        return self.value in (min(self.tried), max(self.tried))


def write_search(run: Path, record: SearchRecord) -> None:
    """Write the record of a search into the directory of a run that uses its result."""
    write_atomically(run / FILE, (json.dumps(record._asdict()) + "\n").encode())


def read_search(run: Path) -> SearchRecord | None:
    """The record of a search in a run directory; None if there is none, or if it is not valid."""
    if not (run / FILE).is_file():
        return None
    try:
        found = read_json(run / FILE)
    except CheckpointError:
        return None
    setting, value, tried, rungs, seed, chosen_by, rounds, sent = (found.get(key) for key in SearchRecord._fields)
    if not isinstance(setting, str) or not isinstance(chosen_by, str) or not _is_number(value):
        return None
    if not all(type(count) is int and 0 <= count < 1 << 64 for count in (seed, rounds, sent)):
        return None
    if not isinstance(tried, list) or not tried or not all(map(_is_number, tried)):
        return None
    if not isinstance(rungs, list) or not all(_is_rung(rung) for rung in rungs):
        return None
    lengths = tuple((count, length) for count, length in rungs)
    return SearchRecord(setting, value, tuple(tried), lengths, seed, chosen_by, rounds, sent)  # type: ignore[arg-type]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e308


def _is_rung(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(one) is int and 0 < one < 1 << 63 for one in value)
