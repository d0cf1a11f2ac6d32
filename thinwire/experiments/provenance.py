"""The commit and the time at which a run was made, for its `environment.json` and for archives of runs.

The commit is that of the checkout from which thinwire is imported; code that was copied out of its checkout can name it
in `THINWIRE_COMMIT`. It ends in `+` if tracked files were changed, and is "" where it is unknown.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError


def provenance() -> dict[str, str]:
    """The commit, and the time now, in UTC and to the second.

    >>> sorted(provenance())
    ['commit', 'date']
    """
    return {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def commit() -> str:
    """The commit of the code: `THINWIRE_COMMIT`, or that of the checkout which holds the package."""
    if given := os.environ.get("THINWIRE_COMMIT", ""):
        if not is_commit(given):
            raise ConfigError(f"THINWIRE_COMMIT must be 7 to 40 hexadecimal digits, not {given[:50]!r}")
        return given[:12]
    return _of_checkout(Path(__file__).resolve().parents[2])


def is_commit(value: Any) -> bool:
    """Whether a value is written like a commit.

    >>> is_commit("4e48f0d"), is_commit("4e48f0d+"), is_commit("main"), is_commit(None)
    (True, True, False, False)
    """
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{7,40}\+?", value) is not None


@functools.cache
def _of_checkout(folder: Path) -> str:
    """The commit of a checkout, "" if the folder is the top of none: a package may be installed inside another's."""
    if not (folder / ".git").exists():
        return ""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return found if is_commit(found) else ""
