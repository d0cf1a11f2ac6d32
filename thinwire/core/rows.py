"""The values of several clients as one matrix, with a row for each client."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.core.threads import LEAST
from thinwire.core.tree import FlatTree, Tree

_MARGIN = 64  # bytes; enough for the header of a message with few blocks


class Rows(NamedTuple):
    """A matrix with a row for each client, and free memory around each row, where a message can be written.

    Args:
        whole: the matrix with its margins.
        margin: values before those of a client; at least as many are after them.
        size: values of a client.
    """

    whole: Tensor
    margin: int
    size: int

    @property
    def values(self) -> Tensor:
        """The matrix without its margins."""
        return self.whole[:, self.margin : self.margin + self.size] if self.margin else self.whole

    def room(self, i: int) -> np.ndarray | None:
        """The bytes of row i on the CPU, with its margins; None if it has none."""
        return self.whole[i].view(torch.uint8).numpy() if self.margin else None


def as_rows(tree: Tree) -> Rows | None:
    """A stacked tree as rows, a copy except of short `FlatRows`; None if its dtypes differ.

    Long rows have margins, and begin at addresses that are multiples of 64 as far as the matrix does.

    >>> as_rows({"a": torch.zeros(2, 3), "b": torch.ones(2)}).values.tolist()
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    """
    one = tree.vector if isinstance(tree, FlatTree) else None
    if one is None and len({block.dtype for block in tree.values()}) != 1:
        return None
    blocks = [block.reshape(len(block), block[0].numel()) for block in tree.values()] if one is None else [one]
    size, margin = sum(block.shape[1] for block in blocks), 0
    if size * blocks[0].element_size() >= LEAST:
        margin = _MARGIN // blocks[0].element_size()
        zeros = blocks[0].new_zeros(len(blocks[0]), margin + -size % margin)
        blocks = [zeros[:, :margin], *blocks, zeros]
    return Rows(torch.cat(blocks, 1) if one is None or margin else one, margin, size)
