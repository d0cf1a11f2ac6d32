"""Reading and writing TOML; the standard library only reads it.

>>> print(dumps({"seed": 1, "task": {"kind": "digits", "partition": {"kind": "iid"}}}), end="")
seed = 1
<BLANKLINE>
[task]
kind = "digits"
partition = { kind = "iid" }

Overrides: single settings by dotted path, as in `--set method.client_opt.lr=0.05`.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.errors import ConfigError

Table = dict[str, Any]

DEEPEST = 32  # levels of tables and lists
LONGEST = 1 << 24  # bytes of a file


def dumps(tree: Table) -> str:
    """A tree of plain values as TOML: top-level tables get a header, deeper ones are inline."""
    lines = [f"{_key(k)} = {written(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(name)}]"] if lines else [f"[{_key(name)}]"]
            lines += [f"{_key(k)} = {written(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def loads(text: str, what: str) -> Table:
    """A tree from TOML text; `what` is the name of its source, for errors.

    >>> loads("x = " + "[" * 99 + "]" * 99, "a.toml")
    Traceback (most recent call last):
    thinwire.errors.ConfigError: a.toml is nested more than 32 levels deep
    """
    try:
        tree = tomllib.loads(text)
        _check(tree, what)
    except RecursionError:
        raise ConfigError(f"{what} is nested more than {DEEPEST} levels deep") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} is not valid TOML: {visible(str(error), 300)}") from error
    except ValueError:  # of Python's limit on the digits of a number
        raise ConfigError(f"{what} holds a whole number of more than 64 bits") from None
    return tree


def read_toml(file: Path) -> Table:
    """The tree in a file; a ConfigError if it cannot be read."""
    try:
        if (size := file.stat().st_size) > LONGEST:
            raise ConfigError(f"{file} has {size:,} bytes; a file of settings has at most {LONGEST:,}")
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 (byte {error.start + 1}); save it as UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    return loads(text, str(file))


def parse_value(text: str) -> Any:
    """The value of a word on the command line: a TOML value if it is one, otherwise the word itself.

    >>> parse_value("0.1"), parse_value("[1, 2]"), parse_value("cuda")
    (0.1, [1, 2], 'cuda')
    """
    try:
        tree = loads(f"value = {text}", "a value of --set")
    except ConfigError as error:
        if not isinstance(error.__cause__, tomllib.TOMLDecodeError):
            raise
        return text
    return tree["value"] if tree.keys() == {"value"} else text


def _check(value: Any, what: str, depth: int = 0) -> None:
    """Refuse values that are nested too deeply, and integers of more than 64 bits, which TOML does not have."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:  # a seed has 64 bits without a sign
        raise ConfigError(f"{what} holds a whole number of more than 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check(inner, what, depth + 1)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    """A basic string of TOML; characters that cannot be printed are escaped.

    >>> print(_string('say "\\x7f"'))
    "say \\"\\u007f\\""
    """
    quoted = json.dumps(text, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{visible(text, 200)!r} is not UTF-8, so it cannot be written to a file") from error
    if quoted.isprintable():
        return quoted
    return "".join(
        c if c.isprintable() else f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else f"\\u{ord(c):04x}" for c in quoted
    )


def written(value: Any) -> str:
    """A value as it is written in a file, and after `--set KEY=`.

    >>> written(0.3), written({"kind": "raw"})
    ('0.3', '{ kind = "raw" }')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(value)
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(v) for v in value) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(k)} = {written(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise ConfigError(f"{value!r} of type {type(value).__name__} cannot be written to a configuration file")


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
