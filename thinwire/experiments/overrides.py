"""Overrides: single settings by dotted path, as in `--set method.client_opt.lr=0.05`."""

from __future__ import annotations

from typing import Any

from thinwire.errors import ConfigError
from thinwire.experiments.toml import Table, parse_value


def put(table: Table, path: str, value: Any) -> None:
    """Set a value by its dotted path; a part that is given by name only becomes a table.

    >>> table = {"method": {"client_opt": "sgd"}}
    >>> put(table, "method.client_opt.lr", 0.5); table
    {'method': {'client_opt': {'kind': 'sgd', 'lr': 0.5}}}
    """
    *parents, last = path.split(".")
    here = table
    for key in parents:
        below = here.get(key)
        if isinstance(below, str):
            below = {"kind": below}
        here[key] = dict(below) if isinstance(below, dict) else {}
        here = here[key]
    if last == "kind" and here.get("kind") != value:
        here.clear()  # the options of one kind do not apply to another
    here[last] = value


def parse_overrides(words: list[str]) -> Table:
    """`key=value` words of a command line as overrides.

    >>> parse_overrides(["rounds=5", "engine.device=cuda"])
    {'rounds': 5, 'engine.device': 'cuda'}
    """
    out = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set takes key=value, for example --set method.client_opt.lr=0.05, not {word!r}")
        out[key] = parse_value(value)
    return out
