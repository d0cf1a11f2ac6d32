"""An adapter folder of peft as the start of a LoRA run: its factors, and modules that were fully trained.

adapter_config.json        rank, alpha, and the adapted modules
adapter_model.safetensors  base_model.model.LAYER.lora_A.weight, ... lora_B.weight, base_model.model.NAME; of DoRA,
                           ... lora_magnitude_vector
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from thinwire.core.tree import Tree
from thinwire.errors import ConfigError, DataError
from thinwire.spaces.adapter_targets import WRAPPER, layer_names

PREFIX = "base_model.model."
NAMES = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector"}
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Adapted(Protocol):
    """The settings of a LoRA that an adapter must agree with."""

    @property
    def adapter(self) -> str:
        """The folder of the adapter."""
        ...

    @property
    def has_lengths(self) -> bool:
        """Whether it is DoRA."""
        ...

    @property
    def rank(self) -> int:
        """The rank of all adapters."""
        ...

    @property
    def scale(self) -> float:
        """The factor of all adapters."""
        ...


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    try:
        found = json.loads((folder / FILES[0]).read_bytes())
    except (OSError, ValueError, RecursionError):
        raise DataError(f"{folder}: no adapter of peft there; expected the files {' and '.join(FILES)}") from None
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        raise DataError(f"{folder}: {FILES[0]} is not that of a LoRA adapter (peft_type LORA)")
    return found


def first_coordinates(space: Adapted, sides: Mapping[str, tuple[int, int]], dense: Collection[str]) -> Tree:
    """The coordinates of an adapter by name: `weight/a`, `weight/b`, lengths `weight/m` of DoRA, dense weights.

    Args:
        space: the LoRA; its scale must be that of the adapter.
        sides: outputs and inputs of each adapted matrix.
        dense: weights that are trained without an adapter.
    """
    folder = Path(space.adapter)
    config, left = read_config(folder), _tensors(folder)
    if bool(config.get("use_dora")) != space.has_lengths:
        kinds = ("LoRA", "DoRA") if space.has_lengths else ("DoRA", "LoRA")
        raise ConfigError(f"{folder} is an adapter of {kinds[0]}, the space is {kinds[1]}; write the other kind")
    _check_scale(config, space)
    out: Tree = {}
    for name, (outputs, inputs) in sides.items():
        for side in "abm" if space.has_lengths else "ab":
            keys = [f"{PREFIX}{layer}.{NAMES[side]}" for layer in layer_names(name)]
            key = next((one for one in keys if one in left), None)
            if key is None:
                raise ConfigError(f"{folder} has no adapter of {name!r}; write the target_modules of the adapter")
            block, rank = left.pop(key), min(space.rank, outputs, inputs)
            wanted: tuple[int, ...] = {"a": (rank, inputs), "b": (outputs, rank), "m": (outputs,)}[side]
            if tuple(block.shape) != wanted:
                raise ConfigError(
                    f"{folder}: {key} has shape {tuple(block.shape)}, expected {wanted}; write rank = {config.get('r')}"
                )
            out[f"{name}/{side}"] = block.float()
    for name in dense:
        keys = [PREFIX + one for one in (name, name.removeprefix(WRAPPER))]
        if key := next((one for one in keys if one in left), None):
            out[name] = left.pop(key)
    if left:
        more = sorted(left)[0].removeprefix(PREFIX)
        raise ConfigError(
            f"{folder} also has {more!r}, which is not trained here; add it to target_modules or modules_to_save"
        )
    return out


def _check_scale(config: Mapping[str, Any], space: Adapted) -> None:
    """Raise an error if the adapter was trained with another factor."""
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{space.adapter}: {FILES[0]} states no numbers r and lora_alpha") from None
    scale = alpha / (math.sqrt(max(rank, 1)) if config.get("use_rslora") else max(rank, 1))
    if not math.isclose(scale, space.scale, rel_tol=1e-6):
        scaling = "rslora" if config.get("use_rslora") else "standard"
        raise ConfigError(
            f"{space.adapter} has the factor {scale:g}, this LoRA {space.scale:g}; write rank = {rank}, "
            f'alpha = {alpha:g}, scaling = "{scaling}"'
        )


def _tensors(folder: Path) -> Tree:
    """The tensors of the adapter, all finite."""
    from safetensors.torch import load_file

    try:
        found: Tree = load_file(folder / FILES[1])
    except Exception as fault:  # the type varies: a missing, cut or damaged file
        reason = " ".join(str(fault).split())[:160]
        raise DataError(f"{folder / FILES[1]}: safetensors cannot read it ({reason})") from None
    for name, block in found.items():
        if not block.is_floating_point() or not bool(torch.isfinite(block).all()):
            raise DataError(f"{folder / FILES[1]}: {name} has values that are not finite numbers")
    return found
