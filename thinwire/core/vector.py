"""Vectors: trees whose blocks are views of one tensor, with the clients on a leading axis if there are several."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

Tree: TypeAlias = dict[str, Tensor]


class Vector(dict[str, Tensor]):
    """An immutable tree whose blocks are views of one tensor, for operations on all values at once.

    The views are created on first access to a block, because many uses need the tensor only.

    Args:
        data: (values,), or (clients, values) for the trees of several clients.
        names: names of the blocks.
        like: tensors with the shapes of the blocks of one client.

    >>> shapes = [torch.zeros(2), torch.zeros(())]
    >>> one, many = (Vector(data, ["a", "b"], shapes) for data in (torch.arange(3.0), torch.arange(6.0).view(2, 3)))
    >>> one["b"], many["a"].tolist(), many.row(1)["b"]
    (tensor(2.), [[0.0, 1.0], [3.0, 4.0]], tensor(5.))
    """

    def __init__(self, data: Tensor, names: Sequence[str], like: Sequence[Tensor]) -> None:
        super().__init__()
        self.data, self.names, self.like = data, names, like

    @staticmethod
    def rows(tree: Tree) -> Tree:
        """A stacked tree as a Vector, so that the values of a client are contiguous; the same tree if its types differ.

        >>> Vector.rows({"a": torch.zeros(2, 3), "b": torch.ones(2)}).data.tolist()
        [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
        """
        if isinstance(tree, Vector) or len({block.dtype for block in tree.values()}) != 1:
            return tree
        rows = torch.cat([block.reshape(len(block), block[0].numel()) for block in tree.values()], 1)
        return Vector(rows, tuple(tree), tuple(block[0] for block in tree.values()))

    def row(self, client: int) -> Vector:
        """The tree of one client."""
        return Vector(self.data[client], self.names, self.like)

    def with_data(self, data: Tensor) -> Vector:
        """The same blocks with other values."""
        return Vector(data, self.names, self.like)

    def _whole(self) -> dict[str, Tensor]:
        """The plain dictionary, with all views created."""
        if not super().__len__() and self.names:
            if self.data.dim() == 1:  # twice as fast as the general case
                blocks = _unflatten_dense_tensors(self.data, self.like)  # type: ignore[no-untyped-call]
            else:
                parts = torch.split(self.data, [block.numel() for block in self.like], -1)
                blocks = [part.view(-1, *block.shape) for part, block in zip(parts, self.like, strict=True)]
            super().update(zip(self.names, blocks, strict=True))
        return super()  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        return self._whole().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The block of that name, or the default."""
        return self._whole().get(name, default)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Block names."""
        return self._whole().keys()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        """Blocks, as views of the data."""
        return self._whole().values()

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override]
        """Pairs of name and block."""
        return self._whole().items()

    def copy(self) -> Tree:
        """A plain dictionary of the same blocks."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.copy())

    def __setitem__(self, name: str, block: Tensor) -> None:
        raise TypeError("a Vector cannot be changed: its data would not change with it")

    def __reduce__(self) -> tuple:
        return dict, (self.copy(),)  # a pickled or deep copy is a plain dictionary

    __delitem__ = update = __ior__ = pop = popitem = setdefault = clear = __setitem__  # type: ignore[assignment]
