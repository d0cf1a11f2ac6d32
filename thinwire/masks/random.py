"""Train a fixed random subset of the coordinates (SLoRA's first stage)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.masks.base import Mask
from thinwire.masks.largest import mask_of_largest


@register("mask", "random", paper="SLoRA (Babakniya et al., 2023)")
@dataclass(frozen=True)
class RandomMask(Mask):
    """Train a random subset of the coordinates, the same in every round; the others never change.

        M = the k largest of n random values,    k = max(1, floor(density n)),    drawn from `seed` alone

    Server and clients draw the mask before anything is sent, so the codec `masked` works for uploads and downloads:
    neither the constant coordinates nor any position is sent.

    Args:
        density: share of the coordinates that is trained, above 0 and at most 1.
        seed: seed of the subset.

    >>> import torch
    >>> [int(RandomMask(0.1).trained({"w": torch.zeros(1000)}, version)["w"].sum()) for version in (0, 7)]
    [100, 100]

    Not the codec `RandomK`, which sends random values of an update of all coordinates.
    """

    density: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"density must be above 0 and at most 1, not {self.density}; write density = 0.1")

    fixed = True

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return the mask of the random subset."""
        return {} if self.density == 1 else dict(_draw(Spec.of(coords), self.density, self.seed))


@lru_cache(maxsize=2)  # a model of 22 million weights needs its mask several times a round
def _draw(spec: Spec, density: float, seed: int) -> Tree:
    key = Key(seed).fold("mask")
    return mask_of_largest({block.name: key.fold(block.name).uniform(*block.shape) for block in spec}, density)
