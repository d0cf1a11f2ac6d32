"""Export of a run as a folder of transformers: the base model with the trained adapter merged into it.

    config.json, model.safetensors, and the files of the tokenizer if the checkpoint has one

`AutoModelForCausalLM.from_pretrained(folder)` (or the class of the task) loads it without peft. A base that was
trained in 4 or 8 bits is read again from its checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.experiments.peft_export import inside, of_run
from thinwire.models.causal_lm import library
from thinwire.models.pretrained import quiet


def merged_of_run(run: Path, folder: Path, data_dir: Path | None = None) -> list[Path]:
    """Write the model of the newest checkpoint of a run directory; returns the files."""
    simulation, public, method, basis = of_run(run, data_dir)
    return save_merged(
        folder, simulation.job.task.model, method.space.evaluation_weights(public.base, basis, public.coords)
    )


def save_merged(folder: Path, model: torch.nn.Module, weights: Tree) -> list[Path]:
    """Write a model of transformers with these weights; returns the files.

    Args:
        folder: must not exist, or be empty.
        model: the module that was trained; it is not changed.
        weights: its final weights.
    """
    inner, prefix = inside(model)
    if not hasattr(inner, "save_pretrained") or not hasattr(inner, "config"):
        raise ConfigError(
            f"{type(inner).__name__} is no model of transformers; its weights are in model.safetensors of the run"
        )
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; name a new folder")
    transformers = library("the export of a model")
    origin = str(getattr(inner.config, "_name_or_path", "") or "")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with quiet(transformers), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
        whole = type(inner).from_pretrained(origin, local_files_only=True) if _few_bits(inner) else _copy(inner)
        own = dict(whole.named_parameters())
        with torch.no_grad():
            for name, block in weights.items():
                own[name.removeprefix(prefix)].copy_(block)
        whole.save_pretrained(draft)
        _save_tokenizer(transformers, origin, draft)
        if folder.exists():
            folder.rmdir()
        os.replace(draft, folder)
        os.mkdir(draft)  # which is removed
    folder.chmod(0o755)
    return sorted(folder.iterdir())


def _few_bits(model: Any) -> bool:
    return any(hasattr(part, "constant_bytes") for part in model.modules())


def _copy(model: Any) -> Any:
    """A model of the same configuration and weights, without hooks."""
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    return made.to(next(model.parameters()).dtype)


def _save_tokenizer(transformers: Any, origin: str, folder: str) -> None:
    """Write the tokenizer of the checkpoint, if it has one."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(origin, local_files_only=True)
    except Exception:  # the type varies: image models have none
        return
    tokenizer.save_pretrained(folder)
