"""Export of a LoRA run as an adapter folder in the format of peft: `peft.PeftModel.from_pretrained` loads it.

    adapter_config.json        rank, alpha, and the adapted modules
    adapter_model.safetensors  A and B of each of them, and the modules that were fully trained, such as the head

peft is not needed to write them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.models import CausalLM, Pretrained
from thinwire.runs.checkpoint import tensor_bytes
from thinwire.runs.files import write_all
from thinwire.spaces.adapters import HEADS, LINEAR, NAMES
from thinwire.spaces.base import Space
from thinwire.spaces.lora import LoRA

# what the name of a model's class ends in -> task_type of peft, which has none for images
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


def save_adapter(
    folder: Path | str, model: nn.Module, space: Space, basis: Tree, coords: Tree, weights: Tree
) -> list[Path]:
    """Write an adapter folder; returns the files.

    Args:
        folder: the folder to write; created if it does not exist.
        model: the module that was trained.
        space: its space, one with `exports_adapter`.
        basis: the tensors that the space drew from the seed.
        coords: the trained coordinates.
        weights: the final weights.
    """
    if not space.exports_adapter:
        raise ConfigError(f"an adapter needs the space 'lora', not {type(space).__name__}; use run.model()")
    lora, coords = space.exported(basis, coords)
    if lora.redraw_every:
        raise ConfigError(
            "redraw_every merges adapters into the model, so there is no adapter to export; use run.model()"
        )
    inner: Any = model
    prefix = ""
    if isinstance(model, CausalLM | Pretrained):  # a model of transformers is inside
        inner, prefix = model.model, "model."
    modules, parts = dict(inner.named_modules()), lora.parts({}, basis, coords)
    tensors: Tree = {}
    targets, ranks, fan_in_fan_out = [], dict[str, int](), False
    for name in (key.removesuffix("/b") for key in coords if key.endswith("/b")):
        path = name.removeprefix(prefix).removesuffix(".weight")
        kind = type(modules.get(path)).__name__
        if kind not in LINEAR:
            raise ConfigError(
                f"{name!r} belongs to a {kind}; adapter folders are written for linear layers only: "
                "leave it out of target_modules, or use run.model()"
            )
        targets.append(path)
        ranks[path] = coords[f"{name}/b"].shape[1]
        fan_in_fan_out |= kind == "Conv1D"
        for side in "ab":
            tensors[f"base_model.model.{path}.{NAMES[side]}"] = parts[f"{name}/{side}"]
    modules_to_save = _modules_to_save(inner, {name.removeprefix(prefix) for name in coords if "/" not in name})
    for path in modules_to_save:
        for name, block in modules[path].named_parameters():
            tensors[f"base_model.model.{path}.{name}"] = weights.get(f"{prefix}{path}.{name}", block)
    record = {
        **_config(inner, lora, ranks),
        "target_modules": targets,
        "modules_to_save": modules_to_save or None,
        "fan_in_fan_out": fan_in_fan_out,
        "bias": "none",
        "inference_mode": True,
    }
    text = (json.dumps(record, indent=1) + "\n").encode()
    return write_all(Path(folder), {"adapter_config.json": text, "adapter_model.safetensors": tensor_bytes(tensors)})


def no_adapter_of_average() -> ConfigError:
    """The error for a run whose result is an average of weights: a mean of products A B is no product of that rank."""
    return ConfigError(
        "evaluate = 'average' averages weights, and the average has no adapter of this rank; use run.model() or "
        "model.safetensors, or write evaluate = 'server'"
    )


def _config(model: nn.Module, space: LoRA, ranks: dict[str, int]) -> dict[str, Any]:
    """The first keys of `adapter_config.json`: the task, the base model, rank and alpha.

    A matrix that is smaller than the rank has its own rank, and an alpha with which peft computes the same scale.
    """
    name, lower = type(model).__name__, {path: rank for path, rank in ranks.items() if rank != space.rank}
    rslora = space.scaling == "rslora"
    return {
        "peft_type": "LORA",
        "task_type": next((task for end, task in _TASKS.items() if name.endswith(end)), None),
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        "r": space.rank,
        "lora_alpha": int(space.alpha) if float(space.alpha).is_integer() else space.alpha,
        "lora_dropout": space.lora_dropout,
        "use_rslora": rslora,
        "rank_pattern": lower,
        "alpha_pattern": {path: space.scale * (math.sqrt(rank) if rslora else rank) for path, rank in lower.items()},
    }


def _modules_to_save(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The largest modules all of whose weights were fully trained, and the head, which a base model does not have."""
    trained, chosen = set(names), list[str]()
    for path, module in model.named_modules():
        if not path or any(path.startswith(f"{taken}.") for taken in chosen):
            continue
        own = {f"{path}.{name}" for name, _ in module.named_parameters()}
        if own and (own <= trained or path in HEADS):
            chosen.append(path)
    covered = {name for name in trained for path in chosen if name.startswith(f"{path}.")}
    if left := sorted(trained - covered):
        raise ConfigError(
            f"{left[0]!r} was trained without the rest of its module, which peft cannot load; use run.model()"
        )
    return chosen
