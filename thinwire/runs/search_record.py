"""`search.json` of a run directory: how a setting of the run was found, and what the search cost.

It is written beside the run that uses the setting, so that every page about the run can state it. No result depends on
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from thinwire.errors import CheckpointError
from thinwire.runs.files import INVALID, read_json, unpack, write_json

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
    write_json(run / FILE, record._asdict())


def read_search(run: Path) -> SearchRecord | None:
    """The record of a search in a run directory; None if there is none, or if it is not valid."""
    try:
        found: SearchRecord = unpack(SearchRecord, read_json(run / FILE))
    except (CheckpointError, *INVALID):
        return None
    return found if found.tried else None
