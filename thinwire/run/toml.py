"""Writing TOML: reading is in the standard library, writing is not.

>>> print(dumps({"seed": 1, "task": {"kind": "digits", "split": {"kind": "iid"}}}), end="")
seed = 1
<BLANKLINE>
[task]
kind = "digits"
split = { kind = "iid" }
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from typing import Any

from thinwire.errors import ConfigError

Table = dict[str, Any]


def dumps(tree: Table) -> str:
    """A tree of plain values as TOML: top-level tables get a header, deeper ones stand in one line."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(name)}]"] if lines else [f"[{_key(name)}]"]
            lines += [f"{_key(k)} = {_value(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def loads(text: str, what: str) -> Table:
    """A tree from TOML text; `what` names its source in the error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} is not valid TOML: {error}") from error


def parse_value(text: str) -> Any:
    """What a word on the command line means: a TOML value if it is one, otherwise the word itself.

    >>> parse_value("0.1"), parse_value("[1, 2]"), parse_value("cuda")
    (0.1, [1, 2], 'cuda')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise ConfigError(f"{value!r} of type {type(value).__name__} cannot be written to a configuration file")
