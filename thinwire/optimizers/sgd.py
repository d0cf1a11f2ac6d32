"""Stochastic gradient descent, for clients and server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from thinwire.core.registry import register, short_repr
from thinwire.core.state import State
from thinwire.core.text import check_numbers
from thinwire.core.tree import Tree, scale, tmap
from thinwire.errors import ConfigError
from thinwire.optimizers.base import Optimizer
from thinwire.optimizers.clip import check_clip_norm, clip_by_global_norm

DecayOn = Literal["all", "kernels"]


@register("optimizer", "sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, optionally with momentum and weight decay (equal to `torch.optim.SGD`).

        v <- momentum v + g + weight_decay w
        w <- w - lr v                          (nesterov: w <- w - lr (g + momentum v))

    On the server the gradient is the negated mean update, so `SGD(1.0)` is federated averaging.

    Args:
        lr: learning rate.
        momentum: factor on the previous velocity; 0 means no momentum and no state.
        nesterov: use Nesterov momentum.
        weight_decay: factor of the L2 penalty on the coordinates.
        weight_decay_on: `all` coordinates, or `kernels` only: blocks with two axes or more, so neither biases nor the
            scale and shift of normalizations.
        clip_norm: the largest L2 norm of the gradient g over all values that are trained; a longer one is scaled down
            (`clip_by_global_norm`). In the unit of the gradient; at the server, of the mean update.

    >>> import torch
    >>> opt, w = SGD(0.5, momentum=0.9), {"w": torch.zeros(1)}
    >>> change, state = opt.update({"w": torch.ones(1)}, opt.init(w), w)
    >>> change["w"].tolist(), state["momentum"]["w"].tolist()
    ([-0.5], [1.0])
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float = field(default=math.inf, metadata={"rare": True})
    weight_decay_on: DecayOn = field(default="all", metadata={"rare": True})
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.lr > 0:
            raise ConfigError(f"lr must be above 0, not {self.lr}; write for example lr = 0.1")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be from 0 up to, not including, 1, not {self.momentum}")
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay must be 0 or more, not {self.weight_decay}")
        if self.weight_decay_on not in get_args(DecayOn):
            raise ConfigError(
                f"weight_decay_on must be one of {', '.join(get_args(DecayOn))}, not {self.weight_decay_on!r}"
            )
        check_clip_norm(self.clip_norm)
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs momentum above 0; write for example momentum = 0.9")

    def init(self, coords: Tree) -> State:
        """Return a velocity of zero for each block, or no state without momentum."""
        if not self.momentum:
            return {}
        return {"momentum": {name: block.new_zeros(block.shape) for name, block in coords.items()}}

    @property
    def reads_coords(self) -> bool:
        """True with weight decay."""
        return self.weight_decay > 0

    def server_step(self, update: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step of the server; plain SGD scales the mean update once, because two negations are exact."""
        if self.momentum or self.weight_decay or self.clip_norm != math.inf:
            return super().server_step(update, state, coords)
        return update if self.lr == 1.0 else scale(update, self.lr), state

    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step."""
        grads = clip_by_global_norm(grads, self.clip_norm)
        if self.weight_decay:
            least = 2 if self.weight_decay_on == "kernels" else 0
            grads = tmap(lambda g, w: g + self.weight_decay * w if w.dim() >= least else g, grads, coords)
        if not self.momentum:
            return scale(grads, -self.lr), state
        velocity = {name: self.momentum * state["momentum"][name] + g for name, g in grads.items()}
        direction = tmap(lambda g, v: g + self.momentum * v, grads, velocity) if self.nesterov else velocity
        return scale(direction, -self.lr), {"momentum": velocity}
