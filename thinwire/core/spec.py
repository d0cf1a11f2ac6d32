"""What both ends know about a tree without sending it: names, shapes and number types; and selectors on names.

>>> import torch
>>> spec = Spec.of({"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3)})
>>> spec.size, spec.nbytes
(9, 36)
>>> select(spec.names, ("*.weight",))
('fc.weight',)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor

from thinwire.core.key import Device
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError

# Each number type that may travel, with its code in the schema hash and its size in bytes.
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
    """One named tensor of a tree: its name, shape and number type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise ConfigError(f"block {self.name!r} has type {self.dtype}, which cannot be sent; use one of {known}")

    @cached_property
    def numel(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """How many bytes when sent as they are."""
        return self.numel * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Spec:
    """The blocks of a tree, in order."""

    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, tree: Tree) -> Spec:
        """The specification of a tree."""
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
        """The same without an order."""
        return frozenset(self.names)

    @cached_property
    def size(self) -> int:
        """How many numbers in all."""
        return sum(block.numel for block in self.blocks)

    @cached_property
    def nbytes(self) -> int:
        """How many bytes in all when sent as they are."""
        return sum(block.nbytes for block in self.blocks)

    def restrict(self, names: Iterable[str]) -> Spec:
        """Only the named blocks, in this order."""
        wanted = set(names)
        kept = tuple(block for block in self.blocks if block.name in wanted)
        return self if len(kept) == len(self.blocks) else Spec(kept)

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The number type of all blocks, if they share one."""
        kinds = {block.dtype for block in self.blocks}
        return kinds.pop() if len(kinds) == 1 else None

    @cached_property
    def like(self) -> tuple[Tensor, ...]:
        """Tensors of these shapes and types that hold no memory."""
        return tuple(torch.empty(block.shape, dtype=block.dtype, device="meta") for block in self.blocks)

    def shapes(self) -> Tree:
        """A tree of these blocks that holds no memory: for learning the shapes of what a function makes of it."""
        return dict(zip(self.names, self.like, strict=True))

    def zeros(self, device: Device = None) -> Tree:
        """A tree of zeros."""
        return {block.name: torch.zeros(block.shape, dtype=block.dtype, device=device) for block in self.blocks}

    def digest(self) -> bytes:
        """Eight bytes that change when any name, shape, type or the order changes."""
        h = hashlib.blake2b(digest_size=8)
        for block in self.blocks:
            h.update(f"{block.name}\0{DTYPES[block.dtype][0]}\0{block.shape}\n".encode())
        return h.digest()


def weight_of(name: str) -> str:
    """The weight that a coordinate belongs to: what stands before its last slash.

    >>> weight_of("fc.weight/x1"), weight_of("fc.weight"), weight_of("model/b")
    ('fc.weight', 'fc.weight', 'model')
    """
    return name.rpartition("/")[0] or name


def layer_of(name: str) -> str:
    """The layer of a block: the module whose weight it is, or is a coordinate of.

    Weights of the outermost module, and coordinates of all weights together, belong to the layer `model`.

    >>> [layer_of(name) for name in ("body.fc.weight", "body.fc.bias", "body.fc.weight/x1", "scale", "model/b")]
    ['body.fc', 'body.fc', 'body.fc', 'model', 'model']
    """
    weight = weight_of(name)
    return weight if "/" in weight else weight.rpartition(".")[0] or "model"


def select(names: Sequence[str], patterns: Sequence[str], *, what: str = "selector") -> tuple[str, ...]:
    """The names that match: shell-style patterns, a leading `!` takes matches away again; order of `names` kept.

    Every pattern must match something: a selector that silently selects nothing is the commonest misspelling.

    >>> select(("a.weight", "a.bias", "b.weight"), ("*", "!*.bias"))
    ('a.weight', 'b.weight')
    """
    chosen: set[str] = set()
    for pattern in patterns:
        take = not pattern.startswith("!")
        hit = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not hit:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise ConfigError(f"{what} {pattern!r} matches no block; the blocks are {shown}")
        chosen = chosen | hit if take else chosen - hit
    return tuple(name for name in names if name in chosen)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """As `select`, for one name and patterns that need not match anything: the last one that matches decides.

    >>> matches("a.bias", ("a.*", "!*.bias")), matches("a.weight", ("a.*", "!*.bias"))
    (False, True)
    """
    hits = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(hits) and not hits[-1].startswith("!")
