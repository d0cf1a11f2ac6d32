"""Arithmetic on trees: dictionaries from block names to tensors.

Weights, updates, optimizer states and decoded messages are trees. In a *stacked* tree each block has a leading axis:
the clients of a cohort.

>>> import torch
>>> a, b = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])}
>>> add(a, b)["w"].tolist()
[2.0, 3.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from thinwire.core.long_vectors import long_sum, weighted_mean_of_vectors
from thinwire.core.threads import to_host

Tree: TypeAlias = dict[str, Tensor]
_ASIDE = 1 << 22  # bytes that are copied in parallel with later work of a GPU


def tmap(fn: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]) -> Tree:
    """Apply a function block by block; the first tree defines the blocks and their order."""
    return {name: fn(block, *(tree[name] for tree in rest)) for name, block in first.items()}


def add(a: Tree, b: Tree) -> Tree:
    """a + b, block by block."""
    return _elementwise(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, block by block."""
    return _elementwise(torch.sub, a, b)


def scale(tree: Tree, factor: float) -> Tree:
    """factor * tree."""
    return _elementwise(lambda x: x * factor, tree)


def _elementwise(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    """`tmap` of an elementwise function; flat trees take one call on their vectors."""
    flat = [tree for tree in trees if isinstance(tree, FlatTree)]
    if len(flat) < len(trees) or any(list(tree) != list(flat[0]) for tree in flat[1:]):
        return tmap(fn, *trees)
    largest = max(flat, key=lambda tree: tree.vector.dim())
    return type(largest)(fn(*(tree.vector for tree in flat)), flat[0].names, flat[0].like)


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros of the same shapes."""
    return tmap(torch.zeros_like, tree)


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Move a tree to a device; tensors that are on it already are returned unchanged."""
    return bring([tree], device)[0]


def bring(trees: Sequence[Tree], device: torch.device | str) -> list[Tree]:
    """Move several trees to a device, with one transfer per dtype instead of many small ones.

    Moved blocks are views of a few large tensors; blocks that are on the device already are returned unchanged.
    """
    return bring_async(trees, device)()


def bring_async(trees: Sequence[Tree], device: torch.device | str) -> Callable[[], list[Tree]]:
    """Asynchronous `bring`: start the transfers, and return a function that waits for them and returns the trees.

    It does not wait for GPU work that is queued between the two calls.
    """
    device = torch.device(device)
    remote: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tree in trees:
        for block in _tensors(tree):
            if block.device.type != device.type or device.index not in (None, block.device.index):
                remote.setdefault((block.dtype, block.device), []).append(block)
    moved: dict[int, Tensor] = {}
    events: list[torch.cuda.Event] = []
    for (_, source), blocks in remote.items():
        flat = torch.cat([block.reshape(-1) for block in blocks]) if len(blocks) > 1 else blocks[0].reshape(-1)
        if source.type == "cuda" and device.type == "cpu":  # into pinned memory, asynchronously
            aside = len(blocks) > 1 and flat.nbytes >= _ASIDE  # a new tensor, which nothing else writes to
            flat, event = to_host(flat, aside=aside)
            events.append(event)
        else:
            flat = flat.to(device)
        pieces = torch.split(flat, [block.numel() for block in blocks])
        moved |= {id(block): piece.view(block.shape) for block, piece in zip(blocks, pieces, strict=True)}
    result = [_replaced(tree, moved) for tree in trees] if moved else list(trees)

    def wait() -> list[Tree]:
        for event in events:
            event.synchronize()
        return result

    return wait


def _replaced(tree: Tree, moved: Mapping[int, Tensor]) -> Tree:
    """A tree in which moved blocks, by the id of the original tensor, replace the originals."""
    if isinstance(tree, FlatTree):
        return type(tree)(moved.get(id(tree.vector), tree.vector), tree.names, tree.like)
    return {name: moved.get(id(block), block) for name, block in tree.items()}


def restrict(tree: Tree, names: Iterable[str]) -> Tree:
    """The named blocks, in the order of the tree."""
    wanted = set(names)
    if isinstance(tree, FlatTree) and wanted.issuperset(tree.names):
        return tree
    return {name: block for name, block in tree.items() if name in wanted}


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack the trees of several clients: each block gets a leading client axis. The inverse is `unstack`."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def repeat(tree: Tree, clients: int) -> Tree:
    """A stacked tree in which all clients have the same blocks (views, no copy)."""
    return tmap(lambda x: x.expand(clients, *x.shape), tree)


def unstack(tree: Tree, client: int) -> Tree:
    """The tree of one client of a stacked tree (views). The inverse is `stack`."""
    if isinstance(tree, FlatTree):
        return FlatTree(tree.vector[client], tree.names, tree.like)
    return tmap(lambda x: x[client], tree)


def flatten(tree: Tree, dtype: torch.dtype | None = None, zeros: int = 0) -> Tensor:
    """Concatenate all blocks, each row-major, to one vector, of this type if given. The inverse is `unflatten`.

    So many zeros follow.
    """
    if isinstance(tree, FlatTree) and not zeros:
        return tree.vector.to(dtype or tree.vector.dtype)
    blocks = [block.reshape(-1).to(dtype or block.dtype) for block in _tensors(tree)]
    if zeros and blocks:
        blocks.append(blocks[0].new_zeros(zeros))
    return torch.cat(blocks) if blocks else torch.zeros(zeros)


def unflatten(vector: Tensor, like: Tree) -> Tree:
    """Split a vector into blocks of the shapes of `like`; a leading client axis is kept. The inverse is `flatten`."""
    out: Tree = {}
    position = 0
    for name, block in like.items():
        piece = vector[..., position : position + block.numel()]
        out[name] = piece.reshape((*vector.shape[:-1], *block.shape))
        position += block.numel()
    return out


class FlatTree(dict[str, Tensor]):
    """An immutable tree whose blocks are views of one vector, for operations on the vector as a whole.

    The views are created on first access to a block, because many uses need the vector only.

    >>> tree = cut(torch.arange(3.0), ["a", "b"], [torch.zeros(2), torch.zeros(1)])
    >>> tree["b"], tree.vector
    (tensor([2.]), tensor([0., 1., 2.]))
    """

    def __init__(self, vector: Tensor, names: Sequence[str], like: Sequence[Tensor]) -> None:
        super().__init__()
        self.vector, self.names, self.like = vector, names, like

    def _whole(self) -> dict[str, Tensor]:
        """The plain dictionary, with all views created."""
        if not super().__len__() and self.names:
            blocks = _unflatten_dense_tensors(self.vector, self.like)  # type: ignore[no-untyped-call]
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
        """Blocks, as views of the vector."""
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
        raise TypeError("a FlatTree cannot be changed: its vector would not change with it")

    def __reduce__(self) -> tuple:
        return dict, (self.copy(),)  # a pickled or deep copy is a plain dictionary

    __delitem__ = update = __ior__ = pop = popitem = setdefault = clear = __setitem__  # type: ignore[assignment]


def cut(vector: Tensor, names: Sequence[str], like: Sequence[Tensor]) -> FlatTree:
    """Split a vector into blocks of these shapes (views) as a `FlatTree`. Not under vmap."""
    return FlatTree(vector, names, like)


def _tensors(tree: Tree) -> Iterable[Tensor]:
    """All values of a tree in as few tensors as possible."""
    return (tree.vector,) if isinstance(tree, FlatTree) else tree.values()


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """sum_i p_i tree_i with p_i = weight_i / sum of weights, summed in the order given.

    The weights are normalized in float64; the fixed order of summation makes the result reproducible bit for bit.
    """
    total, names = float(sum(weights)), list(trees[0])
    if not names:
        return {}
    flat = [tree for tree in trees if isinstance(tree, FlatTree) and list(tree) == names]
    if len(names) > 1 and len(flat) == len(trees):
        mean = weighted_mean([{"": tree.vector} for tree in flat], weights)[""]
        return cut(mean, names, flat[0].like)
    fractions = [weight / total for weight in weights]
    first = trees[0][names[0]]
    if names == [""] and first.device.type == "cpu" and first.is_floating_point():
        return {"": weighted_mean_of_vectors([tree[""] for tree in trees], fractions)}
    acc = list(torch._foreach_mul([trees[0][name] for name in names], fractions[0]))
    for tree, fraction in zip(trees[1:], fractions[1:], strict=True):
        torch._foreach_add_(acc, [tree[name] for name in names], alpha=fraction)
    return dict(zip(names, acc, strict=True))


def all_finite(tree: Tree) -> bool:
    """Whether no block holds a NaN or an infinity."""
    blocks = [block for block in _tensors(tree) if block.is_floating_point()]
    if not blocks:
        return True
    # a finite sum implies finite terms; an infinite sum may be an overflow, so check each value then
    if blocks[0].device.type == "cpu":
        total = sum(long_sum(block) for block in blocks)
    else:  # one synchronization with the GPU
        total = grand_total(tree).item()
    return math.isfinite(total) or all(bool(torch.isfinite(block).all()) for block in blocks)


def norm(tree: Tree) -> float:
    """The 2-norm of all values of a tree, with a relative error of about 1e-4; not finite if a value is not.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}), norm({"a": torch.tensor([3e38, 0.0])}) > 1e38
    (5.0, True)
    """
    vectors = [block if block.dim() == 1 else block.reshape(-1) for block in _tensors(tree)]
    squares = [float(x.dot(x)) for x in vectors if x.dtype in (torch.float32, torch.float64)]
    square = sum(squares)
    # other types, or squares of float32 values that are too small or too large
    if len(squares) < len(vectors) or not 1e-20 < square < math.inf:
        square = sum(float(x.double().square().sum()) for x in vectors)
    return math.sqrt(square) if square >= 0 else math.nan


def grand_total(*trees: Tree) -> Tensor:
    """The sum of all values of some trees, on their device. It is finite only if all values are.

    >>> grand_total({"a": torch.ones(2)}, {"b": torch.ones(3)}).item()
    5.0
    """
    sums = [block.sum().double() for tree in trees for block in _tensors(tree) if block.is_floating_point()]
    if len(sums) < 2:
        return sums[0] if sums else torch.zeros((), dtype=torch.float64)
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees are equal bit for bit, with the same names in order, shapes and dtypes: -0.0 is not 0.0."""
    return list(a) == list(b) and all(_same_bits(a[name], b[name]) for name in a)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = _BITS.get(a.element_size(), torch.uint8)  # as integers, NaNs with equal bits are equal
    return torch.equal(*(one.reshape(-1).contiguous().view(kind) for one in (a, b)))
