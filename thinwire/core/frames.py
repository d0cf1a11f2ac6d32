"""Rows as a pandas frame; pandas is optional and imported when a frame is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import ConfigError


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` with one row for each mapping."""
    try:
        import pandas  # type: ignore
    except ImportError as error:
        raise ConfigError("a frame needs pandas, which is not installed; write pip install pandas") from error
    return pandas.DataFrame(list(rows))
