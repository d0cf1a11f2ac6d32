"""Low-rank weights, trained from scratch: the baseline of factorized spaces.

Paper: the baseline "low-rank" of FedPara (Hyeon-Woo et al., ICLR 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register, short_repr
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree
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
    tucker_factor_std,
)
from thinwire.spaces.factors import (
    GammaRules,
    check_fraction,
    check_gamma_rules,
    check_rank,
    choose_ranks,
    gamma_of,
    gamma_rules,
    is_matrix,
    out_in_kernel,
    select_weights,
    tucker,
)
from thinwire.spaces.fedpara import fedpara_rank, fedpara_size


def lowrank_size(shape: Sequence[int], rank: int) -> int:
    """Return the number of parameters at a rank: r (O + I), and r (O + I) + r^2 K^2 for a convolution.

    >>> lowrank_size((100, 100), 20), lowrank_size((64, 3, 3, 3), 4)
    (4000, 412)
    """
    o, i, k = out_in_kernel(shape)
    return rank * (o + i) + (0 if is_matrix(shape) else rank**2 * k)


def lowrank_rank(shape: Sequence[int], gamma: float) -> int:
    """Return the least rank with at least as many parameters as FedPara at `gamma`; 0 where FedPara stays dense.

    >>> [lowrank_rank(shape, 0.1) for shape in ((64, 3, 3, 3), (512, 512, 3, 3), (256, 784))]
    [4, 87, 48]
    """
    size = fedpara_size(shape, fedpara_rank(shape, gamma))
    o, i, k = out_in_kernel(shape)
    if is_matrix(shape):
        return -(-size // (o + i))
    rank = max(0, (math.isqrt((o + i) ** 2 + 4 * k * size) - (o + i)) // (2 * k) - 1)  # at or below the root
    while lowrank_size(shape, rank) < size:
        rank += 1
    return rank


@register("space", "lowrank", paper="compared with in Hyeon-Woo et al., ICLR 2022")
@dataclass(frozen=True)
class LowRank(Space):
    """Train each weight as a product of thin factors, so that its rank is at most r.

        W = X Y^T             X: (O, r)   Y: (I, r)
        W = T x1 X x2 Y       T: (r, r, K, K)     (convolutions: Tucker-2)

    Biases, norms and embeddings are dense. Initial factors are drawn from the seed; `start` sets their scale.

    Args:
        rank: r, for every weight; above 0 it replaces like_gamma.
        like_gamma: for each weight the least rank with at least as many parameters as `FedPara` at this gamma.
        start: initialization, as in `FedPara`, so that the two can be compared. `factor_he`: He's rule for each factor.
            `composed_he`: He's rule for W. `composed`: W has the standard deviation of the dense weight. `auto`: the
            first for convolutions of a model with norms, the third for the gates of recurrent layers, else the second.
        target_modules: selectors of weights to factorize.
        modules_to_save: selectors of weights to leave dense.
        like_gammas: as `gammas` of `FedPara`, for the same sizes.

    >>> import torch
    >>> space, base = LowRank(rank=3), {"fc.weight": torch.zeros(8, 6)}
    >>> int(torch.linalg.matrix_rank(space.expand(base, {}, space.init(base, {}, Key(0)))["fc.weight"]))
    3

    Not `LoRA`, which adds a low-rank update to a frozen weight: here W itself has rank r.
    """

    rank: int = 0
    like_gamma: float = 0.1
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    start: Start = "auto"
    like_gammas: GammaRules = field(default=(), metadata={"rare": True})
    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "like_gammas", gamma_rules(self.like_gammas, "like_gammas"))
        check_rank(self.rank)
        check_fraction(like_gamma=self.like_gamma)
        check_start(self.start)

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError unless at least one weight becomes smaller."""
        self.ranks(spec)

    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return the rank of every factorized weight, by name."""
        chosen = select_weights(spec, self.target_modules, self.modules_to_save, "LowRank")
        check_gamma_rules(self.like_gammas, chosen, "like_gammas")
        return choose_ranks("LowRank", chosen, self.rank, self._rank)

    def _rank(self, block: Block) -> int:
        return lowrank_rank(block.shape, gamma_of(block.name, self.like_gammas, self.like_gamma))

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return an empty basis: factors are coordinates."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return random factors, and dense weights from the base."""
        spec = Spec.of(base)
        ranks = self.ranks(spec)
        coords: Tree = {}
        for name, w in base.items():
            if name not in ranks:
                coords[name] = w
                continue
            rank, matrix = ranks[name], is_matrix(w.shape)
            stds, drawn = factor_stds(w.shape, rank), draw
            if not by_factor(self.start, spec, w.shape):
                factor_std = matrix_factor_std if matrix else tucker_factor_std
                stds, drawn = dict.fromkeys("txy", factor_std(initial_std(name, w, self.start), rank)), draw_exact
            if not matrix:
                coords[f"{name}/t"] = drawn(key, name, "t", (rank, rank, *w.shape[2:]), stds["t"], w)
            coords[f"{name}/x"] = drawn(key, name, "x", (w.shape[0], rank), stds["x"], w)
            coords[f"{name}/y"] = drawn(key, name, "y", (w.shape[1], rank), stds["y"], w)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return products of factors, and dense weights."""
        return {name: coords[name] if name in coords else _compose(name, w, coords) for name, w in base.items()}


def _compose(name: str, weight: Tensor, coords: Tree) -> Tensor:
    x, y = coords[f"{name}/x"], coords[f"{name}/y"]
    return x @ y.T if is_matrix(weight.shape) else tucker(coords[f"{name}/t"], x, y, weight.shape)
