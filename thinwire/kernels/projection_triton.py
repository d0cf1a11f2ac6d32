"""Triton kernels for products with a random matrix that is drawn inside the kernel.

`projection.py` without triton draws blocks of the matrix into memory; here each block of the product draws its entries
in registers, with the same bits as `Key`. Tensor cores make many vectors nearly as fast as one. Imported only if there
is a GPU and triton is installed.

Sums are computed in float32 in a fixed order, so results are reproducible bit for bit. Factors are split into parts
that tensor cores multiply exactly: signs fit into 8 bits, and a float32 is the sum of three values of 8 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.core.key import NORMAL_SCALE

PARTS = 128  # partial sums over columns; a constant, so that sums do not depend on the GPU
Block = tuple[int, int, int]  # rows and columns drawn at a time, and the number of warps
BLOCKS: dict[str, Block] = {"sign": (128, 128, 4), "gaussian": (32, 128, 4)}


@triton.jit
def _philox(block, k0, k1):
    """Philox4x32-10 of a counter below 2**64, as in `thinwire.core.key`."""
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _draw_signs(i, j, e, k0, k1, KIND: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """The entries of rows i and columns j to j + BJ."""
    start = i * e + j  # a row starts anywhere in a block of 128 signs, so 128 columns need two blocks
    r = (start & 127).to(tl.uint32)[:, None]
    block = (start >> 7)[:, None] + tl.arange(0, BJ // 128)[None, :]
    x0, x1, x2, x3 = _philox(block, k0, k1)
    x4, x5, x6, x7 = _philox(block + 1, k0, k1)
    two = (r & 64) != 0
    y0 = tl.where(two, x2, x0)
    y1 = tl.where(two, x3, x1)
    y2 = tl.where(two, x4, x2)
    y3 = tl.where(two, x5, x3)
    y4 = tl.where(two, x6, x4)
    y5 = tl.where(two, x7, x5)
    one = (r & 32) != 0
    z0 = tl.where(one, y1, y0)
    z1 = tl.where(one, y2, y1)
    z2 = tl.where(one, y3, y2)
    z3 = tl.where(one, y4, y3)
    z4 = tl.where(one, y5, y4)
    right = r & 31
    left = 31 - right
    w0 = (z0 >> right) | ((z1 << 1) << left)
    w1 = (z1 >> right) | ((z2 << 1) << left)
    w2 = (z2 >> right) | ((z3 << 1) << left)
    w3 = (z3 >> right) | ((z4 << 1) << left)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BI, BJ // 32))
    mask = (1 << tl.arange(0, 32)).to(tl.uint32)[None, None, :]
    plus = tl.full((BI, BJ // 32, 32), 1.0, KIND)
    return tl.reshape(tl.where((words[:, :, None] & mask) != 0, plus, -plus), (BI, BJ))


@triton.jit
def _normal(u, v):
    """The integer of a normal value before scaling, as float32."""
    u = u - ((u >> 1) & 0x55555555)
    u = (u & 0x33333333) + ((u >> 2) & 0x33333333)
    u = (u + (u >> 4)) & 0x0F0F0F0F
    count = ((u * 0x01010101) >> 24).to(tl.int32)
    return (((count - 16) << 16) + (v & 0xFFFF).to(tl.int32) - (v >> 16).to(tl.int32)).to(tl.float32)


@triton.jit
def _draw_normals(i, j, e, k0, k1, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """The entries of rows i and columns j to j + BJ before scaling, as float32."""
    start = (i * e + j)[:, None]
    if EVEN:  # both values of a Philox block are in one row
        x0, x1, x2, x3 = _philox((start >> 1) + tl.arange(0, BJ // 2)[None, :], k0, k1)
        drawn = tl.reshape(tl.join(_normal(x0, x1), _normal(x2, x3)), (BI, BJ))
    else:
        n = start + tl.arange(0, BJ)[None, :]
        x0, x1, x2, x3 = _philox(n >> 1, k0, k1)
        second = (n & 1) != 0
        drawn = _normal(tl.where(second, x2, x0), tl.where(second, x3, x1))
    return drawn


@triton.jit
def _expand(
    b,
    key,
    out,
    vectors,
    p,
    e,
    scale,
    SIGNS: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    BC: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    """B (pieces, vectors, p) times A; the rows of a tile are all pieces of some vectors."""
    k0 = tl.load(key).to(tl.uint32)
    k1 = tl.load(key + 1).to(tl.uint32)
    j = tl.program_id(0) * BJ
    piece = tl.arange(0, BC) // (BC // PIECES)
    vector = tl.program_id(1) * (BC // PIECES) + tl.arange(0, BC) % (BC // PIECES)
    known = (vector < vectors) & (piece < 3)
    total = tl.zeros((BC, BJ), dtype=tl.float32)
    for first in range(0, p, BI):
        i = first + tl.arange(0, BI)
        offset = (piece * vectors + vector)[:, None] * p + i[None, :]
        a = tl.load(b + offset, mask=known[:, None] & (i < p)[None, :], other=0.0)
        if SIGNS:
            drawn = _draw_signs(i.to(tl.int64), j, e, k0, k1, b.dtype.element_ty, BI, BJ)
            total = tl.dot(a, drawn, total)
        else:
            drawn = _draw_normals(i.to(tl.int64), j, e, k0, k1, EVEN, BI, BJ)
            total = tl.dot(a, drawn, total, input_precision="tf32x3")
    whole = tl.sum(tl.reshape(total, (PIECES, BC // PIECES, BJ)), 0)
    vector = tl.program_id(1) * (BC // PIECES) + tl.arange(0, BC // PIECES)
    column = j + tl.arange(0, BJ)
    offset = vector.to(tl.int64)[:, None] * e + column[None, :]
    tl.store(out + offset, whole * scale, mask=(vector < vectors)[:, None] & (column < e)[None, :])


@triton.jit
def _project(
    g,
    key,
    out,
    vectors,
    p,
    e,
    columns_per_part,
    scale,
    SIGNS: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    BC: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    """G (pieces, vectors, e) times A^T, summed over one part of the columns."""
    k0 = tl.load(key).to(tl.uint32)
    k1 = tl.load(key + 1).to(tl.uint32)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    piece = tl.arange(0, BC) // (BC // PIECES)
    vector = tl.program_id(2) * (BC // PIECES) + tl.arange(0, BC) % (BC // PIECES)
    known = (vector < vectors) & (piece < 3)
    begin = tl.program_id(1) * columns_per_part
    total = tl.zeros((BC, BI), dtype=tl.float32)
    for j in range(begin, tl.minimum(begin + columns_per_part, e), BJ):
        column = j + tl.arange(0, BJ)
        offset = (piece * vectors + vector).to(tl.int64)[:, None] * e + column[None, :]
        a = tl.load(g + offset, mask=known[:, None] & (column < e)[None, :], other=0.0)
        if SIGNS:
            drawn = _draw_signs(i.to(tl.int64), j, e, k0, k1, g.dtype.element_ty, BI, BJ)
            total = tl.dot(a, tl.trans(drawn), total)
        else:
            drawn = _draw_normals(i.to(tl.int64), j, e, k0, k1, EVEN, BI, BJ)
            total = tl.dot(a, tl.trans(drawn), total, input_precision="tf32x3")
    whole = tl.sum(tl.reshape(total, (PIECES, BC // PIECES, BI)), 0)
    vector = tl.program_id(2) * (BC // PIECES) + tl.arange(0, BC // PIECES)
    offset = (tl.program_id(1) * vectors + vector)[:, None] * p + i[None, :]
    tl.store(out + offset, whole * scale, mask=(vector < vectors)[:, None] & (i < p)[None, :])


def expand(b: Tensor, key: Tensor, p: int, e: int, entries: str, scale: float, block: Block | None = None) -> Tensor:
    """B A for B (..., p)."""
    flat = b.reshape(-1, p)
    vectors = len(flat)
    out = flat.new_empty(vectors, e)
    factors, signs, pieces, bc = _prepare(flat, entries)
    bi, bj, warps = block or BLOCKS[entries]
    factor = scale if signs else scale * NORMAL_SCALE
    with torch.cuda.device_of(flat):
        _expand[(-(-e // bj), -(-vectors * pieces // bc))](
            *(factors, key, out, vectors, p, e, factor, signs, pieces, e % 2 == 0, bc, bi, bj),
            num_warps=warps,
            num_stages=1,
        )
    return out.view(*b.shape[:-1], e)


def project(g: Tensor, key: Tensor, p: int, e: int, entries: str, scale: float, block: Block | None = None) -> Tensor:
    """G A^T for G (..., e)."""
    flat = g.reshape(-1, e)
    vectors = len(flat)
    factors, signs, pieces, bc = _prepare(flat, entries)
    bi, bj, warps = block or BLOCKS[entries]
    columns_per_part = -(-e // (PARTS * bj)) * bj
    parts = -(-e // columns_per_part)
    partial = flat.new_empty(parts, vectors, p)
    factor = scale if signs else scale * NORMAL_SCALE
    with torch.cuda.device_of(flat):
        _project[(-(-p // bi), parts, -(-vectors * pieces // bc))](
            *(factors, key, partial, vectors, p, e, columns_per_part, factor, signs, pieces, e % 2 == 0, bc, bi, bj),
            num_warps=warps,
            num_stages=1,
        )
    return partial.sum(0).view(*g.shape[:-1], p)


def _prepare(flat: Tensor, entries: str) -> tuple[Tensor, bool, int, int]:
    """The vectors as factors for tensor cores, whether entries are signs, pieces per vector, and rows of a tile."""
    signs = entries == "sign"
    pieces = 4 if signs else 1  # three of four are used: tiles have 16, 32 or 64 rows
    bc = next((b for b in (16, 32) if len(flat) * pieces <= b), 64)
    return _split(flat) if signs else flat.contiguous(), signs, pieces, bc


def _split(flat: Tensor) -> Tensor:
    """Split float32 into three values of 8 bits whose sum is exact."""
    kind = torch.bfloat16 if flat.is_cuda else torch.float32  # triton's interpreter cannot multiply bfloat16
    out = torch.empty((3, *flat.shape), dtype=kind, device=flat.device)
    out[0] = flat
    rest = flat - out[0]
    out[1] = rest
    out[2] = rest - out[1]
    return out
