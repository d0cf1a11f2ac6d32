"""Trees of floating-point values as one vector and back, for codecs that ignore the boundaries of blocks.

>>> tree = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0, dtype=torch.float16)}
>>> join(tree), cut(join(tree), Spec.of(tree))["b"]
(tensor([1., 2., 3.]), tensor(3., dtype=torch.float16))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from thinwire.core.spec import Block, Spec
from thinwire.core.tree import FlatTree, Tree
from thinwire.errors import ConfigError

LONG = 1 << 14  # values of a block; a loop over shorter blocks takes longer than a copy of all


def common_type(spec: Spec) -> torch.dtype:
    """The smallest floating-point dtype that holds all blocks; raises a ConfigError for integers and booleans."""
    for block in spec:
        if not block.dtype.is_floating_point:
            kind = str(block.dtype).removeprefix("torch.")
            raise ConfigError(
                f"block {block.name!r} is of type {kind}, but this codec takes floating point only; "
                f"send it unchanged: ByBlock((({block.name!r}, Raw()), ('*', ...)))"
            )
    types = [block.dtype for block in spec]
    return reduce(torch.promote_types, types) if types else torch.float32


def join(tree: Tree) -> Tensor:
    """Concatenate all blocks, row-major, on the CPU. Do not write to the result: a single block is not copied."""
    blocks = _vectors(tree)
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks) if blocks else torch.zeros(0)


def parts(tree: Tree) -> list[Tensor]:
    """The vector of `join` in consecutive parts: long blocks as they are, which takes no copy, short ones joined.

    >>> tree = {"a": torch.zeros(LONG), "b": torch.zeros(LONG, 2)}
    >>> [len(part) for part in parts(tree)] == [LONG, 2 * LONG], len(parts({"a": torch.zeros(2), "b": torch.ones(3)}))
    (True, 1)
    """
    blocks = _vectors(tree)
    if sum(len(block) for block in blocks) >= LONG * len(blocks) > 0:
        return blocks
    return [torch.cat(blocks) if blocks else torch.zeros(0)]


def gather(vector: Sequence[Tensor], at: np.ndarray) -> Tensor:
    """The values at ascending positions of a vector that is given in parts.

    >>> gather([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], np.array([0, 2, 3]))
    tensor([1., 3., 4.])
    """
    starts = np.cumsum([0, *map(len, vector)]).tolist()
    ends = np.searchsorted(at, starts).tolist()
    short = vector[0].dtype is torch.bfloat16  # which numpy does not have
    arrays = [(part.view(torch.int16) if short else part).numpy() for part in vector]
    found = np.empty(len(at), arrays[0].dtype)
    for part, first, start, end in zip(arrays, starts[:-1], ends[:-1], ends[1:], strict=True):
        here = at[start:end] - first if first else at[start:end]
        part.take(here, out=found[start:end], mode="clip")  # faster than a check of each position
    return torch.from_numpy(found).view(vector[0].dtype)


def _vectors(tree: Tree) -> list[Tensor]:
    """Each block as a vector on the CPU, all of the common type; a flat tree is one vector."""
    if isinstance(tree, FlatTree) and tree.vector.dtype.is_floating_point:
        return [tree.vector.detach().cpu()]
    dtype = common_type(Spec.of(tree))
    return [block.detach().reshape(-1).to("cpu", dtype) for block in tree.values()]


def cut(vector: Tensor, spec: Spec, copy: bool = True) -> Tree:
    """Split a vector into blocks, each of its own dtype; without `copy` they may be views. The inverse of `join`."""
    out: Tree = {}
    position = 0
    for block in spec:
        out[block.name] = vector[position : position + block.numel].to(block.dtype, copy=copy).reshape(block.shape)
        position += block.numel
    return out


def as_one_block(spec: Spec, count: int) -> Spec:
    """The spec of `count` values of these blocks, sent as one block named `values`."""
    return Spec((Block("values", (count,), common_type(spec)),))
