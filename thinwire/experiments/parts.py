"""Parts from tables and tables from parts: `{ kind = "sgd", lr = 0.1 }` and `SGD(lr=0.1)` are the same thing.

`kind` is the registered name, the other keys are the arguments of the constructor. Everything is strict: an unknown
key names the nearest right one, a value of the wrong type says what was expected.

>>> build("optimizer", {"kind": "sgd", "lr": 0.5}, "method.client_opt")
SGD(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
>>> describe("optimizer", build("optimizer", "sgd", "x"))["kind"]
'sgd'
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.aggregators.base import Aggregator
from thinwire.aggregators.client_weight import ClientWeight
from thinwire.codecs.base import Codec
from thinwire.core.registry import lookup, name_of
from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.toml import Table
from thinwire.masks import Mask
from thinwire.optimizers.base import Correction, Optimizer
from thinwire.optimizers.lr_schedules import LRSchedule
from thinwire.optimizers.penalties import Penalty
from thinwire.privacy.base import Privacy
from thinwire.schedules.base import Schedule
from thinwire.sketches.base import Sketch
from thinwire.spaces.base import Space

# A field with one of these types holds a part: a table in the file, as deep as one likes.
KINDS: dict[Any, str] = {
    Space: "space",
    Sketch: "sketch",
    Schedule: "schedule",
    Codec: "codec",
    Optimizer: "optimizer",
    Correction: "correction",
    Penalty: "penalty",
    LRSchedule: "lr_schedule",
    Privacy: "privacy",
    ClientWeight: "client_weight",
    Mask: "mask",
    Aggregator: "aggregator",
}


def build(kind: str, table: Any, where: str) -> Any:
    """Make the part that a table (or just a name) describes.

    Args:
        kind: the kind of part, for example `space`.
        table: `{"kind": name, ...}` or the name alone.
        where: its place in the file, for error messages.
    """
    name, options = named(table, where)
    make = lookup(kind, name).make
    return make(**arguments(make, options, where))


def named(table: Any, where: str) -> tuple[str, Table]:
    """The name and the options of a table `{kind = ..., ...}`; a bare name has no options."""
    if isinstance(table, str):
        return table, {}
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise ConfigError(f'{where} must be a name or a table with a kind, such as {{ kind = "..." }}, not {table!r}')
    return table["kind"], {k: v for k, v in table.items() if k != "kind"}


def arguments(make: Callable[..., Any], options: Table, where: str, skip: Iterable[str] = ()) -> Table:
    """Check options against a constructor's parameters and bring them to its types."""
    known = [name for name in inspect.signature(make).parameters if name not in set(skip)]
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
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
    """Dataclasses as tables, tuples as lists; a field that holds a part, by its type, as the table of that part."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next((h for h in inner if h is type(value) or (h in KINDS and value is not None)), Any)
        inner = ()
    if hint in KINDS:
        return describe(KINDS[hint], value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: plain(one, hints[name]) for name, one in given.items() if one is not None}  # TOML has no None
    if isinstance(value, tuple | list):
        return [plain(v, inner[0] if inner[1:] == (Ellipsis,) else Any) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return value


def coerce(value: Any, hint: Any, where: str) -> Any:
    """The value as the type that was asked for, or an error that says both."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return value
    if hint in KINDS:
        return build(KINDS[hint], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _record(hint, value, where)
    if origin is Literal:
        if value not in inner:
            raise UnknownName(f"value of {where}", str(value), [str(v) for v in inner])
        return value
    if origin in (Union, types.UnionType):
        errors = []
        for option in inner:
            try:
                return coerce(value, option, where)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[0])
    if hint is type(None) and value is None:
        return None
    if origin is tuple and isinstance(value, list | tuple):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(coerce(v, inner[0], where) for v in value)
        if len(inner) == len(value):
            return tuple(coerce(v, h, where) for v, h in zip(value, inner, strict=True))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 1000:
        return float(value)
    if hint is float and isinstance(value, float):  # infinite, or no number: parts say whether they can use it
        return value
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    wanted = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise ConfigError(f"{where} must be of type {wanted}, not {value!r}")


def _record(make: type, table: Table, where: str) -> Any:
    """A dataclass that is not a part, such as one rule of a route, from its table."""
    given = arguments(make, table, where)
    for name, parameter in inspect.signature(make).parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{where} lacks {name!r}")
    return make(**given)
