"""Stochastic gradient descent, at either end."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.registry import register
from thinwire.core.tree import Tree, scale, tmap
from thinwire.errors import ConfigError


@register("optimizer", "sgd")
@dataclass(frozen=True)
class SGD:
    """Step against the gradient, optionally with momentum (the same numbers as `torch.optim.SGD`).

        v <- momentum v + g + weight_decay w
        w <- w - lr v                          (nesterov: w <- w - lr (g + momentum v))

    On the server, where the gradient is the negated mean change, `SGD(1.0)` is plain averaging.

    >>> import torch
    >>> change, _ = SGD(0.5).update({"w": torch.ones(1)}, {}, {"w": torch.zeros(1)})
    >>> change["w"].tolist()
    [-0.5]
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"lr must be above 0, not {self.lr}; write for example lr = 0.1")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be from 0 up to, not including, 1, not {self.momentum}")
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay must be 0 or more, not {self.weight_decay}")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs momentum above 0; write for example momentum = 0.9")

    def init(self, coords: Tree) -> Tree:
        """A velocity of zero for each block, or nothing without momentum."""
        if not self.momentum:
            return {}
        return {f"momentum/{name}": block.new_zeros(block.shape) for name, block in coords.items()}

    def update(self, grads: Tree, state: Tree, coords: Tree) -> tuple[Tree, Tree]:
        """One step."""
        if self.weight_decay:
            grads = tmap(lambda g, w: g + self.weight_decay * w, grads, coords)
        if not self.momentum:
            return scale(grads, -self.lr), state
        speed = {name: self.momentum * state[f"momentum/{name}"] + g for name, g in grads.items()}
        way = tmap(lambda g, v: g + self.momentum * v, grads, speed) if self.nesterov else speed
        return scale(way, -self.lr), {f"momentum/{name}": v for name, v in speed.items()}
