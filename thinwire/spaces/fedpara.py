"""Weights as products of two low-rank ones, taken number by number: few numbers to send, full rank all the same.

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

from thinwire.core.registry import register
from thinwire.core.rng import Device, Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.factors import (
    check_rank,
    check_share,
    choose_ranks,
    draw,
    he,
    is_matrix,
    pick,
    share_matrix,
    share_tucker,
    sides,
    tucker,
)

Activation = Literal["none", "tanh"]
Start = Literal["auto", "factor_he", "composed_he"]


def fedpara_size(shape: Sequence[int], rank: int) -> int:
    """How many numbers make a weight at a rank: 2 R (O + I), and 2 R (O + I + R K^2) for a convolution.

    >>> fedpara_size((100, 100), 10), fedpara_size((64, 3, 3, 3), 2)
    (4000, 340)
    """
    o, i, k = sides(shape)
    return 2 * rank * (o + i + (0 if is_matrix(shape) else rank * k))


def fedpara_bounds(shape: Sequence[int]) -> tuple[int, int]:
    """The least rank whose square reaches the smaller side, and the largest that costs no more than the weight.

    >>> fedpara_bounds((512, 512, 3, 3)), fedpara_bounds((784, 256))
    ((23, 309), (16, 96))
    """
    o, i, k = sides(shape)
    least = min(_ceil_sqrt(o), _ceil_sqrt(i))
    if is_matrix(shape):
        return least, o * i // (2 * (o + i))
    # the positive root of 2 R (O + I + R k) = O I k, rounded down, in whole numbers
    return least, (math.isqrt((o + i) ** 2 + 2 * k * o * i * k) - (o + i)) // (2 * k)


def fedpara_rank(shape: Sequence[int], gamma: float) -> int:
    """The rank at `gamma`, from 0 (least) to 1 (largest); 0 where any rank would cost more than the weight itself.

        R = round((1 - gamma) least + gamma largest)

    Not the authors' notebook, whose knob is a share of the weight's size.

    >>> [fedpara_rank((512, 512, 3, 3), g) for g in (0.0, 0.1, 0.5)], fedpara_rank((2, 64), 0.5)
    ([23, 52, 166], 0)
    """
    least, most = fedpara_bounds(shape)
    return min(round((1 - gamma) * least + gamma * most), most)


@register("space", "fedpara", paper="Hyeon-Woo et al., ICLR 2022")
@dataclass(frozen=True)
class FedPara:
    """Train two small low-rank weights for each large one; their product, number by number, has full rank.

        W = f(W1) * f(W2),    Wj = Xj Yj^T               X: (O, R)   Y: (I, R)
                              Wj = Tj x1 Xj x2 Yj        T: (R, R, K, K)   (convolutions)
        personal:             W = W1 * (W2 + 1)          W2 stays at home by `Every(private=("*/[txy]2",))`

    The rank of W reaches R^2, that of a low-rank weight of the same size only 2 R. Biases, norms and embeddings are
    trained as they are. The first factors are functions of the seed and of the shapes: what the model held is not
    used, except for dense weights.

    Args:
        gamma: how large the factors are, from 0 (the least that can have full rank) to 1 (as large as the weight).
        rank: R itself, for every weight; above 0 it replaces the rule of gamma.
        activation: f, `none` or `tanh` (the paper's convolutional networks).
        personal: one half is common, the other a client's own.
        start: `factor_he`: each factor by its own size (as the authors); the weights then are far too small unless a
            norm follows. `composed_he`: W itself at its usual size. `auto`: the first for convolutions of a model with
            norms, the second otherwise.
        layers: selectors of weights to take apart.
        dense: selectors of weights to leave as they are; the paper leaves linear layers of convolutional networks.

    >>> space, base = FedPara(rank=7), {"fc.weight": torch.zeros(100, 100)}
    >>> coords = space.init(base, {}, Key(0))
    >>> {name: tuple(block.shape) for name, block in coords.items() if name.endswith("1")}
    {'fc.weight/x1': (100, 7), 'fc.weight/y1': (100, 7)}
    >>> int(torch.linalg.matrix_rank(space.expand(base, {}, coords)["fc.weight"]))
    49

    Not LoRA, which adds a low-rank change to a weight that stays; and the mean of factors is not the factors of a mean.
    """

    gamma: float = 0.1
    rank: int = 0
    activation: Activation = "none"
    personal: bool = False
    start: Start = "auto"
    layers: tuple[str, ...] = ("*",)
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_share(gamma=self.gamma)
        check_rank(self.rank)
        if self.activation not in get_args(Activation):
            raise ConfigError(f"activation must be one of {', '.join(get_args(Activation))}, not {self.activation!r}")
        if self.start not in get_args(Start):
            raise ConfigError(f"start must be one of {', '.join(get_args(Start))}, not {self.start!r}")
        if self.personal and self.activation != "none":
            raise ConfigError("personal = true makes W1 * (W2 + 1) without an activation; write activation = 'none'")

    @property
    def fresh_every(self) -> int:
        """Never: the factors live as long as the run."""
        return 0

    def check(self, spec: Spec) -> None:
        """At least one weight must become smaller."""
        self.ranks(spec)

    def ranks(self, spec: Spec) -> dict[str, int]:
        """The rank of every weight that is taken apart, by name; a weight that no rank makes smaller stays dense.

        >>> FedPara(gamma=0.5).ranks(Spec.of({"fc.weight": torch.zeros(256, 784), "head.weight": torch.zeros(62, 256)}))
        {'fc.weight': 56, 'head.weight': 16}
        """
        picked = pick(spec, self.layers, self.dense, "FedPara")
        return choose_ranks("FedPara", picked, self.rank, lambda shape: fedpara_rank(shape, self.gamma))

    def frame(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Nothing is drawn: the factors themselves are the start."""
        return {}

    def init(self, base: Tree, frame: Tree, key: Key) -> Tree:
        """Normal factors from the key; dense weights from the base."""
        spec = Spec.of(base)
        ranks = self.ranks(spec)
        normed = any(len(block.shape) == 1 and block.name.endswith("weight") for block in spec)
        coords: Tree = {}
        for name, weight in base.items():
            if name not in ranks:
                coords[name] = weight
                continue
            by_factor = self.start == "factor_he" or (self.start == "auto" and normed and not is_matrix(weight.shape))
            for part, (shape, std) in self._factors(tuple(weight.shape), ranks[name], by_factor).items():
                coords[f"{name}/{part}"] = draw(key, name, part, shape, std, weight)
        return coords

    def expand(self, base: Tree, frame: Tree, coords: Tree) -> Tree:
        """Every weight, composed."""
        return {name: coords[name] if name in coords else self._compose(name, w, coords) for name, w in base.items()}

    def _compose(self, name: str, weight: Tensor, coords: Tree) -> Tensor:
        one, two = (_half(name, j, weight, coords) for j in "12")
        if self.personal:
            return one * (two + 1)
        return torch.tanh(one) * torch.tanh(two) if self.activation == "tanh" else one * two

    def _factors(self, shape: tuple[int, ...], rank: int, by_factor: bool) -> dict[str, tuple[tuple[int, ...], float]]:
        """Shape and standard deviation of each factor of a weight."""
        o, i, k = sides(shape)
        core = {} if is_matrix(shape) else {"t": (rank, rank, *shape[2:])}
        shapes = {**core, "x": (o, rank), "y": (i, rank)}
        if by_factor:
            stds = {"t": math.sqrt(2 / (rank * k)), "x": math.sqrt(2 / o), "y": math.sqrt(2 / i)}
        else:
            # W1 * W2: each at the root of the usual size; W1 * (W2 + 1): W1 at the usual size, W2 as small beside 1
            goal = he(shape) if self.personal else math.sqrt(he(shape))
            stds = dict.fromkeys("txy", share_tucker(goal, rank) if core else share_matrix(goal, rank))
        return {f"{part}{j}": (size, stds[part]) for j in "12" for part, size in shapes.items()}


def _half(name: str, j: str, weight: Tensor, coords: Tree) -> Tensor:
    """One of the two low-rank weights."""
    x, y = coords[f"{name}/x{j}"], coords[f"{name}/y{j}"]
    return x @ y.T if is_matrix(weight.shape) else tucker(coords[f"{name}/t{j}"], x, y, weight.shape)


def _ceil_sqrt(n: int) -> int:
    return math.isqrt(n - 1) + 1
