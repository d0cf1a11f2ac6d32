"""The state of a torch optimizer as named tensors, which a client keeps at home between rounds.

>>> weight = torch.nn.Parameter(torch.ones(2))
>>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
>>> weight.grad = torch.ones(2)
>>> optimizer.step()
>>> kept = optimizer_tensors(optimizer)
>>> kept
{'0/momentum_buffer': tensor([1., 1.])}
>>> later = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
>>> load_optimizer_tensors(later, kept)
>>> later.state[weight]["momentum_buffer"]
tensor([1., 1.])
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.errors import ConfigError


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer by the number of the parameter and the name of the value; hyperparameters not."""
    out: dict[str, Tensor] = {}
    for i, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, int | float | Tensor):
                out[f"{i}/{name}"] = torch.as_tensor(value).detach().clone()
            elif value is not None:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {name!r} of type {type(value).__name__}; only tensors and "
                    "numbers can be kept between rounds"
                )
    return out


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor] | None) -> None:
    """Give an optimizer of the same parameters a state of `optimizer_tensors`; None, in a first round, changes nothing.

    Args:
        optimizer: the optimizer, with hyperparameters of its own.
        tensors: the state.
    """
    if not tensors:
        return
    table = optimizer.state_dict()
    count = sum(len(group["params"]) for group in table["param_groups"])
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition("/")
        if not number.isdecimal() or int(number) >= count or not name:
            raise ConfigError(f"{key!r} is no state of an optimizer with {count} parameters; use the one that made it")
        state.setdefault(int(number), {})[name] = value.clone()
    optimizer.load_state_dict({**table, "state": state})
