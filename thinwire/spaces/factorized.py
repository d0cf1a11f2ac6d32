"""Rank-one weights plus a sparse residual: a factor that clients share, and parts that are personal (Factorized-FL).

Paper: Jeong and Hwang, Factorized-FL, NeurIPS 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.factor_init import draw, initial_std, matrix_factor_std
from thinwire.spaces.factors import is_matrix, out_in_kernel, select_weights


@register("space", "factorized-fl", paper="Jeong and Hwang, NeurIPS 2022")
@dataclass(frozen=True)
class FactorizedFL(Space):
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
    prune: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.prune < math.inf:
            raise ConfigError(f"prune must be 0 or more, not {self.prune}")

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if the model has no matrix and no convolution to factorize."""
        self._names(spec)

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return an empty basis: factors are coordinates."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return random factors, and dense weights from the base."""
        names = self._names(Spec.of(base))
        coords: Tree = {}
        for name, w in base.items():
            if name not in names:
                coords[name] = w
                continue
            o, i, k = out_in_kernel(w.shape)
            matrix = is_matrix(w.shape)
            goal = initial_std(name, w) * (math.sqrt(0.5) if matrix else 1.0)
            std = matrix_factor_std(goal, 1)
            coords[f"{name}/u"] = draw(key, name, "u", (i if matrix else k,), std, w)
            coords[f"{name}/v"] = draw(key, name, "v", (o,) if matrix else (o, i), std, w)
            coords[f"{name}/mu"] = draw(key, name, "mu", w.shape, goal, w) if matrix else torch.zeros_like(w)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return products plus residuals, and dense weights."""
        return {name: coords[name] if name in coords else _compose(name, w, coords) for name, w in base.items()}

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without values of `mu` below `prune`."""
        residuals = [f"{name}/mu" for name in base if name not in coords]
        pruned = {name: coords[name].masked_fill(coords[name].abs() < self.prune, 0.0) for name in residuals}
        return self.expand(base, basis, {**coords, **pruned})

    def _names(self, spec: Spec) -> frozenset[str]:
        chosen = select_weights(spec, self.target_modules, self.modules_to_save, "FactorizedFL")
        return frozenset(block.name for block in chosen)


def _compose(name: str, weight: Tensor, coords: Tree) -> Tensor:
    u, v, mu = (coords[f"{name}/{part}"] for part in ("u", "v", "mu"))
    return (v[..., None] * u).reshape(weight.shape) + mu
