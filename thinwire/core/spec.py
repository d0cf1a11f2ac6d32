"""Specs: names, shapes and dtypes of a tree, which server and clients know without sending them; selectors of names.

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
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from thinwire.core.key import Device
from thinwire.errors import ConfigError

R = TypeVar("R")
Tree: TypeAlias = dict[str, Tensor]

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


def weight_of(name: str) -> str:
    """The weight that a coordinate belongs to: its name up to the last slash.

    >>> weight_of("fc.weight/x1"), weight_of("fc.weight"), weight_of("model/b")
    ('fc.weight', 'fc.weight', 'model')
    """
    return name.rpartition("/")[0] or name


def layer_of(name: str) -> str:
    """The layer of a block: the module of the weight, or of the weight that the coordinate belongs to.

    Weights of the outermost module, and coordinates of all weights together, belong to the layer `model`.

    >>> [layer_of(name) for name in ("body.fc.weight", "body.fc.bias", "body.fc.weight/x1", "scale", "model/b")]
    ['body.fc', 'body.fc', 'body.fc', 'model', 'model']
    """
    weight = weight_of(name)
    return weight if "/" in weight else weight.rpartition(".")[0] or "model"


def select(names: Sequence[str], patterns: Sequence[str], *, what: str = "selector") -> tuple[str, ...]:
    """The names that match shell-style patterns, in the order of `names`; a pattern with a leading `!` removes matches.

    Raises a ConfigError for a pattern without a match, which is usually misspelled.

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
    """Whether one name matches: the last matching pattern decides. Unlike `select`, patterns without a match are fine.

    >>> matches("a.bias", ("a.*", "!*.bias")), matches("a.weight", ("a.*", "!*.bias"))
    (False, True)
    """
    hits = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(hits) and not hits[-1].startswith("!")


def as_rules(kind: type[R], given: Sequence[Any], what: str) -> tuple[R, ...]:
    """Rules, given as records of `kind` or as pairs `(selector or selectors, value)`, as records, which compare equal.

    Args:
        kind: the record; its first field is `on`, the selectors.
        given: records or pairs.
        what: the name of the setting, for error messages.
    """
    rules = []
    for rule in given:
        if not isinstance(rule, kind):
            if not isinstance(rule, tuple) or len(rule) != 2:
                raise ConfigError(f"{what} must be pairs of selectors and a value, not {rule!r}")
            rule = kind((rule[0],) if isinstance(rule[0], str) else tuple(rule[0]), rule[1])  # type: ignore[call-arg]
        if not rule.on:  # type: ignore[attr-defined]
            raise ConfigError(f"{what}: the rule {rule!r} selects nothing; write for example on = ['*']")
        rules.append(rule)
    return tuple(rules)
