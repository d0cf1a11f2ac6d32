"""The JSON files of LEAF: examples grouped by user.

    {"users": [name, ...], "num_samples": [count, ...], "user_data": {name: {"x": [...], "y": [...]}}}

Caldas et al., LEAF: a benchmark for federated settings, 2018.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.data.reading import read_json_object
from thinwire.errors import DataError

_LIMIT = 1 << 31  # bytes of one file


def read_users(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the record of each user of a file, in the order of the file."""
    found = read_json_object(path, _LIMIT)
    for key, kind in (("users", list), ("user_data", dict)):
        if not isinstance(found.get(key), kind):
            raise DataError(f"{path}: no {kind.__name__} under {key!r}, expected the layout of LEAF")
    data = found["user_data"]
    seen: set[str] = set()
    for name in found["users"]:
        if not isinstance(name, str) or not isinstance(data.get(name), dict) or name in seen:
            raise DataError(f"{path}: user {str(name)[:60]!r} is listed twice or has no object under 'user_data'")
        seen.add(name)
        yield name, data[name]


def samples(path: Path, name: str, record: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The inputs and the targets of a user, lists of the same length."""
    x, y = record.get("x"), record.get("y")
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise DataError(f"{path}: user {name[:60]!r} needs lists 'x' and 'y' of the same length")
    return x, y


def split_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of the training and the test split, as LEAF's scripts write them."""
    lists = []
    for split in ("train", "test"):
        files = sorted((folder / split).glob("*.json"))
        if not files:
            raise DataError(f"{folder / split}: no .json file, expected the output of LEAF's preprocess.sh")
        lists.append(files)
    return lists[0], lists[1]
