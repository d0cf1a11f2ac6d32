"""Trees of floating-point values as one vector and back, for codecs that ignore the boundaries of blocks.

>>> tree = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0, dtype=torch.float16)}
>>> join(tree), cut(join(tree), Spec.of(tree))["b"]
(tensor([1., 2., 3.]), tensor(3., dtype=torch.float16))
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError


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
    dtype = common_type(Spec.of(tree))
    blocks = [block.detach().reshape(-1).to("cpu", dtype) for block in tree.values()]
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks) if blocks else torch.zeros(0, dtype=dtype)


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
