"""Arithmetic on trees: dictionaries from block names to tensors.

Weights, changes of weights, optimiser states and messages are all trees. A *stacked* tree carries the clients of a
cohort on a leading axis of every block.

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

from thinwire.core.threads import each

Tree: TypeAlias = dict[str, Tensor]
_SLICE = 1 << 18  # numbers of a long vector that are averaged at a time: they fit into the cache of a core


def tmap(fn: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]) -> Tree:
    """Apply a function block by block; the first tree says which blocks."""
    return {name: fn(block, *(tree[name] for tree in rest)) for name, block in first.items()}


def add(a: Tree, b: Tree) -> Tree:
    """a + b, block by block."""
    return _number_by_number(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, block by block."""
    return _number_by_number(torch.sub, a, b)


def scale(tree: Tree, factor: float) -> Tree:
    """factor * tree."""
    return _number_by_number(lambda x: x * factor, tree)


def _number_by_number(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    """`tmap` of a function that looks at no number's neighbours: trees that lie in one vector each take one call."""
    cuts = [tree for tree in trees if isinstance(tree, FlatTree)]
    if len(cuts) < len(trees) or any(list(tree) != list(cuts[0]) for tree in cuts[1:]):
        return tmap(fn, *trees)
    return cut(fn(*(tree.vector for tree in cuts)), cuts[0].names, cuts[0].like)


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros of the same shapes."""
    return tmap(torch.zeros_like, tree)


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """The same tree on another device (the same tensors where they already are there)."""
    return bring([tree], device)[0]


def bring(trees: Sequence[Tree], device: torch.device | str) -> list[Tree]:
    """Several trees on another device, in one transfer for each number type: many small ones would each have to wait.

    Blocks that were elsewhere are then views of a few large tensors; those that are already there stay as they are.
    """
    return begin_to_bring(trees, device)()


def begin_to_bring(trees: Sequence[Tree], device: torch.device | str) -> Callable[[], list[Tree]]:
    """The same in two parts: what is returned waits until all is there.

    What a GPU is asked for in between does not have to be done by then.
    """
    device = torch.device(device)
    away: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tree in trees:
        for block in _tensors(tree):
            if block.device.type != device.type or device.index not in (None, block.device.index):
                away.setdefault((block.dtype, block.device), []).append(block)
    arrived: dict[int, Tensor] = {}
    events: list[torch.cuda.Event] = []
    for (_, source), blocks in away.items():
        flat = torch.cat([block.reshape(-1) for block in blocks]) if len(blocks) > 1 else blocks[0].reshape(-1)
        if source.type == "cuda" and device.type == "cpu":  # into pinned memory, which a GPU can write to by itself
            flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
            events.append(torch.cuda.current_stream(source).record_event())
        else:
            flat = flat.to(device)
        pieces = torch.split(flat, [block.numel() for block in blocks])
        arrived |= {id(block): piece.view(block.shape) for block, piece in zip(blocks, pieces, strict=True)}
    there = [_arrived(tree, arrived) for tree in trees]

    def wait() -> list[Tree]:
        for event in events:
            event.synchronize()
        return there

    return wait


def _arrived(tree: Tree, arrived: Mapping[int, Tensor]) -> Tree:
    """A tree with blocks that are elsewhere now, by the ids of those that they stand for."""
    if isinstance(tree, FlatTree):
        return cut(arrived.get(id(tree.vector), tree.vector), tree.names, tree.like)
    return {name: arrived.get(id(block), block) for name, block in tree.items()}


def restrict(tree: Tree, names: Iterable[str]) -> Tree:
    """Only the named blocks, in the tree's own order."""
    wanted = set(names)
    if isinstance(tree, FlatTree) and wanted.issuperset(tree.names):
        return tree
    return {name: block for name, block in tree.items() if name in wanted}


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree with a leading client axis from several of one client each."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def repeat(tree: Tree, clients: int) -> Tree:
    """A stacked tree in which every client has the same blocks (views, no copy)."""
    return tmap(lambda x: x.expand(clients, *x.shape), tree)


def unstack(tree: Tree, client: int) -> Tree:
    """One client's tree out of a stacked one (views)."""
    return tmap(lambda x: x[client], tree)


def flatten(tree: Tree) -> Tensor:
    """All blocks as one vector, in the tree's order, each row-major."""
    if isinstance(tree, FlatTree):
        return tree.vector
    blocks = [block.reshape(-1) for block in tree.values()]
    return torch.cat(blocks) if blocks else torch.zeros(0)


def unflatten(vector: Tensor, like: Tree) -> Tree:
    """FlatTree a vector into blocks of the shapes of `like`; a leading client axis of the vector is kept."""
    out: Tree = {}
    position = 0
    for name, block in like.items():
        piece = vector[..., position : position + block.numel()]
        out[name] = piece.reshape((*vector.shape[:-1], *block.shape))
        position += block.numel()
    return out


class FlatTree(dict[str, Tensor]):
    """A tree whose blocks lie one after another in one vector, which may be used in their place. It cannot be changed.

    It is cut when somebody first asks for a block: many only want the vector.

    >>> tree = cut(torch.arange(3.0), ["a", "b"], [torch.zeros(2), torch.zeros(1)])
    >>> tree["b"], tree.vector
    (tensor([2.]), tensor([0., 1., 2.]))
    """

    def __init__(self, vector: Tensor, names: Sequence[str], like: Sequence[Tensor]) -> None:
        super().__init__()
        self.vector, self.names, self.like = vector, names, like

    def _whole(self) -> dict[str, Tensor]:
        """What a dictionary can do, once the blocks are there."""
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
        """A block, if there is one of that name."""
        return self._whole().get(name, default)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """The names."""
        return self._whole().keys()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        """The blocks."""
        return self._whole().values()

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override]
        """Both."""
        return self._whole().items()

    def copy(self) -> Tree:
        """An ordinary tree of the same blocks."""
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
        raise TypeError("a cut tree cannot be changed: its vector would not follow")

    def __reduce__(self) -> tuple:
        return dict, (self.copy(),)  # a copy elsewhere is an ordinary tree

    __delitem__ = update = __ior__ = pop = popitem = setdefault = clear = __setitem__  # type: ignore[assignment]


def cut(vector: Tensor, names: Sequence[str], like: Sequence[Tensor]) -> FlatTree:
    """FlatTree a vector into blocks of these shapes (views), in one call: models have hundreds of blocks. Not under vmap."""
    return FlatTree(vector, names, like)


def _tensors(tree: Tree) -> Iterable[Tensor]:
    """All numbers of a tree, in as few tensors as hold them."""
    return (tree.vector,) if isinstance(tree, FlatTree) else tree.values()


def as_matrix(tree: Tree) -> Tensor | None:
    """A stacked tree as one matrix with a row for each client, by a copy; None if its number types differ.

    >>> as_matrix({"a": torch.zeros(2, 3), "b": torch.ones(2)}).tolist()
    [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    """
    if len({block.dtype for block in tree.values()}) != 1:
        return None
    return torch.cat([block.reshape(len(block), block[0].numel()) for block in tree.values()], 1)


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """sum_i p_i tree_i with p_i = weight_i / sum of weights, summed in the order given.

    The weights are normalised in float64; a fixed order of summation makes the result the same bits every time.
    """
    total, names = float(sum(weights)), list(trees[0])
    if not names:
        return {}
    cuts = [tree for tree in trees if isinstance(tree, FlatTree) and list(tree) == names]
    if len(names) > 1 and len(cuts) == len(trees):
        mean = weighted_mean([{"": tree.vector} for tree in cuts], weights)[""]
        return cut(mean, names, cuts[0].like)
    shares = [weight / total for weight in weights]
    if names == [""] and trees[0][""].numel() > _SLICE and trees[0][""].device.type == "cpu":
        return {"": _mean_by_slices([tree[""] for tree in trees], shares)}
    acc = list(torch._foreach_mul([trees[0][name] for name in names], shares[0]))
    for tree, share in zip(trees[1:], shares[1:], strict=True):
        torch._foreach_add_(acc, [tree[name] for name in names], alpha=share)
    return dict(zip(names, acc, strict=True))


def _mean_by_slices(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The same, of long vectors, some slices on each core: what is summed up stays in its cache."""
    out = torch.empty_like(vectors[0])

    def average(start: int) -> None:
        here = slice(start, start + _SLICE)
        torch.mul(vectors[0][here], shares[0], out=out[here])
        for vector, share in zip(vectors[1:], shares[1:], strict=True):
            out[here].add_(vector[here], alpha=share)

    each(average, range(0, len(out), _SLICE), len(vectors) * _SLICE * out.element_size())
    return out


def all_finite(tree: Tree) -> bool:
    """Whether no block holds a NaN or an infinity."""
    blocks = [block for block in _tensors(tree) if block.is_floating_point()]
    if not blocks:
        return True
    # a sum is finite only if all its terms are; if it is not, it may have been too large, so look at each number
    if blocks[0].device.type == "cpu":
        total = sum(block.sum().item() for block in blocks)
    else:  # one answer to wait for
        total = grand_total(tree).item()
    return math.isfinite(total) or all(bool(torch.isfinite(block).all()) for block in blocks)


def norm(tree: Tree) -> float:
    """The 2-norm of all values of a tree; not finite if one of them is not. Exact to about 1e-4 of itself.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}), norm({"a": torch.tensor([3e38, 0.0])}) > 1e38
    (5.0, True)
    """
    vectors = [block.reshape(-1) for block in _tensors(tree)]
    square = sum(float(x.dot(x)) for x in vectors if x.dtype in (torch.float32, torch.float64))
    rest = [x for x in vectors if x.dtype not in (torch.float32, torch.float64)]
    if rest or not 1e-20 < square < math.inf:  # squares of float32 values that are too small, or too large
        square = sum(float(x.double().square().sum()) for x in vectors)
    return math.sqrt(square) if square >= 0 else math.nan


def grand_total(*trees: Tree) -> Tensor:
    """The sum of all numbers of some trees, where they are. It is finite only if all of them are.

    >>> grand_total({"a": torch.ones(2)}, {"b": torch.ones(3)}).item()
    5.0
    """
    sums = [block.sum().double() for tree in trees for block in _tensors(tree) if block.is_floating_point()]
    return torch.stack([one.to(sums[0].device) for one in sums]).sum() if sums else torch.zeros((), dtype=torch.float64)


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees are equal bit for bit: names in order, shapes, types and every bit, so -0.0 is not 0.0."""
    return list(a) == list(b) and all(_same_bits(a[name], b[name]) for name in a)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers of so many bytes


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = _BITS.get(a.element_size(), torch.uint8)  # whole numbers are equal where all bits are, also of a NaN
    return torch.equal(*(one.reshape(-1).contiguous().view(kind) for one in (a, b)))
