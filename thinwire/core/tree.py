"""Trees: dictionaries from block names to tensors, their specs, and arithmetic on them.

Weights, updates, optimizer states and decoded messages are trees. In a *stacked* tree each block has a leading axis:
the clients of a cohort. A `Spec` has the names, shapes and dtypes of a tree, which server and clients know without
sending them. A `Vector` is a tree whose blocks are views of one tensor.

>>> a, b = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])}
>>> add(a, b)["w"].tolist()
[2.0, 3.0]
>>> spec = Spec.of({"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3)})
>>> spec.size, spec.nbytes
(9, 36)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Device
from thinwire.core.parallel import to_host, weighted_sum
from thinwire.errors import ConfigError

Tree: TypeAlias = dict[str, Tensor]

ASIDE_BYTES = 1 << 22  # that are copied in parallel with later work of a GPU
LONG_BLOCK = 1 << 14  # values of a block; a loop over shorter blocks takes longer than a copy of all

# Each dtype that can be sent, with its code in the schema hash and its size in bytes.
DTYPES: dict[torch.dtype, tuple[str, int]] = {
    torch.float32: ("f4", 4),
    torch.float64: ("f8", 8),
    torch.float16: ("f2", 2),
    torch.bfloat16: ("b2", 2),
    torch.int64: ("i8", 8),
    torch.int32: ("i4", 4),
    torch.int16: ("i2", 2),
    torch.int8: ("i1", 1),
    torch.uint8: ("u1", 1),
    torch.bool: ("t1", 1),
}


@dataclass(frozen=True)
class Block:
    """One named tensor of a tree: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise ConfigError(f"block {self.name!r} has type {self.dtype}, which cannot be sent; use one of {known}")

    @cached_property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.numel * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Spec:
    """The blocks of a tree, in order."""

    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, tree: Tree) -> Spec:
        """The spec of a tree."""
        return cls(tuple(Block(name, tuple(t.shape), t.dtype) for name, t in tree.items()))

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Block names, in order."""
        return tuple(block.name for block in self.blocks)

    @cached_property
    def named(self) -> frozenset[str]:
        """Block names as a set."""
        return frozenset(self.names)

    @cached_property
    def size(self) -> int:
        """The number of values of all blocks."""
        return sum(block.numel for block in self.blocks)

    @cached_property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return sum(block.nbytes for block in self.blocks)

    def restrict(self, names: Iterable[str]) -> Spec:
        """The spec of the named blocks, in the order of this spec."""
        wanted = set(names)
        kept = tuple(block for block in self.blocks if block.name in wanted)
        return self if len(kept) == len(self.blocks) else Spec(kept)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all blocks, or None if they differ."""
        kinds = {block.dtype for block in self.blocks}
        return kinds.pop() if len(kinds) == 1 else None

    def shapes(self) -> Tree:
        """A tree of meta tensors, without memory, to infer the shapes of the result of a function."""
        return self.zeros("meta")

    def zeros(self, device: Device = None) -> Tree:
        """A tree of zeros."""
        return {block.name: torch.zeros(block.shape, dtype=block.dtype, device=device) for block in self.blocks}

    def digest(self) -> bytes:
        """A hash of eight bytes of all names, shapes and dtypes in order."""
        h = hashlib.blake2b(digest_size=8)
        for block in self.blocks:
            h.update(f"{block.name}\0{DTYPES[block.dtype][0]}\0{block.shape}\n".encode())
        return h.digest()


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


class Remote(Vector):
    """A Vector whose data is in another process until it is read."""

    def weighted_sum(self, trees: Sequence[Any], fractions: Sequence[float]) -> Vector:
        """sum_i fraction_i tree_i of such trees, in the order given, where they are."""
        raise NotImplementedError


def tmap(fn: Callable[..., Tensor], first: Tree, *rest: Tree) -> Tree:
    """Apply a function block by block; the first tree defines the blocks and their order."""
    return {name: fn(block, *(tree[name] for tree in rest)) for name, block in first.items()}


def add(a: Tree, b: Tree) -> Tree:
    """a + b, block by block."""
    if isinstance(a, Vector) and isinstance(b, Vector) and a.spec.names == b.spec.names:
        return Vector(a.data + b.data, a.spec)
    return {name: block + b[name] for name, block in a.items()}


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, block by block."""
    if isinstance(a, Vector) and isinstance(b, Vector) and a.spec.names == b.spec.names:
        return Vector(a.data - b.data, a.spec)
    return {name: block - b[name] for name, block in a.items()}


def scale(tree: Tree, factor: float) -> Tree:
    """factor * tree."""
    if isinstance(tree, Vector):
        return Vector(tree.data * factor, tree.spec)
    return {name: block * factor for name, block in tree.items()}


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros of the same shapes."""
    return tmap(torch.zeros_like, tree)


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Move a tree to a device; tensors that are on it already are returned unchanged."""
    return bring([tree], device)[0]


def bring(
    trees: Sequence[Tree], device: torch.device | str, pending: list[torch.cuda.Event] | None = None
) -> list[Tree]:
    """Move several trees to a device, with one transfer per dtype instead of many small ones.

    Moved blocks are views of a few large tensors; blocks that are on the device already are returned unchanged.

    Args:
        trees: the trees.
        device: the device.
        pending: a list for the events after which copies from a GPU are complete; without it this function waits for
            them. Waiting for the events does not wait for GPU work that is queued after this call.
    """
    device = torch.device(device)
    remote: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tree in trees:
        for block in _tensors(tree):
            if block.device.type != device.type or device.index not in (None, block.device.index):
                remote.setdefault((block.dtype, block.device), []).append(block)
    if not remote:
        return list(trees)
    moved: dict[int, Tensor] = {}
    events = [] if pending is None else pending
    for (_, source), blocks in remote.items():
        flat = torch.cat([block.reshape(-1) for block in blocks]) if len(blocks) > 1 else blocks[0].reshape(-1)
        if source.type == "cuda" and device.type == "cpu":  # into pinned memory, asynchronously
            aside = len(blocks) > 1 and flat.nbytes >= ASIDE_BYTES  # a new tensor, which nothing else writes to
            flat, event = to_host(flat, aside=aside)
            events.append(event)
        else:
            flat = flat.to(device)
        pieces = torch.split(flat, [block.numel() for block in blocks])
        moved |= {id(block): piece.view(block.shape) for block, piece in zip(blocks, pieces, strict=True)}
    for event in events if pending is None else ():
        event.synchronize()
    return [
        Vector(moved.get(id(tree.data), tree.data), tree.spec)
        if isinstance(tree, Vector)
        else {name: moved.get(id(block), block) for name, block in tree.items()}
        for tree in trees
    ]


def restrict(tree: Tree, names: Iterable[str]) -> Tree:
    """The named blocks, in the order of the tree."""
    wanted = set(names)
    if isinstance(tree, Vector) and wanted.issuperset(tree.spec.names):
        return tree
    return {name: block for name, block in tree.items() if name in wanted}


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack the trees of several clients: each block gets a leading client axis. The inverse is `unstack`."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def repeat(tree: Tree, clients: int) -> Tree:
    """A stacked tree in which all clients have the same blocks (views, no copy)."""
    return {name: block.expand(clients, *block.shape) for name, block in tree.items()}


def unstack(tree: Tree, client: int) -> Tree:
    """The tree of one client of a stacked tree (views). The inverse is `stack`."""
    if isinstance(tree, Vector):
        return Vector(tree.data[client], tree.spec)
    return {name: block[client] for name, block in tree.items()}


def flatten(tree: Tree, dtype: torch.dtype | None = None) -> Tensor:
    """Concatenate all blocks, each row-major, to one vector, of this type if given. The inverse is `unflatten`."""
    if isinstance(tree, Vector):
        return tree.data.to(dtype or tree.data.dtype)
    return torch.cat([block.reshape(-1).to(dtype or block.dtype) for block in tree.values()] or [torch.zeros(0)])


def unflatten(vector: Tensor, like: Tree) -> Tree:
    """Split a vector into blocks of the shapes of `like`; a leading client axis is kept. The inverse is `flatten`."""
    out: Tree = {}
    position = 0
    for name, block in like.items():
        piece = vector[..., position : position + block.numel()]
        out[name] = piece.reshape((*vector.shape[:-1], *block.shape))
        position += block.numel()
    return out


def _tensors(tree: Tree) -> Iterable[Tensor]:
    """All values of a tree in as few tensors as possible."""
    return (tree.data,) if isinstance(tree, Vector) else tree.values()


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """sum_i p_i tree_i with p_i = weight_i / sum of weights, summed in the order given.

    The weights are normalized in float64; the fixed order of summation makes the result reproducible bit for bit.
    """
    total, names, first = float(sum(weights)), list(trees[0]), trees[0]
    if not names:
        return {}
    fractions = [weight / total for weight in weights]
    if isinstance(first, Remote) and all(type(tree) is type(first) for tree in trees):
        return first.weighted_sum(trees, fractions)
    vectors = [tree.data for tree in trees if isinstance(tree, Vector) and list(tree) == names]
    spec = first.spec if isinstance(first, Vector) and len(vectors) == len(trees) else None
    if spec and vectors[0].device.type == "cpu" and vectors[0].is_floating_point():
        return Vector(weighted_sum(vectors, fractions), spec)
    blocks = [[vector] for vector in vectors] if spec else [[tree[name] for name in names] for tree in trees]
    sums = list(torch._foreach_mul(blocks[0], fractions[0]))
    for its, fraction in zip(blocks[1:], fractions[1:], strict=True):
        torch._foreach_add_(sums, its, alpha=fraction)
    return Vector(sums[0], spec) if spec else dict(zip(names, sums, strict=True))


def all_finite(tree: Tree) -> bool:
    """Whether no block holds a NaN or an infinity."""
    # a finite sum implies finite terms; an infinite sum may be an overflow, so check each value then
    return math.isfinite(grand_total(tree).item()) or all(bool(torch.isfinite(block).all()) for block in _tensors(tree))


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


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(one.reshape(-1).contiguous().view(torch.uint8) for one in (a, b)))  # NaNs, too


# -- trees of floating-point values as one vector and back, for codecs that ignore the boundaries of blocks ------------


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

    >>> tree = {"a": torch.zeros(LONG_BLOCK), "b": torch.zeros(LONG_BLOCK, 2)}
    >>> [len(part) // LONG_BLOCK for part in parts(tree)], len(parts({"a": torch.zeros(2), "b": torch.ones(3)}))
    ([1, 2], 1)
    """
    blocks = _vectors(tree)
    if sum(len(block) for block in blocks) >= LONG_BLOCK * len(blocks) > 0:
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
    if isinstance(tree, Vector) and tree.data.dtype.is_floating_point:
        return [tree.data.detach().cpu()]
    dtype = common_type(Spec.of(tree))
    return [block.detach().reshape(-1).to("cpu", dtype) for block in tree.values()]


def split(vector: Tensor, spec: Spec, copy: bool = True) -> Tree:
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


# -- states of optimizers: named slots, each a tree --------------------------------------------------------------------

State: TypeAlias = dict[str, Tree]
"""State of an optimizer: name of a slot -> tree by block, for example `state["momentum"]["fc.weight"]`."""

ALL_BLOCKS = "*"
"""Key of a value that belongs to no single block, for example Adam's step count: `state["count"][ALL_BLOCKS]`."""


def smap(fn: Callable[..., Tensor], first: State, *rest: State) -> State:
    """Apply a function to every block of every slot; the first state determines slots and blocks.

    >>> smap(torch.neg, {"momentum": {"w": torch.ones(1)}})["momentum"]["w"].tolist()
    [-1.0]
    """
    return {slot: tmap(fn, tree, *(state[slot] for state in rest)) for slot, tree in first.items()}


def stack_states(states: Sequence[State]) -> State:
    """One stacked state from the states of several clients."""
    return {slot: stack([state[slot] for state in states]) for slot in states[0]}


def state_to_device(state: State, device: object) -> State:
    """The same state on another device."""
    return dict(zip(state, bring(list(state.values()), str(device)), strict=True))


def restrict_state(state: State, names: Collection[str]) -> State:
    """The entries of the named blocks, and values that belong to no single block.

    >>> state = {"count": {ALL_BLOCKS: torch.ones(())}, "m": {"a": torch.zeros(1), "b": torch.zeros(1)}}
    >>> restrict_state(state, {"b"})
    {'count': {'*': tensor(1.)}, 'm': {'b': tensor([0.])}}
    """
    return {slot: {n: b for n, b in tree.items() if n in names or n == ALL_BLOCKS} for slot, tree in state.items()}


def merge_states(old: State, new: State) -> State:
    """`old` with the entries of `new` replaced or added.

    >>> one, two = torch.ones(1), torch.zeros(1)
    >>> merge_states({"m": {"a": one, "b": one}}, {"m": {"b": two}})["m"]["b"].item()
    0.0
    """
    return {slot: {**old.get(slot, {}), **new.get(slot, {})} for slot in {**old, **new}}
