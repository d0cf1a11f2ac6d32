"""Weights of low rank, trained from the start: the plain way to fewer numbers, against which others are measured.

Papers: FedPara (ICLR 2022) compares with both; Wang, Agarwal and Papailiopoulos, Pufferfish, MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.factors import (
    Start,
    by_factor,
    check_rank,
    check_share,
    check_start,
    choose_ranks,
    draw,
    draw_sized,
    factor_stds,
    first_std,
    is_matrix,
    none_smaller,
    pick,
    share_matrix,
    share_tucker,
    sides,
    tucker,
)
from thinwire.spaces.fedpara import fedpara_rank, fedpara_size


def lowrank_size(shape: Sequence[int], rank: int) -> int:
    """How many numbers make a weight at a rank: r (O + I), and r (O + I) + r^2 K^2 for a convolution.

    >>> lowrank_size((100, 100), 20), lowrank_size((64, 3, 3, 3), 4)
    (4000, 412)
    """
    o, i, k = sides(shape)
    return rank * (o + i) + (0 if is_matrix(shape) else rank**2 * k)


def lowrank_rank(shape: Sequence[int], gamma: float) -> int:
    """The least rank that costs at least what FedPara costs at `gamma`; 0 where FedPara leaves the weight as it is.

    >>> [lowrank_rank(shape, 0.1) for shape in ((64, 3, 3, 3), (512, 512, 3, 3), (256, 784))]
    [4, 87, 48]
    """
    size = fedpara_size(shape, fedpara_rank(shape, gamma))
    o, i, k = sides(shape)
    if is_matrix(shape):
        return -(-size // (o + i))
    rank = max(0, (math.isqrt((o + i) ** 2 + 4 * k * size) - (o + i)) // (2 * k) - 1)  # at or below the root
    while lowrank_size(shape, rank) < size:
        rank += 1
    return rank


@register("space", "lowrank", paper="compared with in Hyeon-Woo et al., ICLR 2022")
@dataclass(frozen=True)
class LowRank(Space):
    """Train each weight as a product of thin factors, so that it never has more than a low rank.

        W = X Y^T             X: (O, r)   Y: (I, r)
        W = T x1 X x2 Y       T: (r, r, K, K)     (convolutions: Tucker-2)

    Biases, norms and embeddings are trained as they are. The first factors are drawn from the seed, at sizes that
    `start` says.

    Args:
        rank: r, for every weight; above 0 it replaces the rule of like_gamma.
        like_gamma: for each weight the least rank that costs at least what `FedPara` costs at this gamma.
        start: as in `FedPara`, so that the two can be compared: `factor_he`, each factor by its own size;
            `composed_he`, W at He's size; `composed`, W at the standard deviation of the dense weight; `auto`, the
            first for convolutions of a model with norms, the third for the gates of recurrent layers, else the second.
        target_modules: selectors of weights to take apart.
        modules_to_save: selectors of weights to leave as they are.

    >>> import torch
    >>> space, base = LowRank(rank=3), {"fc.weight": torch.zeros(8, 6)}
    >>> int(torch.linalg.matrix_rank(space.expand(base, {}, space.init(base, {}, Key(0)))["fc.weight"]))
    3

    Not LoRA: there is no dense weight underneath, W itself has rank r.
    """

    rank: int = 0
    like_gamma: float = 0.1
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    start: Start = "auto"

    def __post_init__(self) -> None:
        check_rank(self.rank)
        check_share(like_gamma=self.like_gamma)
        check_start(self.start)

    def check(self, spec: Spec) -> None:
        """At least one weight must become smaller."""
        self.ranks(spec)

    def ranks(self, spec: Spec) -> dict[str, int]:
        """The rank of every weight that is taken apart, by name."""
        picked = pick(spec, self.target_modules, self.modules_to_save, "LowRank")
        return choose_ranks("LowRank", picked, self.rank, lambda shape: lowrank_rank(shape, self.like_gamma))

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Nothing is drawn: the factors themselves are the start."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Normal factors from the key; dense weights from the base."""
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
                share = share_matrix if matrix else share_tucker
                stds, drawn = dict.fromkeys("txy", share(first_std(name, w, self.start), rank)), draw_sized
            if not matrix:
                coords[f"{name}/t"] = drawn(key, name, "t", (rank, rank, *w.shape[2:]), stds["t"], w)
            coords[f"{name}/x"] = drawn(key, name, "x", (w.shape[0], rank), stds["x"], w)
            coords[f"{name}/y"] = drawn(key, name, "y", (w.shape[1], rank), stds["y"], w)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Every weight, composed."""
        return {name: coords[name] if name in coords else _lowrank(name, w, coords) for name, w in base.items()}


def _lowrank(name: str, weight: Tensor, coords: Tree) -> Tensor:
    x, y = coords[f"{name}/x"], coords[f"{name}/y"]
    return x @ y.T if is_matrix(weight.shape) else tucker(coords[f"{name}/t"], x, y, weight.shape)


@register("space", "pufferfish", paper="Wang et al., MLSys 2021")
@dataclass(frozen=True)
class Pufferfish(Space):
    """Train late convolutions as a thin one followed by a 1x1 one; early layers and linear ones stay as they are.

        W[o, i, k] = sum_r U[o, r] V[r, i, k],      r = ratio O       U: (O, r)   V: (r, I, K, K)

    In a network without convolutions its matrices but the last take their place. Weights that would not become smaller
    stay dense.
    The original first trains dense for a while and then takes the weights apart by singular values; this one, like
    FedPara's comparison, starts with factors, such that W is at its usual size (He; of gates, the dense weight's).

    Args:
        ratio: r as a share of the outputs.
        first_dense: how many of the convolutions, from the input on, stay as they are.
        target_modules: selectors of weights to take apart.
        modules_to_save: selectors of weights to leave as they are.

    >>> import torch
    >>> base = {f"conv{i}.weight": torch.zeros(8, 8, 3, 3) for i in (1, 2)}
    >>> {name: tuple(w.shape) for name, w in Pufferfish(first_dense=1).init(base, {}, Key(0)).items()}
    {'conv1.weight': (8, 8, 3, 3), 'conv2.weight/u': (8, 2), 'conv2.weight/v': (2, 8, 3, 3)}

    Not `LowRank`, whose convolutions are thin at both ends (Tucker-2).
    """

    ratio: float = 0.25
    first_dense: int = 5
    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_share(ratio=self.ratio)
        if not self.ratio:
            raise ConfigError("ratio must be above 0; write for example ratio = 0.25")
        if isinstance(self.first_dense, bool) or not isinstance(self.first_dense, int) or self.first_dense < 0:
            raise ConfigError(f"first_dense must be a whole number from 0 on, not {self.first_dense!r}")

    def check(self, spec: Spec) -> None:
        """At least one weight must become smaller."""
        self.ranks(spec)

    def ranks(self, spec: Spec) -> dict[str, int]:
        """The rank of every weight that is taken apart, by name."""
        picked = pick(spec, self.target_modules, self.modules_to_save, "Pufferfish")
        picked = tuple(block for block in picked if not is_matrix(block.shape)) or picked[:-1] or picked
        late = picked[self.first_dense :]
        if not late:
            raise ConfigError(
                f"Pufferfish: first_dense = {self.first_dense} leaves nothing to take apart of {len(picked)} weights "
                f"({', '.join(block.name for block in picked[:6])}); write a smaller first_dense"
            )
        ranks = {}
        for block in late:
            o, i, k = sides(block.shape)
            rank = max(1, int(o * self.ratio))
            if rank * (o + i * k) < block.numel:
                ranks[block.name] = rank
        if not ranks:
            raise none_smaller("Pufferfish", late)
        return ranks

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Nothing is drawn: the factors themselves are the start."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Normal factors from the key; dense weights from the base."""
        ranks = self.ranks(Spec.of(base))
        coords: Tree = {}
        for name, w in base.items():
            if name not in ranks:
                coords[name] = w
                continue
            rank = ranks[name]
            std = share_matrix(first_std(name, w), rank)
            coords[f"{name}/u"] = draw_sized(key, name, "u", (w.shape[0], rank), std, w)
            coords[f"{name}/v"] = draw_sized(key, name, "v", (rank, *w.shape[1:]), std, w)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Every weight, composed."""
        out: Tree = {}
        for name, w in base.items():
            if name in coords:
                out[name] = coords[name]
            else:
                thin = coords[f"{name}/v"]
                out[name] = (coords[f"{name}/u"] @ thin.reshape(thin.shape[0], -1)).reshape(w.shape)
        return out
