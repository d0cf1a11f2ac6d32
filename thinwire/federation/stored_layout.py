"""Matrices that a model stores as inputs x outputs, so that adapters of them have the factors that peft expects.

GPT-2 and its relatives have layers of the type `Conv1D` of transformers, which store W transposed.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from thinwire.protocol.method import Method
from thinwire.spaces.base import Space
from thinwire.spaces.lora import LoRA


def on_model(method: Method, module: nn.Module) -> Method:
    """The method with `fan_in_fan_out` of its LoRA completed by the layers of a model; without such layers unchanged.

    >>> on_model(Method(LoRA()), nn.Linear(2, 3)).space.fan_in_fan_out
    ()
    """
    stored = tuple(f"{path}.weight" for path, layer in module.named_modules() if type(layer).__name__ == "Conv1D")
    if not stored:
        return method
    stage = method.next_stage
    if stage is not None and stage.space is not None:
        stage = replace(stage, space=_completed(stage.space, stored))
    return replace(method, space=_completed(method.space, stored), next_stage=stage)


def _completed(space: Space, stored: tuple[str, ...]) -> Space:
    if not isinstance(space, LoRA):
        return space
    return replace(space, fan_in_fan_out=tuple(dict.fromkeys((*space.fan_in_fan_out, *stored))))
