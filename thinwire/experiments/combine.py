"""Methods joined by `+`: `mapo+int8` is MAPO with 8-bit uploads.

A method fills the slots that differ from `Method()`. Methods that fill different slots are combined; the same value
twice is no conflict. Where two methods fill one slot with different values:

    method.up, method.down     codecs are chained in the order of the names: topk+int8 quantizes the largest values
    method.client_opt          the first method that fills it wins: a learning rate is tuned for one method
    any other slot             is refused, in one line that names the slot and both methods

The values that a method has on a task (`thinwire.methods.on`) are used before the methods are joined.

>>> join(named("scaffold+int8"))["method"]["correction"], join(named("topk+int8"))["method"]["up"]["kind"]
({'kind': 'scaffold'}, 'chain')
>>> join(named("mapo+fedpara"))
Traceback (most recent call last):
thinwire.errors.IncompatibleParts: mapo+fedpara: 'mapo' and 'fedpara' both fill method.space; keep one of them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.experiments.parts import build
from thinwire.experiments.presets import Preset, preset
from thinwire.experiments.toml import Table

_CHAINED = ("method.up", "method.down")
_FIRST_WINS = ("method.client_opt",)


def named(expression: str) -> list[Preset]:
    """The presets of an expression, for example `mapo+int8`, in its order."""
    names = [name.strip() for name in expression.split("+")]
    if len(names) > 1 and not all(names):
        raise ConfigError(f"{expression!r} has a + with no method on one side; write for example mapo+int8")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"{expression!r} names {name!r} twice; once is enough")
    return [preset("methods", name) for name in names]


def join(methods: Sequence[Preset], task: str | None = None) -> Table:
    """One table from several presets.

    Args:
        methods: the presets.
        task: the task on which they are used.

    Raises:
        IncompatibleParts: two methods fill the same slot.
    """
    expression = "+".join(method.name for method in methods)
    out: Table = {}
    owners: dict[str, list[str]] = {}  # the methods that filled a slot
    for method in methods:
        for slot, value in _slots(method.on_task(task)):
            before = owners.setdefault(slot, [])
            if not before or _get(out, slot) == value:
                _put(out, slot, value)
            elif slot in _CHAINED:
                _put(out, slot, _chain(expression, slot, [*before, method.name], _get(out, slot), value))
            elif slot in _FIRST_WINS or _same_server_optimizer(slot, _get(out, slot), value):
                continue
            else:
                raise IncompatibleParts(
                    f"{expression}: {before[0]!r} and {method.name!r} both fill {slot}; keep one of them"
                )
            before.append(method.name)
    return out


def _same_server_optimizer(slot: str, first: Any, second: Any) -> bool:
    """Whether two methods have one kind of server optimizer, with other settings: those of the first are used."""
    return slot == "method.server_opt" and isinstance(first, dict) and first.get("kind") == second.get("kind")


def _slots(table: Table) -> list[tuple[str, Any]]:
    """Every value by its path, two levels deep: `rounds`, `method.space`, `local.batch`."""
    out = []
    for key, value in table.items():
        if isinstance(value, dict):
            out += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            out.append((key, value))
    return out


def _get(table: Table, path: str) -> Any:
    section, _, key = path.rpartition(".")
    return (table[section] if section else table)[key]


def _put(table: Table, path: str, value: Any) -> None:
    section, _, key = path.rpartition(".")
    (table.setdefault(section, {}) if section else table)[key] = value


def _chain(expression: str, slot: str, names: Sequence[str], first: Any, second: Any) -> Table:
    """Two codecs in sequence, or an error that names the order in which they can be chained."""

    def chained(*codecs: Any) -> Table:
        parts: list[Any] = []
        for codec in codecs:
            nested = isinstance(codec, dict) and codec.get("kind") == "chain"
            parts += codec["parts"] if nested else [codec]
        return {"kind": "chain", "parts": parts}

    def refusal(table: Table) -> ConfigError | None:
        try:
            build("codec", table, slot)
        except ConfigError as error:
            return error
        return None

    wanted = chained(first, second)
    if error := refusal(wanted):
        earlier, name = " and ".join(map(repr, names[:-1])), names[-1]
        others = [known for known in expression.split("+") if known not in (*names[:-1], name)]
        reason = f"do not chain: {error}"
        if not refusal(chained(second, first)):
            reason = f"do not chain in this order; write {'+'.join([*others, name, *names[:-1]])}"
        raise IncompatibleParts(f"{expression}: {earlier} and {name!r} both fill {slot} and {reason}") from error
    return wanted
