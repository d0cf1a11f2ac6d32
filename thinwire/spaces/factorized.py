"""Weights as a product of two vectors plus a sparse rest: what is common to clients, and what is their own.

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
from thinwire.spaces.factors import draw, first_std, is_matrix, pick, share_matrix, sides


@register("space", "factorized-fl", paper="Jeong and Hwang, NeurIPS 2022")
@dataclass(frozen=True)
class FactorizedFL(Space):
    """Train each weight as the product of two vectors, plus a rest of full size that is meant to be sparse.

        W[o, i] = v[o] u[i] + mu[o, i]
        W[o, i, k] = v[o, i] u[k] + mu[o, i, k]      (convolutions: a matrix of kernel positions times O I)

    Sent whole this costs a little more than the model. The paper sends `u` alone and keeps the rest at home:
    `Every(private=("*/v", "*/mu"))`; and makes `mu` sparse: `Norms(l1=5e-4, coords=("*/mu",))`. In convolutions `mu`
    starts at zero; in matrices, where a product of two vectors makes all units alike, both halves start at half the
    usual variance.

    Args:
        target_modules: selectors of weights to take apart.
        modules_to_save: selectors of weights to leave as they are.
        prune: leave numbers of `mu` that are smaller than this out of the model when it is tested and used (the paper:
            5e-4). Training keeps them; what is sent is the codec's business.

    >>> space, base = FactorizedFL(), {"conv.weight": torch.zeros(8, 4, 3, 3)}
    >>> {name: tuple(block.shape) for name, block in space.init(base, {}, Key(0)).items()}
    {'conv.weight/u': (9,), 'conv.weight/v': (8, 4), 'conv.weight/mu': (8, 4, 3, 3)}

    The paper's averaging by similarity of `v`, in which each client gets a mean of its own, is not built.
    """

    target_modules: tuple[str, ...] = ("*",)
    modules_to_save: tuple[str, ...] = ()
    prune: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.prune < math.inf:
            raise ConfigError(f"prune must be 0 or more, not {self.prune}")

    def check(self, spec: Spec) -> None:
        """The model must have a matrix or a convolution."""
        self._names(spec)

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Nothing is drawn: the factors themselves are the start."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Normal factors from the key; dense weights from the base."""
        names = self._names(Spec.of(base))
        coords: Tree = {}
        for name, w in base.items():
            if name not in names:
                coords[name] = w
                continue
            o, i, k = sides(w.shape)
            matrix = is_matrix(w.shape)
            goal = first_std(name, w) * (math.sqrt(0.5) if matrix else 1.0)
            std = share_matrix(goal, 1)
            coords[f"{name}/u"] = draw(key, name, "u", (i if matrix else k,), std, w)
            coords[f"{name}/v"] = draw(key, name, "v", (o,) if matrix else (o, i), std, w)
            coords[f"{name}/mu"] = draw(key, name, "mu", w.shape, goal, w) if matrix else torch.zeros_like(w)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Every weight, composed."""
        return {name: coords[name] if name in coords else _compose(name, w, coords) for name, w in base.items()}

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Every weight, composed without the numbers of `mu` below `prune`."""
        rests = [f"{name}/mu" for name in base if name not in coords]
        kept = {name: coords[name].masked_fill(coords[name].abs() < self.prune, 0.0) for name in rests}
        return self.expand(base, basis, {**coords, **kept})

    def _names(self, spec: Spec) -> frozenset[str]:
        return frozenset(block.name for block in pick(spec, self.target_modules, self.modules_to_save, "FactorizedFL"))


def _compose(name: str, weight: Tensor, coords: Tree) -> Tensor:
    u, v, mu = (coords[f"{name}/{part}"] for part in ("u", "v", "mu"))
    return (v[..., None] * u).reshape(weight.shape) + mu
