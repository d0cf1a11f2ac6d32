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
    for at, key in enumerate(parents):
        below = here.get(key)
        if isinstance(below, list):  # the parts of a chain: method.up.parts.0.density
            here[key] = _changed(below, ".".join([*parents[at + 1 :], last]), value)
            return
        if isinstance(below, str):
            below = {"kind": below}
        here[key] = dict(below) if isinstance(below, dict) else {}
        here = here[key]
    if last == "kind" and here.get("kind") != value:
        here.clear()  # the options of one kind do not apply to another
    here[last] = value


def _changed(parts: list[Any], path: str, value: Any) -> list[Any]:
    """A list of tables with a value in one of them, by its place from 0 and a dotted path."""
    place, _, rest = path.partition(".")
    if not place.isdigit() or int(place) >= len(parts) or not rest:
        raise ConfigError(
            f"{path!r} names no part of a list of {len(parts)}; write its place from 0, such as 0.density"
        )
    wrapped = {"part": parts[int(place)]}
    put(wrapped, f"part.{rest}", value)
    return [*parts[: int(place)], wrapped["part"], *parts[int(place) + 1 :]]


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


def flat(table: Table) -> dict[str, Any]:
    """Every value by its dotted path; parts within a list by their place in it.

    >>> flat({"rounds": 2, "method": {"up": {"kind": "chain", "parts": [{"kind": "raw"}]}}})
    {'rounds': 2, 'method.up.kind': 'chain', 'method.up.parts.0.kind': 'raw'}
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        tables = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
        inner = dict(zip(map(str, range(len(value))), value, strict=True)) if tables else value
        if isinstance(inner, dict) and inner:
            values.update({f"{key}.{name}": deep for name, deep in flat(inner).items()})
        else:
            values[key] = value
    return values
