"""What a trainer of one's own returns, checked: names, shapes, types, finite values; one line says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError, Diverged
from thinwire.training.trainable_module import TrainableModule

INFO = ("loss", "state")  # what may be returned besides the model


class Returned(NamedTuple):
    """What a trainer returned."""

    coords: Tree
    buffers: Tree
    loss: float | None  # None: it said none
    state: Tree  # what stays at home until the client's next round


def read_returned(answer: Any, given: TrainableModule, start: Tree, buffers: Tree, label: str) -> Returned:
    """The coordinates, buffers, loss and state that a trainer returned.

    Args:
        answer: the model or its state dict, alone or in a pair with a dictionary of `loss` and `state`; None for the
            model that was given, trained in place.
        given: the model that it was given.
        start: the coordinates before.
        buffers: the buffers before.
        label: the name of the trainer, for errors.
    """
    info: Mapping[str, Any] = {}
    if isinstance(answer, tuple):
        if len(answer) != 2 or not isinstance(answer[1], Mapping) or (wrong := answer[1].keys() - {*INFO}):
            what = (
                f"the names {sorted(map(str, wrong))}"
                if len(answer) == 2 and isinstance(answer[1], Mapping)
                else (f"{len(answer)} values")
            )
            raise ConfigError(f"{label} returned {what}; return the model, or (model, {{'loss': ..., 'state': ...}})")
        answer, info = answer
    tensors = _tensors(given.module if answer is None else answer, label)
    coords = {
        name: _checked(tensors, given.names[name], block, label).to(block.device) for name, block in start.items()
    }
    after = {name: _checked(tensors, name, block, label).to(block.device) for name, block in buffers.items()}
    _check_fixed(tensors, given.fixed, label)
    return Returned(coords, after, _loss(info.get("loss"), label), _state(info.get("state"), label))


def _tensors(answer: Any, label: str) -> Mapping[str, Any]:
    """The parameters and buffers of what was returned, by name."""
    if isinstance(answer, nn.Module):
        named = (answer.named_parameters(remove_duplicate=False), answer.named_buffers(remove_duplicate=False))
        return {name: tensor for one in named for name, tensor in one}
    if isinstance(answer, Mapping):
        return answer
    raise ConfigError(
        f"{label} returned an object of type {type(answer).__name__}; return the model or its state_dict()"
    )


def _checked(tensors: Mapping[str, Any], name: str, like: Tensor, label: str) -> Tensor:
    """The tensor of a name, which has the shape and type of the one before."""
    found = tensors.get(name)
    if found is None:
        wrapped = f"module.{name}" in tensors
        instead = "return accelerator.unwrap_model(model)" if wrapped else "return the model that was given"
        raise ConfigError(f"{label} returned a model without {visible(name)!r}; {instead}, or its state_dict()")
    if not isinstance(found, Tensor) or found.layout != torch.strided:
        raise ConfigError(f"{label} returned {visible(name)!r} of type {type(found).__name__}; expected a dense tensor")
    if found.shape != like.shape:
        raise ConfigError(
            f"{label} returned {visible(name)!r} of shape {list(found.shape)}; expected {list(like.shape)}, as given"
        )
    if found.dtype != like.dtype:
        raise ConfigError(
            f"{label} returned {visible(name)!r} of type {found.dtype}; expected {like.dtype}, as given: compute in 16 "
            "bits under autocast, which keeps weights as they are"
        )
    if not torch.isfinite(found).all():
        raise Diverged(f"{label} returned {visible(name)!r} with a value that is not finite; try a smaller lr")
    return found.detach()


def _check_fixed(tensors: Mapping[str, Any], fixed: Tree, label: str) -> None:
    """Refuse changes of parameters that the method does not train: they would be lost without a word."""
    for name, before in fixed.items():
        now = tensors.get(name)
        if isinstance(now, Tensor) and not torch.equal(now.to(before.device), before):
            raise ConfigError(
                f"{label} changed {visible(name)!r}, which this method does not train and would be lost; train "
                "parameters with requires_grad=True only"
            )


def _loss(value: Any, label: str) -> float | None:
    """The loss that was returned, if any; one that is not finite ends the run as divergence."""
    if value is None:
        return None
    if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
        raise ConfigError(f"{label} returned a loss of type {type(value).__name__}; expected a number")
    if not math.isfinite(value):
        raise Diverged(f"{label} returned a loss of {float(value)}; try a smaller learning rate")
    return float(value)


def _state(value: Any, label: str) -> Tree:
    """The state that stays at home: tensors and numbers by name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label} returned a state of type {type(value).__name__}; expected tensors by name")
    out: Tree = {}
    for name, one in value.items():
        dense = isinstance(one, Tensor) and one.layout == torch.strided and not one.is_complex()
        if not isinstance(name, str) or not (dense or isinstance(one, int | float)):
            raise ConfigError(
                f"{label} returned a state with {visible(repr(name), 80)} of type {type(one).__name__}; expected "
                "tensors and numbers by name, as of tw.optimizer_tensors(optimizer)"
            )
        out[name] = torch.as_tensor(one).detach().cpu().clone()
    return out
