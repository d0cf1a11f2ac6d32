"""Old names of settings and parts, and their new names, for the error message about an old name.

>>> str(unknown_key("method", "link", ["download", "upload"]))
"unknown key 'link' in method: it was renamed; write method.download"
>>> str(unknown_key("method", "lnk", ["download", "link"]))
"unknown key in method 'lnk': did you mean 'link'? Known: download, link"
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thinwire.errors import ConfigError, UnknownName

# A key is only replaced where the new name is one of the known keys, so a part may have an argument `layers`.
KEYS = {
    # [method]
    "link": "download",
    "say": "upload",
    "weigh": "client_weight",
    "mean": "aggregator",
    "rate": "lr_schedule",
    "server_rate": "server_lr_schedule",
    "then": "next_stage",
    "secure": "secure_aggregation",
    "settle": "merge_codec",
    "guard": "drift_check",
    # options of spaces
    "fresh_every": "redraw_every",
    "layers": "target_modules",
    "transposed": "fan_in_fan_out",
    # other sections
    "until": "target_accuracy",
    "keep": "participating_clients",
    "hold_out": "validation_fraction",
    "split": "partition",
    "vectorise": "backend",
}

# (kind of part, old name) -> new name
PARTS = {
    ("codec", "quantise"): "quantize",
    ("schedule", "every"): "all-blocks",
    ("mask", "pick"): "random",
    ("mask", "select"): "topk",
    ("penalty", "norms"): "l1l2",
    ("lr_schedule", "decay"): "exponential",
    ("lr_schedule", "steps"): "multistep",
}

# (setting, old value) -> new value
VALUES = {
    ("method.download", "ledger"): "incremental",
    ("method.download", "snapshot"): "full",
    ("method.upload", "value"): "weights",
}


def unknown_key(where: str, key: str, known: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist: its new name, or the most similar known name.

    Args:
        where: the table that holds the key, such as `method`; "" for the top of a file.
        key: the key.
        known: the keys that the table may have.
    """
    names = list(known)
    new = KEYS.get(key)
    if new in names:
        at = f" in {where}" if where else ""
        return ConfigError(f"unknown key {key!r}{at}: it was renamed; write {where + '.' if where else ''}{new}")
    return UnknownName(f"key in {where}" if where else "key", key, names)


def check_part(kind: str, name: str, where: str, known: Iterable[str]) -> None:
    """Refuse the old name of a part with its new one; names of `known` parts pass."""
    new = PARTS.get((kind, name))
    if new and name not in set(known):
        raise ConfigError(f"unknown {kind} {name!r}: it was renamed; write {where} = {new!r}")


def check_value(where: str, value: Any) -> None:
    """Refuse the old value of a setting with its new one."""
    if isinstance(value, str) and (new := VALUES.get((where, value))):
        raise ConfigError(f"{where} = {value!r} was renamed; write {where} = {new!r}")
