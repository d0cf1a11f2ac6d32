"""Methods joined by `+`: `mapo+int8` is MAPO whose numbers travel in eight bits.

Every preset fills some slots of an experiment. Presets that fill different slots are put side by side; the same value
twice is no clash. Where two fill one slot differently:

    method.up, method.down     codecs are chained in the order of the names: topk+int8 sends the largest, in 8 bits
    method.client_opt          the first one that sets it has it: a rate is tuned for one method, not part of it
    anything else              is refused, in one line that names the slot and both methods

What a preset wants to be different on a task (`[on.TASK]`) is put onto that preset before it is joined.

>>> join(named("scaffold+int8"))["method"]["correction"], join(named("topk+int8"))["method"]["up"]["kind"]
('scaffold', 'chain')
>>> join(named("mapo+fedpara"))
Traceback (most recent call last):
thinwire.errors.IncompatibleParts: mapo+fedpara: 'mapo' and 'fedpara' both fill method.space; keep one of them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.experiments.parts import build
from thinwire.experiments.presets import Preset, layer, preset
from thinwire.experiments.toml import Table

_CODECS = ("method.up", "method.down")
_FIRST_HAS_IT = ("method.client_opt",)


def named(expression: str) -> list[Preset]:
    """The presets that an expression such as `mapo+int8` names, in its order."""
    names = [name.strip() for name in expression.split("+")]
    if len(names) > 1 and not all(names):
        raise ConfigError(f"{expression!r} has a + with no method on one side; write for example mapo+int8")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"{expression!r} names {name!r} twice; once is enough")
    return [preset("methods", name) for name in names]


def join(methods: Sequence[Preset], task: str | None = None) -> Table:
    """One table out of several presets.

    Args:
        methods: the presets.
        task: the task on which they are used, for what they want to be different there.
    """
    expression = "+".join(method.name for method in methods)
    out: Table = {}
    owners: dict[str, list[str]] = {}  # who filled a slot
    for method in methods:
        own = {key: value for key, value in method.table.items() if key != "on"}
        own = layer(own, method.table.get("on", {}).get(task, {}))
        for place, value in _slots(own):
            before = owners.setdefault(place, [])
            if not before or _get(out, place) == value:
                _put(out, place, value)
            elif place in _CODECS:
                _put(out, place, _chain(expression, place, [*before, method.name], _get(out, place), value))
            elif place in _FIRST_HAS_IT:
                continue
            else:
                raise IncompatibleParts(
                    f"{expression}: {before[0]!r} and {method.name!r} both fill {place}; keep one of them"
                )
            before.append(method.name)
    return out


def _slots(table: Table) -> list[tuple[str, Any]]:
    """Every value by its place, two levels deep: `rounds`, `method.space`, `local.batch`."""
    out = []
    for key, value in table.items():
        if isinstance(value, dict):
            out += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            out.append((key, value))
    return out


def _get(table: Table, place: str) -> Any:
    section, _, key = place.rpartition(".")
    return (table[section] if section else table)[key]


def _put(table: Table, place: str, value: Any) -> None:
    section, _, key = place.rpartition(".")
    (table.setdefault(section, {}) if section else table)[key] = value


def _chain(expression: str, place: str, names: Sequence[str], first: Any, second: Any) -> Table:
    """Two codecs one after another, if that is possible."""

    def chained(*codecs: Any) -> Table:
        parts: list[Any] = []
        for codec in codecs:
            inside = isinstance(codec, dict) and codec.get("kind") == "chain"
            parts += codec["parts"] if inside else [codec]
        return {"kind": "chain", "parts": parts}

    def works(table: Table) -> ConfigError | None:
        try:
            build("codec", table, place)
        except ConfigError as error:
            return error
        return None

    wanted = chained(first, second)
    if error := works(wanted):
        earlier, name = " and ".join(map(repr, names[:-1])), names[-1]
        others = [known for known in expression.split("+") if known not in (*names[:-1], name)]
        why = f"do not chain: {error}"
        if not works(chained(second, first)):
            why = f"do not chain in this order; write {'+'.join([*others, name, *names[:-1]])}"
        raise IncompatibleParts(f"{expression}: {earlier} and {name!r} both fill {place} and {why}") from error
    return wanted
