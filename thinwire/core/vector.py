"""Vectors: trees whose blocks are views of one tensor, with the clients on a leading axis if there are several."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire.core.spec import Spec, Tree as Tree


@dataclass(frozen=True, eq=False, repr=False)
class Vector(dict[str, Tensor]):
    """An immutable tree whose blocks are views of one tensor, for operations on all values at once.

    The views are created on first access to a block, because many uses need the tensor only.

    Args:
        data: (values,), or (clients, values) for the trees of several clients.
        spec: the blocks of one client.

    >>> spec = Spec.of({"a": torch.zeros(2), "b": torch.zeros(())})
    >>> one, many = Vector(torch.arange(3.0), spec), Vector(torch.arange(6.0).view(2, 3), spec)
    >>> one["b"], many["a"].tolist()
    (tensor(2.), [[0.0, 1.0], [3.0, 4.0]])
    """

    data: Tensor
    spec: Spec

    @staticmethod
    def rows(tree: Tree, spec: Spec) -> Tree:
        """A stacked tree as a Vector, so that the values of a client are contiguous; the same tree if its types differ.

        >>> tree = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
        >>> Vector.rows(tree, Spec.of({"a": torch.zeros(3), "b": torch.zeros(())})).data.tolist()
        [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
        """
        if isinstance(tree, Vector) or spec.dtype is None:
            return tree
        blocks = [(tree[block.name], block.numel) for block in spec.blocks]
        return Vector(torch.cat([block.reshape(len(block), numel) for block, numel in blocks], 1), spec)

    @cached_property
    def blocks(self) -> dict[str, Tensor]:
        """A plain dictionary of the same blocks."""
        blocks, clients = self.spec.blocks, self.data.shape[:-1]
        parts = torch.split(self.data, [block.numel for block in blocks], -1)
        return {block.name: part.view((*clients, *block.shape)) for block, part in zip(blocks, parts, strict=True)}

    def __len__(self) -> int:
        return len(self.spec.blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self.spec.names)

    def __contains__(self, name: object) -> bool:
        return name in self.spec.named

    def __getitem__(self, name: str) -> Tensor:
        return self.blocks[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The block of that name, or the default."""
        return self.blocks.get(name, default)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Block names."""
        return self.blocks.keys()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        """Blocks, as views of the data."""
        return self.blocks.values()

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override]
        """Pairs of name and block."""
        return self.blocks.items()

    def copy(self) -> Tree:
        """A plain dictionary of the same blocks, which may be changed."""
        return self.blocks.copy()

    def __or__(self, other: Any) -> Any:
        return self.blocks | other

    def __ror__(self, other: Any) -> Any:
        return other | self.blocks

    def __eq__(self, other: object) -> bool:
        return self.blocks == other

    def __ne__(self, other: object) -> bool:
        return self.blocks != other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.blocks)

    def __reduce__(self) -> tuple:
        return dict, (self.blocks,)  # a pickled or deep copy is a plain dictionary

    def __setitem__(self, name: str, block: Tensor) -> None:
        raise TypeError("a Vector cannot be changed: its data would not change with it")

    __delitem__ = update = __ior__ = pop = popitem = setdefault = clear = __setitem__  # type: ignore[assignment]
