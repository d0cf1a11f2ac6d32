"""Triton kernels for the sums of the rows of many matrices, such as the gradient of a bias, a minimal one, and `read`.

torch has few programs for a sum over long, few columns. Imported only if there is a GPU and triton is installed. Sums
are computed in float32 in an order that depends on the shape alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

VALUES = 1 << 12  # values loaded at a time
PROGRAMS = 528  # up to which the rows are divided


@triton.jit
def read(pointer, mask):
    """Values as float32; zeros where the mask is false."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sum_rows(x, out, rows, chunk, out_client, COLUMNS: constexpr, BM: constexpr, BN: constexpr):
    """The sum of some rows of a client's matrix."""
    client = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.arange(0, BM)
    known = (column < COLUMNS)[None, :]
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, rows)
    x += client * rows * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for at in range(begin, end, BM):
        inside = (at + row < end)[:, None] & known
        total += read(x + at * COLUMNS, inside)
    to = client * out_client + tl.program_id(1) * COLUMNS + column
    tl.store(out + to, tl.sum(total, 0), mask=column < COLUMNS)


def sum_rows(x: Tensor, into: Tensor | None = None) -> Tensor:
    """The sums (c, columns) in float32 of matrices (c, rows, columns); written to `into` if given."""
    c, rows, columns = x.shape
    width = min(1 << (columns - 1).bit_length(), 128)
    height = VALUES // width
    parts = max(1, min(PROGRAMS // (c * -(-columns // width)), rows // (4 * height)))
    chunk = -(-rows // (parts * height)) * height
    parts = -(-rows // chunk)
    made = torch.empty((c, columns), dtype=torch.float32, device=x.device) if into is None else into
    terms = torch.empty((c, parts, columns), dtype=torch.float32, device=x.device) if parts > 1 else made
    with torch.cuda.device_of(x):
        _sum_rows[(-(-columns // width), parts, c)](
            *(x.contiguous(), terms, rows, chunk, terms.stride(0), columns, height, width), num_warps=8
        )
    return made if parts == 1 else torch.sum(terms, 1, out=made)


@triton.jit
def _write_one(x):
    tl.store(x, 1.0)


def run_one(device: torch.device) -> bool:
    """Whether the kernel writes a one."""
    x = torch.zeros(1, device=device)
    with torch.cuda.device(device):
        _write_one[(1,)](x)
    return float(x) == 1
