"""Magnitude pruning during training, once or in several steps (lottery tickets, SparseAdapter, FedSparsify)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from thinwire.core.registry import register, short_repr
from thinwire.core.tree import Tree, tmap
from thinwire.errors import ConfigError
from thinwire.masks.base import Mask
from thinwire.masks.largest import By, check_by, mask_of_largest


@register("mask", "prune", paper="Frankle and Carbin, ICLR 2019; SparseAdapter, 2022; FedSparsify, 2022")
@dataclass(frozen=True)
class PruneMask(Mask):
    """Set all but the largest coordinates to zero, once or in several steps; pruned coordinates stay zero.

        density(v) = 1 before version `at`,  then  density * keep^floor((v - at) / every)
        at a version where it decreases:    M = the k largest of |P|,  P <- P M
        at other versions:                  M = where P is not zero; gradients, steps and optimizer state under M

    A coordinate that training sets to exactly zero is pruned, too.

    Args:
        density: share of the coordinates that the first pruning keeps; 1 prunes nothing at `at`.
        at: version of the first pruning, that is after so many rounds. 0, with density 1, only sets the origin of
            `every`.
        keep: share that every later pruning keeps.
        every: rounds between prunings.
        by: `tree` compares all coordinates with each other, `block` those of a block: then A and B of an adapter keep
            the same share. After the first steps B is much smaller than A, and `tree` may leave none of it.

    FLASC's lottery tickets prune before every q-th round, and keep everything the first time: round s trains at a
    density of keep^(floor(s / q) - 1). Round s starts from version s - 1, so that is `at = q - 1` and `every = q`:

    >>> [round(PruneMask(1.0, at=0, keep=0.5, every=1).share(s - 1), 3) for s in (1, 2, 3, 4)]
    [1.0, 0.5, 0.25, 0.125]
    >>> [round(PruneMask(1.0, at=1, keep=0.5, every=2).share(s - 1), 3) for s in (1, 2, 3, 4, 5, 6)]
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    >>> PruneMask(0.5).left({}, {"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, version=1)["w"].tolist()
    [False, True, True, False]

    Not `TopKMask`: there the server keeps all coordinates, and another subset may be trained in the next round.
    """

    density: float = 0.25
    at: int = 1
    keep: float = 1.0
    every: int = 1
    by: By = field(default="tree", metadata={"rare": True})
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_by(self.by)
        for name, value in (("density", self.density), ("keep", self.keep)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, not {value}; write for example {name} = 0.25")
        if self.every < 1:
            raise ConfigError(f"every must be 1 or more rounds, not {self.every}")
        if self.at < 0 or (self.at == 0 and self.density < 1):
            raise ConfigError(f"at must be 1 or more rounds (or 0 with density = 1), not {self.at}; write at = 1")

    prunes = True

    def share(self, version: int) -> float:
        """Return the share of the coordinates that is kept at a version."""
        if version < self.at:
            return 1.0
        return float(self.density * self.keep ** ((version - self.at) // self.every))

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return where coordinates are not zero; everything before the first pruning."""
        return {} if self.share(version) == 1 else tmap(lambda block: block != 0, coords)

    def left(self, before: Tree, after: Tree, version: int) -> Tree:
        """Return the mask of `before`, reduced to the largest coordinates where the density decreases."""
        mask = self.trained(before, version - 1)
        if self.share(version) == self.share(version - 1):
            return mask
        if mask:
            after = tmap(lambda block, stays: torch.where(stays, block, 0), after, mask)
        return mask_of_largest(after, self.share(version), self.by)
