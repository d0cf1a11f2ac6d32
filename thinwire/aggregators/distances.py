"""Distances between client updates, from the inner products of all pairs.

    |x_i - x_j|^2 = <x_i, x_i> + <x_j, x_j> - 2 <x_i, x_j>

The distance to a convex combination z = sum_j p_j x_j follows from the same products, so an iterative method reads the
updates only once. For 100 clients of 10 million values that is 10^11 multiplications.

Sums are in float64, over slices of the values, in the order of the blocks. A squared distance is exact to about 1e-15
of |x_i|^2 + |x_j|^2; its last bits depend on the order of summation in the BLAS library, so two clients whose distances
differ by less may be ordered differently on another machine. Only the server computes distances.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.tree import FlatTree, Tree

_SLICE = 1 << 15  # values of each client that are processed together: memory grows with this, not with the model


def inner_products(trees: Sequence[Tree]) -> Tensor:
    """Return <x_i, x_j> for all pairs of trees, as a matrix of float64.

    >>> inner_products([{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([1.0, 0.0])}]).tolist()
    [[25.0, 3.0], [3.0, 1.0]]
    """
    out = torch.zeros(len(trees), len(trees), dtype=torch.float64)
    for vectors in _blocks(trees):
        for start in range(0, len(vectors[0]), _SLICE):
            rows = torch.stack([vector[start : start + _SLICE] for vector in vectors]).double()
            out += rows @ rows.T
    return out


def _blocks(trees: Sequence[Tree]) -> list[list[Tensor]]:
    """Return for each block the vectors of all clients; a single block if every tree is one vector."""
    if all(isinstance(tree, FlatTree) and tree.names == trees[0].names for tree in trees):  # type: ignore[attr-defined]
        return [[tree.vector for tree in trees]]  # type: ignore[attr-defined]
    return [[tree[name].reshape(-1) for tree in trees] for name in trees[0]]


def squares_between(products: Tensor) -> Tensor:
    """Return |x_i - x_j|^2 for all pairs, from their inner products.

    >>> squares_between(torch.tensor([[25.0, 3.0], [3.0, 1.0]])).tolist()
    [[0.0, 20.0], [20.0, 0.0]]
    """
    own = products.diagonal()
    return (own[:, None] + own[None, :] - 2 * products).clamp(min=0).fill_diagonal_(0)


def squares_from(products: Tensor, shares: Tensor) -> Tensor:
    """Return |x_i - z|^2 for all i, where z = sum_j shares_j x_j, from the inner products of the x.

    >>> squares_from(torch.tensor([[25.0, 3.0], [3.0, 1.0]]), torch.tensor([0.5, 0.5])).tolist()
    [5.0, 5.0]
    """
    along = products @ shares
    return (products.diagonal() - 2 * along + shares @ along).clamp(min=0)
