"""Trees of real numbers as one vector and back, for codecs that treat all numbers alike.

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
    """The smallest type that holds every number of these blocks; whole numbers and truth values are refused."""
    for block in spec:
        if not block.dtype.is_floating_point:
            kind = str(block.dtype).removeprefix("torch.")
            raise ConfigError(
                f"block {block.name!r} is of type {kind}, but this codec rounds or drops real numbers; "
                f"send it as it is: ByBlock((({block.name!r}, Raw()), ('*', ...)))"
            )
    types = [block.dtype for block in spec]
    return reduce(torch.promote_types, types) if types else torch.float32


def join(tree: Tree) -> Tensor:
    """All blocks one after another, row-major, on the CPU; not to be written to: one block alone is not copied."""
    dtype = common_type(Spec.of(tree))
    blocks = [block.detach().reshape(-1).to("cpu", dtype) for block in tree.values()]
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat(blocks) if blocks else torch.zeros(0, dtype=dtype)


def cut(vector: Tensor, spec: Spec) -> Tree:
    """The blocks of a vector, each in its own type."""
    out: Tree = {}
    position = 0
    for block in spec:
        out[block.name] = vector[position : position + block.numel].to(block.dtype, copy=True).reshape(block.shape)
        position += block.numel
    return out


def as_one_block(spec: Spec, count: int) -> Spec:
    """What some numbers of these blocks look like when they travel as one block."""
    return Spec((Block("values", (count,), common_type(spec)),))
