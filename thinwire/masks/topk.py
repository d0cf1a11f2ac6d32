"""Train the largest coordinates of each download (Federated Select).

The mask of the largest values of a tree, of all blocks together or within each of them.

Find low-rank adapters that a mask prevents from training, and count what is left of them.

Train a fixed random subset of the coordinates (SLoRA's first stage).

Train some blocks in some rounds only (RoLoRA).

Magnitude pruning during training, once or in several steps (lottery tickets, SparseAdapter, FedSparsify).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

import torch

from thinwire.core.key import Key
from thinwire.core.registry import rare, register_part
from thinwire.core.selection import kept, largest
from thinwire.core.text import NonNegativeInt, PositiveInt, Share
from thinwire.core.tree import Block, Spec, Tree, join, split, tmap
from thinwire.errors import ConfigError
from thinwire.masks.base import Mask


@register_part("mask", "topk", paper="Federated Select (Charles et al., 2022)")
class TopKMask(Mask):
    """Train the largest coordinates of the download; the server keeps all of them, and selects again in every round.

        M = the k largest of |P|,    k = max(1, floor(density n)),    of all blocks together or of each block

    With the download codec `topk` at the same density a client receives P M and computes M from it: the k largest of
    P M are the k largest of P.

    Args:
        density: share of the coordinates that is trained, above 0 and at most 1.
        by: `tree` selects among all coordinates together, `block` within each block. The B of an adapter is smaller
            than A for long, so for adapters write `block`, and the same `by` in the download codec.
        at: rounds in which everything is trained before the first selection. With 1 the B of an adapter, which starts
            at zero, has values that can be compared.

    >>> import torch
    >>> TopKMask(0.5).trained({"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, 0)["w"].tolist()
    [False, True, True, False]

    Not the codec `TopK`, which sends the largest values of an update and their positions.
    """

    density: Share = 0.25
    by: By = rare("tree")
    at: NonNegativeInt = rare(0)

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return the mask of the largest coordinates; everything before version `at`."""
        return {} if self.density == 1 or version < self.at else mask_of_largest(coords, self.density, self.by)


By = Literal["tree", "block"]


def mask_of_largest(coords: Tree, density: float, by: By = "tree") -> Tree:
    """Return True at the k = max(1, floor(density n)) largest magnitudes of all n values; ties go to the first.

    With `by = "block"` that is done for each block alone, so that all of them keep the same share.

    >>> tree = {"a": torch.tensor([1.0, -5.0]), "b": torch.tensor([2.0, 2.0])}
    >>> mask_of_largest(tree, 0.5)
    {'a': tensor([False,  True]), 'b': tensor([ True, False])}
    >>> mask_of_largest({"a": torch.tensor([8.0, 9.0]), "b": torch.tensor([0.1, 0.2])}, 0.5, by="block")
    {'a': tensor([False,  True]), 'b': tensor([False,  True])}
    """
    if by == "block":
        return {name: mask_of_largest({name: block}, density)[name] for name, block in coords.items()}
    vector, spec = join(coords), Spec.of(coords)
    mask = torch.zeros(len(vector), dtype=torch.bool)
    mask[torch.from_numpy(largest(vector, kept(density, len(vector))))] = True
    return split(mask, Spec(tuple(Block(block.name, block.shape, torch.bool) for block in spec)))


def nonzero_b(coords: Tree) -> float | None:
    """Return the share of the values of all B that are not zero; None without adapters.

    Masks and sparse downloads that compare A and B with each other keep little of B, which is smaller: an accuracy then
    says more about the weights that are trained without an adapter.

    Args:
        coords: the coordinates as clients receive them.

    >>> nonzero_b({"fc.weight/a": torch.ones(2, 3), "fc.weight/b": torch.tensor([[0.5, 0.0], [0.0, 0.0]])})
    0.25
    >>> nonzero_b({"fc.weight": torch.ones(3)}) is None
    True
    """
    found = [block for name, block in coords.items() if name.endswith("/b") and not name.startswith("model/")]
    values = sum(block.numel() for block in found)
    return sum(int((block != 0).sum()) for block in found) / values if values else None


@register_part("mask", "random", paper="SLoRA (Babakniya et al., 2023)")
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

    fixed = True
    density: Share = 0.1
    seed: int = 0

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return the mask of the random subset."""
        return {} if self.density == 1 else dict(_draw(Spec.of(coords), self.density, self.seed))


@lru_cache(maxsize=2)  # a model of 22 million weights needs its mask several times a round
def _draw(spec: Spec, density: float, seed: int) -> Tree:
    key = Key(seed).fold("mask")
    return mask_of_largest({block.name: key.fold(block.name).uniform(*block.shape) for block in spec}, density)


@register_part("mask", "turns", paper="RoLoRA (Chen et al., 2024)")
class TurnsMask(Mask):
    """Train groups of blocks in turn, one group a round; blocks of no group are trained in every round.

    Args:
        groups: the selector of each group, in the order of its rounds.

    >>> import torch
    >>> coords = {"w/a": torch.zeros(1), "w/b": torch.zeros(1)}
    >>> [[bool(on) for on in TurnsMask().trained(coords, version).values()] for version in (0, 1, 2)]
    [[False, True], [True, False], [False, True]]

    Not a schedule, which decides what is sent: blocks that wait are trained there.
    """

    groups: tuple[str, ...] = ("*/b", "*/a")

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return False for the blocks of all groups but one."""
        now = self.groups[version % len(self.groups)]
        waits = {n for n in coords for one in self.groups if one != now and fnmatchcase(n, one)}
        return {name: torch.full(block.shape, name not in waits) for name, block in coords.items()}


@register_part("mask", "prune", paper="Frankle and Carbin, ICLR 2019; SparseAdapter, 2022; FedSparsify, 2022")
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

    prunes = True
    density: Share = 0.25
    at: int = 1
    keep: Share = 1.0
    every: PositiveInt = 1
    by: By = rare("tree")

    def __post_init__(self) -> None:
        if self.at < 0 or (self.at == 0 and self.density < 1):
            raise ConfigError(f"at must be 1 or more rounds (or 0 with density = 1), not {self.at}; write at = 1")

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
