"""Folders and files that only their owner may read: keys, states of clients, runs of a deployment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Make a folder with the mode 0700, and its missing parents; the mode of an existing folder is not changed."""
    if not path.is_dir():
        with private():
            path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def private() -> Iterator[None]:
    """Everything that is created inside the block can be read by its owner only (umask 077 of the whole process)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
