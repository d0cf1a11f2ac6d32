"""Weights as the elementwise product of two low-rank weights: few parameters, full rank (FedPara).

Paper: Hyeon-Woo, Ye-Bin and Oh, FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning,
ICLR 2022 (propositions 1 and 3; pFedPara).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.factor_init import (
    Start,
    by_factor,
    check_start,
    draw,
    draw_exact,
    factor_stds,
    initial_std,
    matrix_factor_std,
    std_before_tanh,
    tucker_factor_std,
)
from thinwire.spaces.factors import (
    check_fraction,
    check_rank,
    choose_ranks,
    is_matrix,
    out_in_kernel,
    select_weights,
    tucker,
)

Activation = Literal["none", "tanh"]


def fedpara_size(shape: Sequence[int], rank: int) -> int:
    """Return the number of parameters at a rank: 2 R (O + I), and 2 R (O + I + R K^2) for a convolution.

    >>> fedpara_size((100, 100), 10), fedpara_size((64, 3, 3, 3), 2)
    (4000, 340)
    """
    o, i, k = out_in_kernel(shape)
    return 2 * rank * (o + i + (0 if is_matrix(shape) else rank * k))


def fedpara_bounds(shape: Sequence[int]) -> tuple[int, int]:
    """Return the least rank that allows full rank, and the largest with at most as many parameters as the weight.

    >>> fedpara_bounds((512, 512, 3, 3)), fedpara_bounds((784, 256))
    ((23, 309), (16, 96))
    """
    o, i, k = out_in_kernel(shape)
    least = min(_ceil_sqrt(o), _ceil_sqrt(i))
    if is_matrix(shape):
        return least, o * i // (2 * (o + i))
    # the positive root of 2 R (O + I + R k) = O I k, rounded down, in integers
    return least, (math.isqrt((o + i) ** 2 + 2 * k * o * i * k) - (o + i)) // (2 * k)


def fedpara_rank(shape: Sequence[int], gamma: float) -> int:
    """Return the rank at `gamma`, from 0 (least) to 1 (largest); 0 if every rank has more parameters than the weight.

        R = round((1 - gamma) least + gamma largest)

    Not the authors' notebook, where gamma is a share of the size of the weight.

    >>> [fedpara_rank((512, 512, 3, 3), g) for g in (0.0, 0.1, 0.5)], fedpara_rank((2, 64), 0.5)
    ([23, 52, 166], 0)
    """
    least, most = fedpara_bounds(shape)
    return min(round((1 - gamma) * least + gamma * most), most)


@register("space", "fedpara", paper="Hyeon-Woo et al., ICLR 2022")
@dataclass(frozen=True)
class FedPara(Space):
    """Train two low-rank weights for each weight; their elementwise product can have full rank.

        W = f(W1) * f(W2),    Wj = Xj Yj^T               X: (O, R)   Y: (I, R)
                              Wj = Tj x1 Xj x2 Yj        T: (R, R, K, K)   (convolutions)
        personal:             W = W1 * (W2 + 1)          W2 is not sent: `AllBlocks(private=("*/[txy]2",))`

    The rank of W is up to R^2, that of a low-rank weight with as many parameters only 2 R. Biases, norms and embeddings
    are dense. Initial factors depend on the seed and the shapes, and for some values of `start` on the standard
    deviation of the dense weight; the other weights of the base are used only where they stay dense.

    Args:
        gamma: size of the factors, from 0 (the least rank that allows full rank) to 1 (as large as the weight).
        rank: R, for every weight; above 0 it replaces gamma.
        activation: f, `none` or `tanh` (the paper's convolutional networks).
        personal: W1 is shared, W2 is personal (pFedPara).
        start: initialization. `factor_he`: He's rule for each factor (as the authors); the weights are then far too
            small unless a norm follows. `composed_he`: He's rule for W, sqrt(2 / fan_in). `composed`: W has the
            standard deviation of the dense weight. `auto`: the first for convolutions of a model with norms, the third
            for the gates of recurrent layers, else the second. `LowRank` has the same option, with the same default.
        target_modules: selectors of weights to factorize.
        modules_to_save: selectors of weights to leave dense; in the paper, linear layers of convolutional networks.

    >>> space, base = FedPara(rank=7), {"fc.weight": torch.zeros(100, 100)}
    >>> coords = space.init(base, {}, Key(0))
    >>> {name: tuple(block.shape) for name, block in coords.items() if name.endswith("1")}
    {'fc.weight/x1': (100, 7), 'fc.weight/y1': (100, 7)}
    >>> int(torch.linalg.matrix_rank(space.expand(base, {}, coords)["fc.weight"]))
    49

    Not `LoRA`, which adds a low-rank update to a frozen weight. The mean of factors is not a factorization of the mean.
    """

    gamma: float = 0.1
    rank: int = 0
    activation: Activation = "none"
    personal: bool = False
    start: Start = "auto"
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fraction(gamma=self.gamma)
        check_rank(self.rank)
        if self.activation not in get_args(Activation):
            raise ConfigError(f"activation must be one of {', '.join(get_args(Activation))}, not {self.activation!r}")
        check_start(self.start)
        if self.personal and self.activation != "none":
            raise ConfigError("personal = true makes W1 * (W2 + 1) without an activation; write activation = 'none'")

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError unless at least one weight becomes smaller."""
        self.ranks(spec)

    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return the rank of every factorized weight, by name; a weight that no rank makes smaller stays dense.

        >>> FedPara(gamma=0.5).ranks(Spec.of({"fc.weight": torch.zeros(256, 784), "head.weight": torch.zeros(62, 256)}))
        {'fc.weight': 56, 'head.weight': 16}
        """
        chosen = select_weights(spec, self.target_modules, self.modules_to_save, "FedPara")
        return choose_ranks("FedPara", chosen, self.rank, lambda shape: fedpara_rank(shape, self.gamma))

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return an empty basis: factors are coordinates."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return random factors, and dense weights from the base."""
        spec = Spec.of(base)
        ranks = self.ranks(spec)
        coords: Tree = {}
        for name, weight in base.items():
            if name not in ranks:
                coords[name] = weight
                continue
            rank, core = ranks[name], not is_matrix(weight.shape)
            stds, drawn = factor_stds(weight.shape, rank), draw
            if not by_factor(self.start, spec, weight.shape):
                half = self._half_std(initial_std(name, weight, self.start), rank, core)
                stds = dict.fromkeys("txy", tucker_factor_std(half, rank) if core else matrix_factor_std(half, rank))
                drawn = draw_exact
            shapes = {"x": (weight.shape[0], rank), "y": (weight.shape[1], rank)}
            shapes = {"t": (rank, rank, *weight.shape[2:]), **shapes} if core else shapes
            for part, shape in ((f"{part}{j}", size) for j in "12" for part, size in shapes.items()):
                coords[f"{name}/{part}"] = drawn(key, name, part, shape, stds[part[0]], weight)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return products of factors, and dense weights."""
        return {name: coords[name] if name in coords else self._compose(name, w, coords) for name, w in base.items()}

    def _compose(self, name: str, weight: Tensor, coords: Tree) -> Tensor:
        one, two = (_half(name, j, weight, coords) for j in "12")
        if self.personal:
            return one * (two + 1)
        return torch.tanh(one) * torch.tanh(two) if self.activation == "tanh" else one * two

    def _half_std(self, std: float, rank: int, core: bool) -> float:
        """Return the standard deviation of W1 and W2 for that of W."""
        if self.activation == "tanh":
            return std_before_tanh(std, rank, core)
        if self.personal:  # W1 * (W2 + 1) has variance v (v + 1), v the variance of each
            return math.sqrt((math.sqrt(1 + 4 * std**2) - 1) / 2)
        return math.sqrt(std)


def _half(name: str, j: str, weight: Tensor, coords: Tree) -> Tensor:
    """Return W1 or W2."""
    x, y = coords[f"{name}/x{j}"], coords[f"{name}/y{j}"]
    return x @ y.T if is_matrix(weight.shape) else tucker(coords[f"{name}/t{j}"], x, y, weight.shape)


def _ceil_sqrt(n: int) -> int:
    return math.isqrt(n - 1) + 1
