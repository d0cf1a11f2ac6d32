"""Weights as the elementwise product of two low-rank weights: few parameters, full rank (FedPara).

Paper: Hyeon-Woo, Ye-Bin and Oh, FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning,
ICLR 2022 (propositions 1 and 3; pFedPara).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import rare, register_part
from thinwire.core.text import NonNegativeInt, Probability
from thinwire.core.tree import Block, Spec, Tree
from thinwire.errors import ConfigError
from thinwire.spaces.factors import (
    EMBEDDINGS,
    FactorizedSpace,
    GammaRules,
    Start,
    any_match,
    by_factor,
    choose_ranks,
    dense_std,
    draw_factors,
    gammas_of,
    initial_std,
    is_matrix,
    out_in_kernel,
    product_of,
    std_before_tanh,
)

Activation = Literal["none", "tanh"]
Scale = Literal["unit", "isometric"]
Dense = Literal["none", "auto"]

HALF = 0.5  # standard deviation of the second half, with scale = "isometric"


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
    least = math.isqrt(min(o, i) - 1) + 1  # the square root, rounded up
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


def isometric_halves(std: float, rank: int, core: bool) -> tuple[float, float]:
    """Return the standard deviations of f(W1) and f(W2) with which steps of W = c f(W1) * f(W2) have FedAvg's size.

    With factors of equal size in each half, a step of all factors along their gradients, of size lr, moves W in
    expectation by lr g G, where G is the gradient of W, v1 and v2 are the standard deviations of the halves, and
    std = c v1 v2 that of W:

        matrices:       g = 2 R^(1/2) std^2 (1 / v1 + 1 / v2)
        convolutions:   g = 3 R^(2/3) std^2 (v1^(-2/3) + v2^(-2/3))

    (a factor contributes the squared norm of what it is multiplied by). v2 is 1/2, and v1 is chosen such that g = 1.
    The first half then makes almost all of g. Halves of equal size would be stable at much smaller rates only: there W
    is a product of four or six factors that all grow. v1 is at most 1/2.

    >>> [round(v, 4) for v in isometric_halves(0.072, 9, core=False)]
    [0.0332, 0.5]
    """
    if core:
        wanted = 1 / (3 * rank ** (2 / 3) * std**2) - HALF ** (-2 / 3)
        return max(wanted, HALF ** (-2 / 3)) ** -1.5, HALF
    wanted = 1 / (2 * math.sqrt(rank) * std**2) - 1 / HALF
    return 1 / max(wanted, 1 / HALF), HALF


@register_part("space", "fedpara", paper="Hyeon-Woo et al., ICLR 2022")
class FedPara(FactorizedSpace):
    """Train two low-rank weights for each weight; their elementwise product can have full rank.

        W = f(W1) * f(W2),    Wj = Xj Yj^T               X: (O, R)   Y: (I, R)
                              Wj = Tj x1 Xj x2 Yj        T: (R, R, K, K)   (convolutions)
        personal:             W = W1 * (W2 + 1)          W2 is not sent: `AllBlocks(private=("*/[txy]2",))`
        isometric:            W = c f(W1) * f(W2)        c from the shape: see `isometric_halves`

    The rank of W is up to R^2, that of a low-rank weight with as many parameters only 2 R. Biases, norms and embeddings
    are dense; biases of factorized layers start at zero. Initial factors depend on the seed and the shapes, and for
    some values of `start` on the standard deviation of the dense weight; the other weights of the base are used only
    where they stay dense.

    Args:
        gamma: size of the factors, from 0 (the least rank that allows full rank) to 1 (as large as the weight).
        rank: R, for every weight; above 0 it replaces gamma and `gammas`.
        activation: f, `none` or `tanh` (the paper's convolutional networks).
        personal: W1 is shared, W2 is personal (pFedPara).
        start: initialization. `factor_he`: He's rule for each factor (as the authors); the weights are then far too
            small unless a norm follows a layer without bias. `composed_he`: He's rule for W, sqrt(2 / fan_in).
            `composed`: W has the standard deviation of the dense weight. `auto`: the first for convolutions of a model
            with norms, the third for the gates of recurrent layers, else the second. `LowRank` has the same option,
            with the same default.
        target_modules: selectors of weights to factorize.
        modules_to_save: selectors of weights to leave dense; in the paper, linear layers of convolutional networks.
        scale: `isometric` multiplies each product by a constant c and starts with a small and a large half, so that a
            step has in expectation FedAvg's size and FedAvg's learning rate fits (needs a composed `start`). With c = 1
            and equal halves (`unit`, the paper) a step is 4 to 20 times smaller. c is that of a weight with the
            standard deviation of torch's layers, 1 / sqrt(3 fan_in): it follows from the shape.
        dense: `auto` leaves dense the head (the last matrix, with fewer outputs than inputs) if it has at most a
            quarter of the weights, and weights with at most a tenth of them if their rank would be below 4. `none`:
            only those of `modules_to_save`.
        gammas: other values of gamma for some weights: pairs `(selector or selectors, gamma)`, of which the first that
            matches applies. In TOML: `gammas = [{ on = ["conv.weight"], gamma = 1.0 }]`.

    >>> space, base = FedPara(rank=7), {"fc.weight": torch.zeros(100, 100)}
    >>> coords = space.init(base, {}, Key(0))
    >>> {name: tuple(block.shape) for name, block in coords.items() if name.endswith("1")}
    {'fc.weight/x1': (100, 7), 'fc.weight/y1': (100, 7)}
    >>> int(torch.linalg.matrix_rank(space.expand(base, {}, coords)["fc.weight"]))
    49

    Not `LoRA`, which adds a low-rank update to a frozen weight. The mean of factors is not a factorization of the mean.
    """

    gamma: Probability = 0.1
    rank: NonNegativeInt = 0
    activation: Activation = "none"
    personal: bool = False
    start: Start = "auto"
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    scale: Scale = rare("unit", in_repr=True)
    dense: Dense = rare("none", in_repr=True)
    gammas: GammaRules = rare(())

    def __post_init__(self) -> None:
        self._normalize_rules("gammas")
        if self.scale == "isometric" and (self.personal or self.start not in ("composed", "composed_he")):
            raise ConfigError(
                "scale = 'isometric' needs start = 'composed' or 'composed_he' and personal = false, not "
                f"start = {self.start!r} and personal = {str(self.personal).lower()}"
            )
        if self.personal and self.activation != "none":
            raise ConfigError("personal = true makes W1 * (W2 + 1) without an activation; write activation = 'none'")

    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return the rank of every factorized weight, by name; a weight that no rank makes smaller stays dense.

        >>> FedPara(gamma=0.5).ranks(Spec.of({"fc.weight": torch.zeros(256, 784), "head.weight": torch.zeros(62, 256)}))
        {'fc.weight': 56, 'head.weight': 16}
        """
        if self.dense == "auto" and not self._some(spec):
            return {}
        chosen = self.selected(spec)
        gammas = gammas_of(chosen, self.gammas, self.gamma, "gammas")
        ranks = {block.name: fedpara_rank(block.shape, gammas[block.name]) for block in chosen}
        if self.dense == "auto":
            chosen = self._without_small(chosen, ranks)
        return choose_ranks("FedPara", chosen, self.rank, ranks) if chosen else {}

    def note(self, spec: Spec) -> str:
        """Return the weights that `dense` leaves dense."""
        if self.dense == "none":
            return ""
        if not self._some(spec):
            return "FedPara leaves all dense."
        ranks = self.ranks(spec)
        names = [block.name for block in self.selected(spec) if block.name not in ranks]
        return f"FedPara leaves dense: {', '.join(names)}." if names else ""

    def _some(self, spec: Spec) -> bool:
        """Return whether there is a weight to factorize, other than an embedding; all are selected by default."""
        return self.target_modules != ("*",) or any(
            2 <= len(block.shape) <= 5 and block.numel and not any_match(block.name, EMBEDDINGS) for block in spec
        )

    def _without_small(self, chosen: tuple[Block, ...], ranks: dict[str, int]) -> tuple[Block, ...]:
        """Return the weights without the head and those that are small, for `dense = "auto"`."""
        total, head = sum(block.numel for block in chosen), chosen[-1]
        if is_matrix(head.shape) and head.shape[0] < head.shape[1] and 4 * head.numel <= total:
            chosen = chosen[:-1]
        sized = [(block, self.rank or ranks[block.name]) for block in chosen]
        return tuple(block for block, rank in sized if rank >= (1 if 10 * block.numel > total else 4))

    def factors(self, name: str, base: Tree, rank: int, key: Key) -> Tree:
        """Return X1, Y1, X2, Y2, and for convolutions T1 and T2."""
        weight = base[name]
        stds: tuple[float | None, ...] = (None, None)
        if not by_factor(self.start, name, base):
            stds = self._half_stds(name, rank, base)
        first, second = (draw_factors(key, name, weight, rank, std, j) for std, j in zip(stds, "12", strict=True))
        return first | second

    def product(self, name: str, base: Tree, coords: Tree) -> Tensor:
        """Return f(W1) * f(W2), or W1 * (W2 + 1)."""
        one, two = (product_of(name, base[name], coords, j) for j in "12")
        if self.personal:
            return one * (two + 1)
        made = torch.tanh(one) * torch.tanh(two) if self.activation == "tanh" else one * two
        if self.scale == "unit":
            return made
        std, rank = dense_std(name, base), coords[f"{name}/x1"].shape[1]
        first, second = isometric_halves(std, rank, not is_matrix(base[name].shape))
        return float(f"{std / (first * second):.7g}") * made  # rounded, so that it is the same on all machines

    def _half_stds(self, name: str, rank: int, base: Tree) -> tuple[float, float]:
        """Return the standard deviations of W1 and W2."""
        weight, core = base[name], not is_matrix(base[name].shape)
        std = initial_std(name, weight, self.start)
        if self.scale == "unit":
            return (self._half_std(std, rank, core),) * 2
        usual = dense_std(name, base)
        first, second = isometric_halves(usual, rank, core)
        # c is that of the usual standard deviation; the first half makes up for another one
        return self._half_std((first * std / usual) ** 2, rank, core), self._half_std(second**2, rank, core)

    def _half_std(self, std: float, rank: int, core: bool) -> float:
        """Return the standard deviation of W1 and W2 for that of W, if both are of one size."""
        if self.activation == "tanh":
            return std_before_tanh(std, rank, core)
        if self.personal:  # W1 * (W2 + 1) has variance v (v + 1), v the variance of each
            return math.sqrt((math.sqrt(1 + 4 * std**2) - 1) / 2)
        return math.sqrt(std)
