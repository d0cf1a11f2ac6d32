"""Steps whose size each number sets for itself: Adam and its relatives, at either end.

On the server, where the gradient is the negated mean change, they are FedAdam, FedYogi and FedAdagrad (Reddi et al.,
ICLR 2021), which leave out the bias correction and take a large `eps`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class _Adaptive:
    """What all of them share: a running mean m of gradients and a running size v of their squares, by block."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"lr must be above 0, not {self.lr}; write for example lr = 0.001")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"{name} must be from 0 up to, not including, 1, not {value}")
        if not self.eps > 0:
            raise ConfigError(f"eps must be above 0, not {self.eps}; write for example eps = 1e-8")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay must be 0 or more, not {self.weight_decay}")

    def init(self, coords: Tree) -> Tree:
        """Zeros, and no steps yet."""
        first = next(iter(coords.values()), torch.zeros(()))
        # in float64: 1 - 0.999**t of float32 numbers is wrong in the fourth digit
        state: Tree = {"count": torch.zeros((), dtype=torch.float64, device=first.device)}
        for name, block in coords.items():
            state[f"m/{name}"] = block.new_zeros(block.shape)
            state[f"v/{name}"] = block.new_zeros(block.shape)
        return state

    def update(self, grads: Tree, state: Tree, coords: Tree) -> tuple[Tree, Tree]:
        """One step."""
        count = state["count"] + 1
        change: Tree = {}
        after: Tree = {"count": count}
        for name, g in grads.items():
            if self.weight_decay and not self._decoupled:
                g = g + self.weight_decay * coords[name]
            m = self.beta1 * state[f"m/{name}"] + (1 - self.beta1) * g
            v = self._size(state[f"v/{name}"], g.square())
            after[f"m/{name}"], after[f"v/{name}"] = m, v
            if self.bias_correction:
                bias1, bias2 = ((1 - beta**count).to(g.dtype) for beta in (self.beta1, self.beta2))
                step = m / bias1 / (v.sqrt() / bias2.sqrt() + self.eps)
            else:
                step = m / (v.sqrt() + self.eps)
            change[name] = step * -self.lr
            if self.weight_decay and self._decoupled:
                change[name] = change[name] - self.lr * self.weight_decay * coords[name]
        return change, after

    @property
    def _decoupled(self) -> bool:
        return False

    def _size(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@register("optimizer", "adam", paper="Kingma and Ba, ICLR 2015; at the server Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class Adam(_Adaptive):
    """Step by the mean gradient over its own size (the same numbers as `torch.optim.Adam`).

        m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2,    w <- w - lr m / (sqrt(v) + eps)

    with m and v divided by 1 - beta^t if `bias_correction`.

    >>> opt = Adam(lr=0.5)
    >>> change, _ = opt.update({"w": torch.tensor([3.0, -0.01])}, opt.init({"w": torch.zeros(2)}), {})
    >>> [round(x, 4) for x in change["w"].tolist()]
    [-0.5, 0.5]
    """


@register("optimizer", "adamw", paper="Loshchilov and Hutter, ICLR 2019")
@dataclass(frozen=True)
class AdamW(_Adaptive):
    """Adam with weight decay beside the step instead of in the gradient (as `torch.optim.AdamW`).

    w <- w - lr (m / (sqrt(v) + eps) + weight_decay w)
    """

    weight_decay: float = 0.01

    @property
    def _decoupled(self) -> bool:
        return True


@register("optimizer", "yogi", paper="Zaheer et al., NeurIPS 2018; Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class Yogi(_Adaptive):
    """Adam whose size v forgets slowly: it moves by g^2 at most, whatever it was before.

    v <- v - (1 - beta2) sign(v - g^2) g^2
    """

    beta2: float = 0.99
    eps: float = 1e-3
    bias_correction: bool = False

    def _size(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * torch.sign(v - square) * square


@register("optimizer", "adagrad", paper="Duchi et al., JMLR 2011; Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """Steps that grow smaller where gradients were large: v is the sum of all squares, and forgets nothing.

    v <- v + g^2,    w <- w - lr m / (sqrt(v) + eps)        (beta1 = 0: m = g, as `torch.optim.Adagrad`)
    """

    beta1: float = 0.0
    eps: float = 1e-3
    bias_correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction:
            raise ConfigError("adagrad sums squares, so there is no bias to correct; write bias_correction = false")

    def _size(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
