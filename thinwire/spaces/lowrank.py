"""Low-rank weights, trained from scratch: the baseline of factorized spaces.

Paper: the baseline "low-rank" of FedPara (Hyeon-Woo et al., ICLR 2022).

Late convolutions of low rank, early layers dense (Pufferfish).

Paper: Wang, Agarwal and Papailiopoulos, Pufferfish, MLSys 2021; a baseline of FedPara (ICLR 2022).

Rank-one weights plus a sparse residual: a factor that clients share, and parts that are personal (Factorized-FL).

Paper: Jeong and Hwang, Factorized-FL, NeurIPS 2022.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import rare, register_part
from thinwire.core.text import NonNegativeFloat, NonNegativeInt, Probability, Share
from thinwire.core.tree import Spec, Tree
from thinwire.errors import ConfigError
from thinwire.spaces.factors import (
    FactorizedSpace,
    GammaRules,
    Start,
    by_factor,
    choose_ranks,
    draw,
    draw_factors,
    factor_std,
    gammas_of,
    initial_std,
    is_matrix,
    none_smaller,
    out_in_kernel,
    product_of,
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
    return next(rank for rank in itertools.count() if lowrank_size(shape, rank) >= size)


@register_part("space", "lowrank", paper="compared with in Hyeon-Woo et al., ICLR 2022")
class LowRank(FactorizedSpace):
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

    rank: NonNegativeInt = 0
    like_gamma: Probability = 0.1
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    start: Start = "auto"
    like_gammas: GammaRules = rare(())

    def __post_init__(self) -> None:
        self._normalize_rules("like_gammas")

    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return the rank of every factorized weight, by name."""
        chosen = self.selected(spec)
        gammas = gammas_of(chosen, self.like_gammas, self.like_gamma, "like_gammas")
        ranks = {block.name: lowrank_rank(block.shape, gammas[block.name]) for block in chosen}
        return choose_ranks("LowRank", chosen, self.rank, ranks)

    def factors(self, name: str, base: Tree, rank: int, key: Key) -> Tree:
        """Return X and Y, and T for convolutions."""
        weight = base[name]
        he = by_factor(self.start, name, base)
        return draw_factors(key, name, weight, rank, None if he else initial_std(name, weight, self.start))

    def product(self, name: str, base: Tree, coords: Tree) -> Tensor:
        """Return X Y^T, or T x1 X x2 Y."""
        return product_of(name, base[name], coords)


@register_part("space", "pufferfish", paper="Wang et al., MLSys 2021")
class Pufferfish(FactorizedSpace):
    """Train late convolutions as a thin convolution followed by a 1x1 one; early and linear layers stay dense.

        W[o, i, k] = sum_r U[o, r] V[r, i, k],      r = ratio O       U: (O, r)   V: (r, I, K, K)

    In a network without convolutions, all its matrices except the last take their place. Weights that would not become
    smaller stay dense. The original trains dense weights first and then factorizes them by singular values; this one,
    as FedPara's baseline, starts with random factors such that W has its usual scale (He's; for gates, that of the
    dense weight).

    Args:
        ratio: r as a share of the outputs.
        first_dense: number of convolutions, counted from the input, that stay dense.
        target_modules: selectors of weights to factorize.
        modules_to_save: selectors of weights to leave dense.

    >>> import torch
    >>> base = {f"conv{i}.weight": torch.zeros(8, 8, 3, 3) for i in (1, 2)}
    >>> {name: tuple(w.shape) for name, w in Pufferfish(first_dense=1).init(base, {}, Key(0)).items()}
    {'conv1.weight': (8, 8, 3, 3), 'conv2.weight/u': (8, 2), 'conv2.weight/v': (2, 8, 3, 3)}

    Not `LowRank`, whose convolutions are thin at inputs and outputs (Tucker-2).
    """

    ratio: Share = 0.25
    first_dense: NonNegativeInt = 5
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()

    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return the rank of every factorized weight, by name."""
        chosen = self.selected(spec)
        chosen = tuple(block for block in chosen if not is_matrix(block.shape)) or chosen[:-1] or chosen
        late = chosen[self.first_dense :]
        if not late:
            raise ConfigError(
                f"Pufferfish: first_dense = {self.first_dense} leaves nothing to factorize of {len(chosen)} weights "
                f"({', '.join(block.name for block in chosen[:6])}); write a smaller first_dense"
            )
        ranks = {}
        for block in late:
            o, i, k = out_in_kernel(block.shape)
            rank = max(1, int(o * self.ratio))
            if rank * (o + i * k) < block.numel:
                ranks[block.name] = rank
        if not ranks:
            raise none_smaller("Pufferfish", late)
        return ranks

    def factors(self, name: str, base: Tree, rank: int, key: Key) -> Tree:
        """Return U and V."""
        weight = base[name]
        std = factor_std(initial_std(name, weight), rank, core=False)
        shapes = {"u": (weight.shape[0], rank), "v": (rank, *weight.shape[1:])}
        return {
            f"{name}/{part}": draw(key, name, part, shape, std, weight, exact=True) for part, shape in shapes.items()
        }

    def product(self, name: str, base: Tree, coords: Tree) -> Tensor:
        """Return U V."""
        return (coords[f"{name}/u"] @ coords[f"{name}/v"].flatten(1)).reshape(base[name].shape)


@register_part("space", "factorized-fl", paper="Jeong and Hwang, NeurIPS 2022")
class FactorizedFL(FactorizedSpace):
    """Train each weight as the outer product of two vectors, plus a residual of full size that should become sparse.

        W[o, i] = v[o] u[i] + mu[o, i]
        W[o, i, k] = v[o, i] u[k] + mu[o, i, k]      (convolutions: a matrix of kernel positions times O I)

    All coordinates together have a few more parameters than the model. The paper sends only `u`, by the schedule
    `AllBlocks(private=("*/v", "*/mu"))`, and makes `mu` sparse, by the penalty `L1L2(l1=5e-4, coords=("*/mu",))`. In
    convolutions `mu` starts at zero. In matrices, where a rank-one weight makes all units equal up to a factor, product
    and residual each start at half the usual variance.

    Args:
        target_modules: selectors of weights to factorize.
        modules_to_save: selectors of weights to leave dense.
        prune: set values of `mu` below this magnitude to zero in the trained model (the paper: 5e-4). Training keeps
            them.

    >>> space, base = FactorizedFL(), {"conv.weight": torch.zeros(8, 4, 3, 3)}
    >>> {name: tuple(block.shape) for name, block in space.init(base, {}, Key(0)).items()}
    {'conv.weight/u': (9,), 'conv.weight/v': (8, 4), 'conv.weight/mu': (8, 4, 3, 3)}

    The paper's aggregation by similarity of `v`, with another mean for each client, is not implemented. Not `FedPara`,
    whose weights have full rank without a residual.
    """

    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    prune: NonNegativeFloat = 0.0

    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return rank 1 for every factorized weight."""
        return {block.name: 1 for block in self.selected(spec)}

    def factors(self, name: str, base: Tree, rank: int, key: Key) -> Tree:
        """Return u, v and mu."""
        weight = base[name]
        (o, i, k), matrix = out_in_kernel(weight.shape), is_matrix(weight.shape)
        goal = initial_std(name, weight) * (math.sqrt(0.5) if matrix else 1.0)
        std = factor_std(goal, 1, core=False)
        return {
            f"{name}/u": draw(key, name, "u", (i if matrix else k,), std, weight),
            f"{name}/v": draw(key, name, "v", (o,) if matrix else (o, i), std, weight),
            f"{name}/mu": draw(key, name, "mu", weight.shape, goal, weight) if matrix else torch.zeros_like(weight),
        }

    def product(self, name: str, base: Tree, coords: Tree) -> Tensor:
        """Return v u^T + mu."""
        u, v, mu = (coords[f"{name}/{part}"] for part in ("u", "v", "mu"))
        return (v[..., None] * u).reshape(base[name].shape) + mu

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without values of `mu` below `prune`."""
        residuals = [f"{name}/mu" for name in base if name not in coords]
        pruned = {name: coords[name].masked_fill(coords[name].abs() < self.prune, 0.0) for name in residuals}
        return self.expand(base, basis, {**coords, **pruned})
