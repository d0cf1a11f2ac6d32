"""Stacked trees whose blocks are views of one matrix, for operations on the matrix as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.tree import FlatTree, Tree


class FlatRows(FlatTree):
    """A `FlatTree` of several clients: its `vector` is a matrix with a row for each; `like` is of one client.

    >>> from thinwire.core.tree import cut, sub
    >>> rows = FlatRows(torch.arange(6.0).view(2, 3), ["a", "b"], [torch.zeros(2), torch.zeros(())])
    >>> rows["a"].tolist(), sub(rows, cut(torch.ones(3), ["a", "b"], rows.like))["b"].tolist()
    ([[0.0, 1.0], [3.0, 4.0]], [1.0, 4.0])
    """

    def _whole(self) -> dict[str, Tensor]:
        if not dict.__len__(self) and self.names:
            parts = torch.split(self.vector, [block.numel() for block in self.like], 1)
            blocks = [part.view(-1, *block.shape) for part, block in zip(parts, self.like, strict=True)]
            dict.update(self, zip(self.names, blocks, strict=True))
        return super()._whole()


def blocks_of_one(tree: Tree) -> tuple[Tensor, ...]:
    """Tensors with the shapes of the blocks of one client of a stacked tree."""
    return tuple(tree.like) if isinstance(tree, FlatRows) else tuple(block[0] for block in tree.values())


def as_rows(tree: Tree) -> Tree:
    """A stacked tree as `FlatRows`, so that the values of a client are contiguous; the same tree if its types differ.

    >>> as_rows({"a": torch.zeros(2, 3), "b": torch.ones(2)}).vector.tolist()
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    """
    if isinstance(tree, FlatRows) or len({block.dtype for block in tree.values()}) != 1:
        return tree
    rows = torch.cat([block.reshape(len(block), block[0].numel()) for block in tree.values()], 1)
    return FlatRows(rows, tuple(tree), blocks_of_one(tree))


def as_vector(tree: Tree) -> Tensor | None:
    """The vector of a `FlatTree`; None for another tree."""
    return tree.vector if isinstance(tree, FlatTree) else None


def number_of_values(tree: Tree) -> int:
    """The number of values of all blocks."""
    return tree.vector.numel() if isinstance(tree, FlatTree) else sum(block.numel() for block in tree.values())


def is_cut_as(tree: Tree, names: Sequence[str], like: Sequence[Tensor], dtype: torch.dtype | None) -> bool:
    """Whether a tree is one vector of this type, cut into blocks of these names and shapes."""
    if not isinstance(tree, FlatTree) or tree.vector.dtype != dtype or tuple(tree.names) != tuple(names):
        return False
    return all(mine.shape == its.shape for mine, its in zip(tree.like, like, strict=True))
