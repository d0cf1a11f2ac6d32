"""Matrices of a transformer as peft names them, for models whose weights are named differently.

    query-value    what peft adapts by default: the projections to queries and values, or the one that makes both
    all-linear     every matrix of a layer: not the embeddings, not the output layer
    q_proj         the last part of the name of a layer, as in a list of peft
    regex:...      a regular expression that matches the whole name of a layer, as a string of peft
    *q_proj.weight a selector of thinwire: a pattern of the whole name of a weight

>>> llama = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.v_proj.weight",
...     "layers.0.mlp.up_proj.weight", "lm_head.weight")
>>> targets(llama, ("query-value",)) == targets(llama, ("q_proj", "v_proj")) == targets(llama, ("regex:.*[qv]_proj",))
True
>>> targets(llama, ("all-linear", "!*mlp*"))
('layers.0.self_attn.q_proj.weight', 'layers.0.self_attn.v_proj.weight')

An adapter folder of peft as the start of a LoRA run: its factors, and modules that were fully trained.

adapter_config.json        rank, alpha, and the adapted modules
adapter_model.safetensors  base_model.model.LAYER.lora_A.weight, ... lora_B.weight, base_model.model.NAME
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.core.names import makes_query_or_value, select
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError, DataError

QUERY_VALUE = "query-value"
ALL_LINEAR = "all-linear"
REGEX = "regex:"
WRAPPER = "model."  # the name of a model of transformers inside of a model of thinwire

LINEAR = ("Linear", "Conv1D")  # the layers whose adapters peft loads
HEADS = ("classifier", "score")  # the names of classification heads in peft
_OUTSIDE = ("embed", "lm_head", "wte", "wpe", "classifier", "score", "shared")  # parts of names outside of layers


def targets(matrices: Sequence[str], selectors: Sequence[str]) -> tuple[str, ...]:
    """The matrices that keywords, names of layers and selectors choose, in their order."""
    patterns: list[str] = []
    for one in selectors:
        found = _named(matrices, one.removeprefix("!"))
        patterns += [one] if found is None else [("!" if one.startswith("!") else "") + name for name in found]
    return select(matrices, patterns, what="target_modules")


def saved(weights: Sequence[str], selectors: Sequence[str]) -> tuple[str, ...]:
    """The weights that are trained without an adapter, by names of modules, as in peft, or by selectors.

    >>> saved(("classifier.dense.weight", "classifier.dense.bias", "fc.weight"), ("classifier",))
    ('classifier.dense.weight', 'classifier.dense.bias')
    """
    patterns: list[str] = []
    for one in selectors:
        inside = [name for name in weights if f".{one}." in f".{name}"] if _is_name(weights, one) else []
        patterns += inside or [one]
    return select(weights, patterns, what="modules_to_save")


def by_keyword(matrices: Sequence[str], selectors: Sequence[str]) -> frozenset[str]:
    """The matrices that a keyword or the name of a layer chooses: they always have an adapter."""
    return frozenset(name for one in selectors if not one.startswith("!") for name in _named(matrices, one) or ())


def for_layers(space: Any, module: nn.Module) -> Any:
    """A space of adapters completed by the layers of a model: which of them store W as inputs x outputs, as in GPT-2.

    On a model of transformers, `*` stands for what peft adapts: query and value, or the linear layers where none has
    such a name. The head of a classifier is then trained directly; embeddings and convolutions have no adapter.

    >>> from thinwire.spaces import LoRA
    >>> for_layers(LoRA(), nn.Linear(2, 3)) == LoRA()
    True
    """
    layers = {f"{path}.weight": type(layer).__name__ for path, layer in module.named_modules()}
    stored = (name for name, kind in layers.items() if kind == "Conv1D")
    space = replace(space, fan_in_fan_out=tuple(dict.fromkeys((*space.fan_in_fan_out, *stored))))
    kinds = (kind.__name__ for layer in module.modules() for kind in type(layer).__mro__)
    if space.target_modules != ("*",) or "PreTrainedModel" not in kinds:
        return space
    known = [name for name, weight in module.named_parameters() if weight.requires_grad]
    chosen = [name for name in known if layers.get(name) in LINEAR and not any(part in name for part in _OUTSIDE)]
    if any(makes_query_or_value(name.removesuffix(".weight")) for name in chosen):
        chosen = [QUERY_VALUE]
    heads = [head for head in HEADS if any(f".{head}." in f".{name}" for name in known)]
    saved = tuple(dict.fromkeys((*space.modules_to_save, *heads)))
    return replace(space, target_modules=tuple(chosen), modules_to_save=saved) if chosen else space


def layer_names(weight: str) -> tuple[str, str]:
    """The name of the layer of a weight, with and without the wrapper of a model of transformers.

    >>> layer_names("model.model.layers.0.self_attn.q_proj.weight")
    ('model.model.layers.0.self_attn.q_proj', 'model.layers.0.self_attn.q_proj')
    """
    layer = weight.removesuffix(".weight")
    return layer, layer.removeprefix(WRAPPER)


def _named(matrices: Sequence[str], selector: str) -> list[str] | None:
    """The matrices that a keyword, a regular expression or the name of a layer chooses; None for other selectors."""
    if selector == ALL_LINEAR:
        found = [name for name in matrices if not any(part in name for part in _OUTSIDE)]
    elif selector == QUERY_VALUE:
        found = [name for name in matrices if makes_query_or_value(name.removesuffix(".weight"))]
    elif selector.startswith(REGEX):
        try:
            matches = re.compile(selector.removeprefix(REGEX)).fullmatch
        except re.error as fault:
            raise ConfigError(f"target_modules {selector!r} is no regular expression ({fault})") from None
        found = [name for name in matrices if any(map(matches, layer_names(name)))]
    elif _is_name(matrices, selector):
        found = [name for name in matrices if f".{layer_names(name)[0]}".endswith(f".{selector}")]
    else:
        return None
    if not found:
        shown = ", ".join(matrices[:6]) + (", ..." if len(matrices) > 6 else "")
        raise ConfigError(f"target_modules {selector!r} matches no block; write selectors; the blocks are {shown}")
    return found


def _is_name(weights: Sequence[str], selector: str) -> bool:
    """Whether a selector is the name of a module: no pattern, and not the name of a weight."""
    return not any(mark in selector for mark in "*?[!") and selector not in weights


PREFIX = "base_model.model."
NAMES = {"a": "lora_A.weight", "b": "lora_B.weight"}
FILES = ("adapter_config.json", "adapter_model.safetensors")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    try:
        found = json.loads((folder / FILES[0]).read_bytes())
    except (OSError, ValueError, RecursionError):
        raise DataError(f"{folder}: no adapter of peft there; expected the files {' and '.join(FILES)}") from None
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        raise DataError(f"{folder}: {FILES[0]} is not that of a LoRA adapter (peft_type LORA)")
    return found


def first_coordinates(
    adapter: str, rank: int, scale: float, sides: Mapping[str, tuple[int, int]], dense: Collection[str]
) -> Tree:
    """The coordinates of an adapter by name: `weight/a`, `weight/b`, dense weights.

    Args:
        adapter: the folder of the adapter.
        rank: of the LoRA; it must be that of the adapter.
        scale: of the LoRA, likewise.
        sides: outputs and inputs of each adapted matrix.
        dense: weights that are trained without an adapter.
    """
    folder = Path(adapter)
    config, left = read_config(folder), _tensors(folder)
    if config.get("use_dora"):
        raise ConfigError(f"{folder} is an adapter of DoRA, and only adapters of LoRA can be trained")
    _check_scale(config, adapter, scale)
    out: Tree = {}
    for name, (outputs, inputs) in sides.items():
        for side in "ab":
            keys = [f"{PREFIX}{layer}.{NAMES[side]}" for layer in layer_names(name)]
            key = next((one for one in keys if one in left), None)
            if key is None:
                raise ConfigError(f"{folder} has no adapter of {name!r}; write the target_modules of the adapter")
            block, own = left.pop(key), min(rank, outputs, inputs)
            wanted = {"a": (own, inputs), "b": (outputs, own)}[side]
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


def _check_scale(config: Mapping[str, Any], adapter: str, wanted: float) -> None:
    """Raise an error if the adapter was trained with another factor."""
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{adapter}: {FILES[0]} states no numbers r and lora_alpha") from None
    scale = alpha / (math.sqrt(max(rank, 1)) if config.get("use_rslora") else max(rank, 1))
    if not math.isclose(scale, wanted, rel_tol=1e-6):
        scaling = "rslora" if config.get("use_rslora") else "standard"
        raise ConfigError(
            f"{adapter} has the factor {scale:g}, this LoRA {wanted:g}; write rank = {rank}, "
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
