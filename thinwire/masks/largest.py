"""The mask of the largest values of a tree, over all blocks together."""

from __future__ import annotations

import torch

from thinwire.core.selection import kept, largest
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import cut, join


def mask_of_largest(coords: Tree, density: float) -> Tree:
    """Return True at the k = max(1, floor(density n)) largest magnitudes of all n values; ties go to the first.

    >>> mask_of_largest({"a": torch.tensor([1.0, -5.0]), "b": torch.tensor([2.0, 2.0])}, 0.5)
    {'a': tensor([False,  True]), 'b': tensor([ True, False])}
    """
    vector, spec = join(coords), Spec.of(coords)
    mask = torch.zeros(len(vector), dtype=torch.bool)
    mask[torch.from_numpy(largest(vector, kept(density, len(vector))))] = True
    return cut(mask, Spec(tuple(Block(block.name, block.shape, torch.bool) for block in spec)))
