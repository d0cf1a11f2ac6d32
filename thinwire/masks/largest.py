"""The mask of the largest values of a tree, of all blocks together or within each of them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from thinwire.core.selection import kept, largest
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import cut, join
from thinwire.errors import ConfigError

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
    return cut(mask, Spec(tuple(Block(block.name, block.shape, torch.bool) for block in spec)))


def check_by(by: str) -> None:
    """Raise a ConfigError for an unknown `by`."""
    if by not in get_args(By):
        raise ConfigError(f"by must be one of {', '.join(get_args(By))}, not {by!r}; write by = 'block'")
