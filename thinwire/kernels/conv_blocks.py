"""The tiles in which the Triton convolutions (`conv_triton.py`) are computed.

>>> product_block(10, 8192, 128, 64, 25, torch.bfloat16)
Block(m=128, n=128, k=64, warps=8, stages=3)
>>> product_block(10, 2048, 128, 128, 25, torch.bfloat16)
Block(m=64, n=128, k=64, warps=4, stages=3)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PROGRAMS = 512  # programs that occupy a large GPU; a constant, so that sums do not depend on the GPU
FEWEST = 64  # programs below which tiles are made smaller than the 64 rows that the fastest instructions need
PROCESSORS = 132  # of such a GPU
TERMS = 396  # programs of a gradient, up to which the rows are divided: three for each processor


class Block(NamedTuple):
    """The tile of one program: m x n results, k products at a time; its number of warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def product_block(groups: int, rows: int, outer: int, inner: int, taps: int, kind: torch.dtype) -> Block:
    """The tile for `groups` products of `rows` patches, each `taps` x `inner` long, with `outer` kernels."""
    n = _power(outer, 16, 128)
    many = groups * -(-outer // n)
    least = {128: PROGRAMS, 64: FEWEST if kind == torch.bfloat16 else PROGRAMS}
    m = next((m for m in (128, 64) if -(-rows // m) * many >= least[m]), 32)
    half = kind == torch.bfloat16
    one_tap = _divisor(inner, 64 if half else 32)
    if one_tap < 16:  # images of few channels: all taps in few blocks
        return Block(m, n, _power(taps * inner, 16, 128 if half else 32), 8 if m * n >= 1 << 14 else 4, 2 if half else 3)
    alone = half and -(-rows // m) * many < PROCESSORS  # one program on a processor must hide the latency itself
    return Block(m, n, one_tap, 8 if m * n >= 1 << 14 else 4, 4 if alone else 3)


def gradient_block(outer: int, inner: int, columns: int, kind: torch.dtype) -> Block:
    """The tile for the gradient with respect to `outer` kernels of `columns` values each."""
    m = _power(outer, 16, 128)
    n = _divisor(inner, 128) if inner % 32 == 0 else _power(columns, 16, 128)
    large = m * n >= 1 << 14
    if kind != torch.bfloat16:
        return Block(m, n, 32, 8 if large else 4, 3)
    return Block(m, n, 32, 4, 4) if large else Block(m, n, 64, 4, 4 if m == n == 64 else 3)


def gradient_parts(programs: int, rows: int, step: int) -> tuple[int, int]:
    """The number of rows in each term of a gradient, and that of terms.

    Terms are added later. There are several only where the programs of one would leave processors of a GPU idle.

    >>> gradient_parts(250, 8192, 64), gradient_parts(90, 8192, 64)
    ((8192, 1), (2048, 4))
    """
    parts = max(1, min(TERMS // programs, rows // (8 * step)))
    chunk = -(-rows // (parts * step)) * step
    return chunk, -(-rows // chunk)


def _power(value: int, least: int, most: int) -> int:
    """The next power of two, clamped to a range."""
    return min(max(1 << (value - 1).bit_length(), least), most)


def _divisor(value: int, most: int) -> int:
    """The largest power of two that divides a value, up to a limit."""
    return min(value & -value, most)
