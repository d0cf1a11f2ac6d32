"""A LoRA space from a configuration of peft: a `LoraConfig`, its dictionary, or the folder of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.spaces.adapters import QUERY_VALUE, REGEX, read_config
from thinwire.spaces.lora import LoRA

# settings of peft that change what is trained, and the value that thinwire trains as peft does
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "layers_to_transform": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "exclude_modules": None,
    "lora_bias": False,
    "use_dora": False,
}


def lora_from_peft(config: Any) -> LoRA:
    """The LoRA space of a configuration of peft.

    A folder also gives the first values of the adapters, so that training goes on from them.

    Args:
        config: a `peft.LoraConfig`, its dictionary, or the folder of an adapter.

    >>> space = lora_from_peft({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "lora_dropout": 0.05})
    >>> space.rank, space.alpha, space.target_modules, space.lora_dropout
    (8, 16.0, ('q_proj',), 0.05)
    >>> lora_from_peft({"r": 8, "target_modules": ".*attn.*", "use_rslora": True}).target_modules
    ('regex:.*attn.*',)
    """
    folder = Path(config) if isinstance(config, str | Path) else None
    table = read_config(folder) if folder is not None else _table(config)
    for name, plain in _PLAIN.items():
        if table.get(name, plain) not in (plain, None, [], {}):
            raise ConfigError(f"{name} = {table[name]!r} of peft is not supported; expected {plain!r}")
    if (table.get("rank_pattern") or table.get("alpha_pattern")) and not _lower_only(table, folder):
        raise ConfigError("rank_pattern and alpha_pattern of peft are not supported; write one r and one lora_alpha")
    return LoRA(
        rank=int(table.get("r", 8)),
        alpha=float(table.get("lora_alpha", 8)),
        target_modules=_targets(table.get("target_modules")),
        modules_to_save=tuple(table.get("modules_to_save") or ()),
        scaling="rslora" if table.get("use_rslora") else "standard",
        lora_dropout=float(table.get("lora_dropout") or 0.0),
        adapter=str(folder or ""),
    )


def _targets(given: Any) -> tuple[str, ...]:
    """Selectors of thinwire: peft's default, a keyword, a regular expression, or names of layers."""
    if given is None:
        return (QUERY_VALUE,)
    if isinstance(given, str):
        return (given,) if given == "all-linear" else (REGEX + given,)
    names = sorted(given)
    return tuple(names) if names else (QUERY_VALUE,)


def _lower_only(table: Mapping[str, Any], folder: Path | None) -> bool:
    """Whether patterns are those that thinwire writes: full names of layers that are smaller than the rank."""
    names = set(table.get("rank_pattern") or ()) | set(table.get("alpha_pattern") or ())
    return folder is not None and names <= set(table.get("target_modules") or ())


def _table(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not hasattr(config, "to_dict") or not hasattr(config, "lora_alpha"):
        raise ConfigError(f"expected a LoraConfig of peft, its dictionary or a folder, not {type(config).__name__}")
    return config.to_dict()
