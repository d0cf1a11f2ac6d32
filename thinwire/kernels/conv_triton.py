"""Triton kernels for the convolutions of many clients, each with its own kernel, without storing patches.

A convolution is a product of a matrix of patches with the kernel. im2col stores the patches, which
for 5x5 kernels are 25 times as large as the images; here each block of the product loads the pixels that it needs.
Imported only if there is a GPU and triton is installed.

All tensors have a leading client axis and are channels last. Sums are computed in float32 in a fixed order, so results
are reproducible bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thinwire.kernels.conv_blocks import gradient_block, gradient_parts, product_block
from thinwire.kernels.sums_triton import read, sum_rows
from thinwire.kernels.support import dot_precision

Pair = tuple[int, int]


@triton.jit
def _multiply_patches(
    x,
    kernel,
    bias,
    out,
    rows,
    x_client,
    X_IMAGE: constexpr,
    X_ROW: constexpr,
    X_COLUMN: constexpr,
    X_CHANNEL: constexpr,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    X_HEIGHT: constexpr,
    X_WIDTH: constexpr,
    Y_HEIGHT: constexpr,
    Y_WIDTH: constexpr,
    INNER: constexpr,
    OUTER: constexpr,
    K_TAP: constexpr,
    K_INNER: constexpr,
    K_OUTER: constexpr,
    KH: constexpr,
    KW: constexpr,
    SH: constexpr,
    SW: constexpr,
    PH: constexpr,
    PW: constexpr,
    BACK: constexpr,
    BIAS: constexpr,
    RELU: constexpr,
    PRECISION: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
):
    """Forward: out[u, o] = sum over taps and channels of x[u stride - padding + tap, i] kernel[o, tap, i].

    BACK: x is the gradient of the output, out that of the input. Pixels of the input are grouped by phase, which is
    their position modulo the stride: all pixels of a phase use the same taps, every stride-th.
    """
    TH: constexpr = (KH + SH - 1) // SH if BACK else KH
    TW: constexpr = (KW + SW - 1) // SW if BACK else KW
    PHASES: constexpr = SH * SW if BACK else 1
    client = (tl.program_id(2) // PHASES).to(tl.int64)
    phase = tl.program_id(2) % PHASES
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    v = m % WIDTH
    u = (m // WIDTH) % HEIGHT
    image = m // (WIDTH * HEIGHT)
    if BACK:
        ph = phase // SW
        pw = phase % SW
        first_h = (ph + PH) % SH
        first_w = (pw + PW) % SW
        row = u + (ph + PH - first_h) // SH
        column = v + (pw + PW - first_w) // SW
        to_row = ph + u * SH
        to_column = pw + v * SW
        live = (m < rows) & (to_row < Y_HEIGHT) & (to_column < Y_WIDTH)
    else:
        row = u * SH - PH
        column = v * SW - PW
        to_row = u
        to_column = v
        live = m < rows
    source = x + client * x_client + (image * X_IMAGE + row * X_ROW + column * X_COLUMN)
    kernel += client * (OUTER * KH * KW * INNER)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, TH * TW * INNER, BK):
        if INNER % BK == 0:  # one tap in this block
            tap = k // INNER
            i = tl.max_contiguous(tl.multiple_of(k % INNER + tl.arange(0, BK), BK), BK)  # for wide loads
            th = tap // TW
            tw = tap % TW
            down = th
            right = tw
        else:
            tap = (k + tl.arange(0, BK)) // INNER
            i = (k + tl.arange(0, BK)) % INNER
            th = tap // TW
            tw = tap % TW
            down = th[None, :]
            right = tw[None, :]
        if BACK:
            at_row = row[:, None] - down
            at_column = column[:, None] - right
            step = i * X_CHANNEL - th * X_ROW - tw * X_COLUMN
            kh = first_h + th * SH + 0 * i
            kw = first_w + tw * SW + 0 * i
        else:
            at_row = row[:, None] + down
            at_column = column[:, None] + right
            step = i * X_CHANNEL + th * X_ROW + tw * X_COLUMN
            kh = th
            kw = tw
        inside = live[:, None] & (at_row >= 0) & (at_row < X_HEIGHT) & (at_column >= 0) & (at_column < X_WIDTH)
        a = tl.load(source[:, None] + step[None, :], mask=inside, other=0.0).to(kernel.dtype.element_ty)
        known = (o < OUTER)[None, :]
        if INNER % BK != 0:
            known = known & (th < TH)[:, None]
        if BACK:
            known = known & ((kh < KH) & (kw < KW))[:, None]
        from_kernel = kernel + (kh * KW + kw) * K_TAP + i * K_INNER
        b = tl.load(from_kernel[:, None] + (o * K_OUTER)[None, :], mask=known, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += read(bias + client * OUTER + o, o < OUTER)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    images = rows // (HEIGHT * WIDTH)
    pixel = (image * Y_HEIGHT + to_row) * Y_WIDTH + to_column
    out += client * images * Y_HEIGHT * Y_WIDTH * OUTER
    tl.store(out + pixel[:, None] * OUTER + o[None, :], total, mask=live[:, None] & (o < OUTER)[None, :])


@triton.jit
def _multiply_by_patches(
    x,
    grad,
    out,
    rows,
    chunk,
    parts,
    out_client,
    x_client,
    X_IMAGE: constexpr,
    X_ROW: constexpr,
    X_COLUMN: constexpr,
    X_CHANNEL: constexpr,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    X_HEIGHT: constexpr,
    X_WIDTH: constexpr,
    INNER: constexpr,
    OUTER: constexpr,
    KH: constexpr,
    KW: constexpr,
    SH: constexpr,
    SW: constexpr,
    PH: constexpr,
    PW: constexpr,
    ONES: constexpr,
    PRECISION: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
):
    """One part of the kernel gradient: out[o, tap, i] = sum over some pixels of grad[u, o] x[patch(u), tap, i].

    With ONES each patch has one more value, a one: its column is the bias gradient.
    """
    COLUMNS: constexpr = KH * KW * INNER
    client = (tl.program_id(2) // parts).to(tl.int64)
    part = tl.program_id(2) % parts
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    if INNER % BN == 0:  # one tap in this block
        tap = tl.program_id(0) * BN // INNER
        i = tl.max_contiguous(tl.multiple_of((tl.program_id(0) * BN) % INNER + tl.arange(0, BN), BN), BN)
        th = tap // KW
        tw = tap % KW
        down = th
        right = tw
    else:
        tap = k // INNER
        i = k % INNER
        th = tap // KW
        tw = tap % KW
        down = th[None, :]
        right = tw[None, :]
    step = i * X_CHANNEL + th * X_ROW + tw * X_COLUMN
    x += client * x_client
    grad += client * rows * OUTER
    begin = part * chunk
    end = tl.minimum(begin + chunk, rows)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for at in range(begin, end, BK):
        m = at + tl.arange(0, BK)
        v = m % WIDTH
        u = (m // WIDTH) % HEIGHT
        row = u * SH - PH
        column = v * SW - PW
        at_row = row[:, None] + down
        at_column = column[:, None] + right
        inside = (m < end)[:, None] & (at_row >= 0) & (at_row < X_HEIGHT) & (at_column >= 0) & (at_column < X_WIDTH)
        if INNER % BN != 0:
            inside = inside & (k < COLUMNS)[None, :]
        source = (m // (WIDTH * HEIGHT)) * X_IMAGE + row * X_ROW + column * X_COLUMN
        b = tl.load(x + (source[:, None] + step[None, :]), mask=inside, other=0.0).to(grad.dtype.element_ty)
        if ONES:
            b = tl.where((k == COLUMNS)[None, :], 1.0, b).to(grad.dtype.element_ty)
        a = tl.load(grad + m[:, None] * OUTER + o[None, :], mask=(m < end)[:, None] & (o < OUTER)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    out += client * out_client + part * (OUTER * (COLUMNS + ONES))
    known = (o < OUTER)[:, None] & (k < COLUMNS + ONES)[None, :]
    tl.store(out + o[:, None] * (COLUMNS + ONES) + k[None, :], total, mask=known)


# -- x (c, n, i, h, w), kernel (c, o, i, kh, kw), bias (c, o), grad (c, n, o, oh, ow), in any order in memory ----------


def forward(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, relu: bool = False) -> Tensor:
    """The convolution, in the type of the kernel; with `relu` the larger of it and zero."""
    (h, w), (kh, kw) = x.shape[-2:], kernel.shape[-2:]
    oh, ow = (h + 2 * padding[0] - kh) // stride[0] + 1, (w + 2 * padding[1] - kw) // stride[1] + 1
    return _multiply(x, kernel, bias, (oh, ow), (oh, ow), stride, padding, False, relu)


def input_gradient(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The gradient with respect to images of this size."""
    phase = (-(-size[0] // stride[0]), -(-size[1] // stride[1]))
    return _multiply(grad, kernel, None, phase, size, stride, padding, True)


def kernel_gradient(
    grad: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair, bias: bool, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to a kernel of this size and to the bias; the second is empty without a bias.

    They have this type, or that of the gradient given.
    """
    c, kind = len(grad), kind or grad.dtype
    (kh, kw), i = size, x.shape[2]
    grad = grad.permute(0, 1, 3, 4, 2).contiguous()
    partial, columns = kernel_gradient_parts(grad, x, size, stride, padding, bias), kh * kw * i
    total = partial.sum(1) if partial.shape[1] > 1 else partial[:, 0]
    by_kernel = total[..., :columns].unflatten(-1, (kh, kw, i)).permute(0, 1, 4, 2, 3).to(kind)  # type: ignore[no-untyped-call]
    if not bias:
        return by_kernel, by_kernel.new_empty(c, 0)
    ones = total.shape[-1] > columns
    return by_kernel, (total[..., columns] if ones else sum_rows(grad.flatten(1, 3))).to(kind)


def kernel_gradient_parts(
    grad: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair, bias: bool, into: Tensor | None = None
) -> Tensor:
    """Terms of the kernel gradient, in float32: (c, parts, o, kh kw i), with one more column for that of the bias.

    The column is missing where it would take a block of its own. If there is only one term, and no such column, it is
    written to the rows of `into`, (c, o kh kw i), if given. The gradient is (c, n, oh, ow, o), contiguous.
    """
    c, n, oh, ow, o = grad.shape
    (kh, kw), i, x = size, x.shape[2], _last(x)
    rows, columns = n * oh * ow, kh * kw * i
    block = gradient_block(o, i, columns + bias, grad.dtype)
    ones = bias and columns % block.n != 0
    blocks = -(-(columns + ones) // block.n), -(-o // block.m)
    chunk, parts = gradient_parts(blocks[0] * blocks[1] * c, rows, block.k)
    if into is None or parts > 1 or ones:
        into = torch.empty((c, parts, o, columns + ones), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _multiply_by_patches[(*blocks, c * parts)](
            *(x, grad, into, rows, chunk, parts, into.stride(0), *_strides(x), oh, ow, *x.shape[-2:], i, o, kh, kw),
            *(*stride, *padding),
            *(int(ones), dot_precision(grad.dtype), *block[:3]),
            num_warps=block.warps,
            num_stages=block.stages,
        )
    return into


def channels_last(kernel: Tensor, kind: torch.dtype) -> Tensor:
    """The kernel in this type with its channels last in memory, as the products read it: (c, o, i, kh, kw)."""
    view = kernel.permute(0, 1, 3, 4, 2)
    if kernel.dtype == kind and view.is_contiguous():
        return kernel
    return torch.empty(view.shape, dtype=kind, device=kernel.device).copy_(view).permute(0, 1, 4, 2, 3)


def _multiply(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    grid: Pair,
    size: Pair,
    stride: Pair,
    padding: Pair,
    back: bool,
    relu: bool = False,
) -> Tensor:
    """Launch `_multiply_patches` for kernels (c, o, i, kh, kw) and `grid` pixels per image and phase."""
    c, n, inner = x.shape[:3]
    outer, (kh, kw) = kernel.shape[2 if back else 1], kernel.shape[3:]
    # 16-bit products read the copy of the forward direction; tensor cores take 32-bit factors only with inner last
    x, turned = _last(x), back and kernel.element_size() == 4
    kernel = kernel.permute(0, *((2, 3, 4, 1) if turned else (1, 3, 4, 2))).contiguous()
    far = kh * kw * kernel.shape[-1]
    steps = (kernel.shape[-1], far, 1) if back and not turned else (kernel.shape[-1], 1, far)
    rows = n * grid[0] * grid[1]
    phases = stride[0] * stride[1] if back else 1
    block = product_block(c * phases, rows, outer, inner, kh * kw, kernel.dtype)
    out = torch.empty((c, n, *size, outer), dtype=kernel.dtype, device=x.device)
    added = x if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):
        _multiply_patches[(-(-rows // block.m), -(-outer // block.n), c * phases)](
            *(x, kernel, added, out, rows, *_strides(x), *grid, *x.shape[-2:], *size),
            *(inner, outer, *steps, kh, kw, *stride, *padding, back, bias is not None, relu),
            *(dot_precision(kernel.dtype), *block[:3]),
            num_warps=block.warps,
            num_stages=block.stages,
        )
    return out.permute(0, 1, 4, 2, 3)


def _last(x: Tensor) -> Tensor:
    """The same tensor with channels last, unless it has few channels."""
    if x.shape[2] < 8 or x.stride(2) == 1:
        return x
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of clients, images, rows, columns and channels."""
    return tuple(x.stride(axis) for axis in (0, 1, 3, 4, 2))
