"""The version of thinwire."""

from __future__ import annotations


def version() -> str:
    """The version of the installed package; "unknown" in a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # late: it takes longer than the rest of thinwire

    try:
        return version("thinwire")
    except PackageNotFoundError:
        return "unknown"
