"""Parts from tables and tables from parts: `{ kind = "sgd", lr = 0.1 }` in a file is `SGD(lr=0.1)`.

`kind` is the registered name, the other keys are arguments of the constructor. Every key and type is checked: the error
for an unknown key has the most similar known one, the error for a wrong value has the expected type.

>>> build("optimizer", {"kind": "sgd", "lr": 0.5}, "method.client_opt")
SGD(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
>>> describe("optimizer", build("optimizer", "sgd", "x"))["kind"]
'sgd'
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from thinwire.core.registry import KINDS, is_left_out, lookup, name_of
from thinwire.data.partition import Partition
from thinwire.errors import ConfigError, UnknownName
from thinwire.federation.attacks import Attack
from thinwire.runs.files import type_hints
from thinwire.runs.toml import Table


@cache
def contract_kinds() -> dict[Any, str]:
    """Contract class -> kind. A field with such a type holds a part: a table in the file, at any depth."""
    slots = {kind.contract_type(): kind.name for kind in KINDS.values() if kind.contract}
    return {**slots, Partition: "partition", Attack: "attack"}


def part_kind(hint: Any) -> str | None:
    """The kind of part that a type hint names, on its own or with None."""
    return next((contract_kinds()[one] for one in _options(hint) if one in contract_kinds()), None)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def build(kind: str, table: Any, where: str) -> Any:
    """Make a part from its table, or from its name alone.

    Args:
        kind: the kind of part, for example `space`.
        table: `{"kind": name, ...}` or the name.
        where: its path in the file, for error messages.
    """
    name, options = named(table, where)
    make = lookup(kind, name).make
    return make(**arguments(make, options, where))


def named(table: Any, where: str) -> tuple[str, Table]:
    """Split a table `{kind = ..., ...}` into name and options; a name alone has no options."""
    if isinstance(table, str):
        return table, {}
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise ConfigError(f'{where} must be a name or a table with a kind, such as {{ kind = "..." }}, not {table!r}')
    return table["kind"], {k: v for k, v in table.items() if k != "kind"}


def arguments(make: Callable[..., Any], options: Table, where: str) -> Table:
    """Check options against the parameters of a constructor or function, and convert them to its types."""
    if not options:
        return {}
    known = inspect.signature(make).parameters
    # the hints of inherited fields of a dataclass are resolved in the module of the base class
    plain_class = inspect.isclass(make) and not dataclasses.is_dataclass(make)
    try:
        hints = type_hints(make.__init__ if plain_class else make)
    except (NameError, TypeError, AttributeError):  # of a user's function; its arguments are passed as they are
        hints = {}
    out = {}
    for key, value in options.items():
        if key not in known:
            raise UnknownName(f"key in {where}", key, known)
        out[key] = coerce(value, hints.get(key, Any), f"{where}.{key}")
    return out


def describe(kind: str, part: Any) -> Table:
    """The table from which `build` makes an equal part."""
    name = name_of(kind, part)
    if name is None:
        raise ConfigError(f"{part!r} is not a registered {kind}, so it cannot be written to a file; see `register`")
    return {"kind": name, **plain(part)}


def plain(value: Any, hint: Any = Any) -> Any:
    """Dataclasses as tables, tuples as lists, and fields whose type hint is a contract as the table of their part.

    A rarely set field (`metadata={"rare": True}`) is left out while it has its default: digests of older experiments
    stay the same.
    """
    if value is not None and (kind := part_kind(hint)) is not None:
        return describe(kind, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = type_hints(type(value))
        given = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        kept = {f.name: one for f, one in given if one is not None and not is_left_out(f, one)}  # TOML has no None
        return {name: plain(one, hints[name]) for name, one in kept.items()}
    if isinstance(value, tuple | list):
        inner = get_args(hint)
        return [plain(v, inner[0] if inner[1:] == (Ellipsis,) else Any) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if callable(value):  # a function that was given in Python, such as `Local.trainer`
        return str(getattr(value, "__qualname__", type(value).__name__))
    return value


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Convert a value to a type, or raise an error with the value and the expected type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return value
    if (kind := contract_kinds().get(hint)) is not None:
        return value if dataclasses.is_dataclass(value) else build(kind, value, where)
    if origin in (Union, types.UnionType):
        errors = []
        for option in inner:
            try:
                return coerce(value, option, where)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is Literal:
        if value not in inner:
            raise UnknownName(f"value of {where}", str(value), [str(v) for v in inner])
        return value
    if origin is tuple and isinstance(value, list | tuple):
        hints = inner[:1] * len(value) if inner[1:] == (Ellipsis,) else inner
        if len(hints) == len(value):
            return tuple(coerce(v, h, where) for v, h in zip(value, hints, strict=True))
    if origin is Callable and callable(value):
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _record(hint, value, where)
    if hint in (int, float) and not isinstance(value, bool) and isinstance(value, Integral if hint is int else Real):
        with suppress(OverflowError):  # of a whole number of more than 1024 bits
            return hint(value)  # a float may be infinite or NaN: parts check whether they can use it
    elif isinstance(hint, type) and isinstance(value, hint) and hint is not int:
        return value
    wanted = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    is_number = hint in (int, float) and isinstance(value, str) and value.strip().replace(".", "", 1).isdigit()
    hint_line = f"; write {where} = {value.strip()}" if is_number else ""
    raise ConfigError(f"{where} must be of type {wanted}, not {value!r}{hint_line}")


def _record(make: type, table: Table, where: str) -> Any:
    """Make a dataclass that is not a part, such as one rule of a route, from its table."""
    given = arguments(make, table, where)
    for name, parameter in inspect.signature(make).parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{where} lacks {name!r}")
    return make(**given)
