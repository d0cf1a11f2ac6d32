"""Count sketches of updates: linear codes of which the server recovers the largest values (FetchSGD).

Papers: Charikar et al., ICALP 2002; FetchSGD (Rothchild et al., ICML 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import register_part
from thinwire.core.selection import largest
from thinwire.core.text import NonNegativeInt
from thinwire.core.tree import Block, Spec, Tree, split
from thinwire.errors import ConfigError
from thinwire.sketches.base import Sketch

BLOCK = 1 << 22  # values whose cells are drawn at a time
KEPT = 1 << 26  # cells that are kept for the next client, of five bytes each: 320 MiB
_CODE = "sketch"
MAX_MULTIPLE = 2.0**50  # the largest multiple of the resolution, so that sums of them fit into 64 bits


@register_part("sketch", "count", paper="Charikar et al., ICALP 2002; Rothchild et al., ICML 2020")
class CountSketch(Sketch):
    """Add each value, with a random sign, to one random cell of each row; the server recovers the largest values.

        code[r, h_r(i)] += s_r(i) x_i          estimate of x_i: median over r of s_r(i) code[r, h_r(i)]

    Cells h and signs s are drawn from the shared key and are the same in every round, so codes of several rounds add
    up: momentum and what was not broadcast yet stay in the server's sketch, and clients keep nothing. The server
    broadcasts the k values with the largest estimates, and sets their cells to zero.

    Args:
        rows: independent estimates of each value.
        columns: cells of a row; 0 derives them from the number of coordinates: all rows together have a quarter of it.
        k: values that are broadcast in a round; 0 for a twentieth of the coordinates.
        resolution: values are rounded to multiples of this power of two. Their sums are exact as long as a cell stays
            below 2^24 multiples (16 with the default), so the sum of codes is the code of the sum, bit for bit.

    >>> sketch, delta = CountSketch(rows=3, columns=64, k=1), {"w": torch.tensor([0.5, 0.0, -2.0, 0.25])}
    >>> code = sketch.encode(delta, Key(0))
    >>> sketch.recover(code, Spec.of(delta), Key(0))[0]["w"].tolist()
    [0.0, 0.0, -2.0, 0.0]

    Not `EvoFed`, whose averaged code is what is broadcast.
    """

    recovers = True

    rows: Annotated[int, "[1, 64]"] = 5
    columns: NonNegativeInt = 0
    k: NonNegativeInt = 0
    resolution: float = 2.0**-20

    def __post_init__(self) -> None:
        if not (2.0**-60 <= self.resolution <= 1 and math.frexp(self.resolution)[0] == 0.5):
            raise ConfigError(
                f"resolution must be a power of two from 2^-60 to 1, not {self.resolution}; write 9.5367431640625e-07"
            )

    def spec(self, coords: Spec) -> Spec:
        """Return one matrix of cells, for any blocks; nothing without blocks."""
        return Spec((Block(_CODE, (self.rows, self._columns(coords.size))),) if coords.size else ())

    def encode(self, delta: Tree, key: Key) -> Tree:
        """Return the sums of the cells."""
        coords = Spec.of(delta)
        if not coords.size:
            return {}
        device, columns = next(iter(delta.values())).device, self._columns(coords.size)
        sums = torch.zeros(self.rows, columns, dtype=torch.int64, device=device)
        for name, at, end, hashes in _drawn(key, self.rows, columns, coords, device):
            x = delta[name].detach().reshape(-1)[at:end].double() / self.resolution
            multiples = x.round().clamp(-MAX_MULTIPLE, MAX_MULTIPLE).to(torch.int64)
            for row, (cell, sign) in zip(sums, hashes, strict=True):
                row.index_add_(0, cell, sign * multiples)  # integers: the order does not matter
        return {_CODE: (sums.double() * self.resolution).float()}

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """Return the estimates of all values."""
        if not coords.size:
            return coords.zeros()
        return split(self._estimates(code, coords, key), coords)

    def recover(self, code: Tree, coords: Spec, key: Key) -> tuple[Tree, Tree]:
        """Return the k largest estimates, and False at the cells that they were recovered from."""
        if not coords.size:
            return coords.zeros(), {}
        estimates = self._estimates(code, coords, key)
        chosen = torch.from_numpy(largest(estimates, min(self.k or max(1, coords.size // 20), coords.size)))
        update = torch.zeros_like(estimates)
        update[chosen] = estimates[chosen]
        left = torch.ones(code[_CODE].shape, dtype=torch.bool)
        start = 0
        for _, at, end, hashes in _drawn(key, self.rows, left.shape[1], coords, update.device):
            some = torch.nonzero(update[start : start + end - at]).squeeze(-1)
            for row, (cell, _) in zip(left, hashes, strict=True):
                row[cell[some].long()] = False
            start += end - at
        return split(update, coords), {_CODE: left}

    def _columns(self, size: int) -> int:
        return self.columns or max(1, math.ceil(size / 4 / self.rows))

    def _estimates(self, code: Tree, coords: Spec, key: Key) -> Tensor:
        """The estimates of all values, joined, on the CPU."""
        sums, out = code[_CODE].cpu(), []
        for part in _drawn(key, self.rows, sums.shape[1], coords, sums.device):
            seen = [row.index_select(0, cell) * sign for row, (cell, sign) in zip(sums, part.hashes, strict=True)]
            out.append(torch.stack(seen).median(0).values)
        return torch.cat(out)


class Part(NamedTuple):
    """Consecutive values of a block, and in each row their cells and signs."""

    name: str
    start: int
    end: int
    hashes: tuple[tuple[Tensor, Tensor], ...]


def _drawn(key: Key, rows: int, columns: int, coords: Spec, device: torch.device) -> Iterable[Part]:
    """All values, in parts; they are drawn once for all clients of a round where that takes little memory."""
    return (_kept if coords.size * rows <= KEPT else _draw)(key, rows, columns, coords, device)


def _draw(key: Key, rows: int, columns: int, coords: Spec, device: torch.device) -> Iterator[Part]:
    """Cells and signs, a function of the name of a block and the position in it."""
    for block in coords:
        for start in range(0, block.numel, BLOCK):
            end = min(start + BLOCK, block.numel)
            keys = [key.fold(block.name, row) for row in range(rows)]
            cells = [one.fold("cell").integers(end - start, columns, start, device).int() for one in keys]
            signs = [one.fold("sign").signs(end - start, start=start, device=device).to(torch.int8) for one in keys]
            yield Part(block.name, start, end, tuple(zip(cells, signs, strict=True)))


@lru_cache(maxsize=2)
def _kept(key: Key, rows: int, columns: int, coords: Spec, device: torch.device) -> tuple[Part, ...]:
    return tuple(_draw(key, rows, columns, coords, device))
