"""Triton kernels for the group norm of many clients, each with its own weights.

torch has one kernel for group norm, but under vmap it is decomposed into about twenty passes over the data. Imported
only if there is a GPU and triton is installed.

Tensors are channels last, one program normalizes some groups of one image, and sums are computed in float32 in a fixed
order. An image of few values is loaded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thinwire.kernels.sums_triton import read

VALUES = 1 << 13  # values loaded at a time
LINE = 32  # channels of a program at least, so that the lines of memory that it loads are used in full


@triton.jit
def _per_channel(of_group, GROUPS: constexpr, WIDTH: constexpr):
    """The value of the group of each channel."""
    return tl.reshape(tl.broadcast_to(of_group[:, None], (GROUPS, WIDTH)), (GROUPS * WIDTH,))


@triton.jit
def _normalize(
    x,
    weight,
    bias,
    out,
    means,
    scales,
    images,
    eps,
    PIXELS: constexpr,
    CHANNELS: constexpr,
    GROUPS: constexpr,
    BM: constexpr,
    BN: constexpr,
):
    """out = (x - mean) / sqrt(variance + eps) weight + bias, mean and variance over the pixels of a group."""
    WIDTH: constexpr = CHANNELS // GROUPS
    OWN: constexpr = BN // WIDTH  # groups of this program
    index = tl.program_id(0).to(tl.int64)
    client = index // images
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    pixel = tl.arange(0, BM)
    where = pixel[:, None] * CHANNELS + channel[None, :]
    x += index * PIXELS * CHANNELS
    out += index * PIXELS * CHANNELS
    total = read(x + where, (pixel < PIXELS)[:, None])
    first = total
    for at in range(BM, PIXELS, BM):
        known = (at + pixel < PIXELS)[:, None]
        total += read(x + at * CHANNELS + where, known)
    mean = tl.sum(tl.reshape(tl.sum(total, 0), (OWN, WIDTH)), 1) / (PIXELS * WIDTH)
    of_channel = _per_channel(mean, OWN, WIDTH)[None, :]
    off = tl.where((pixel < PIXELS)[:, None], first - of_channel, 0.0)
    total = off * off
    for at in range(BM, PIXELS, BM):
        known = (at + pixel < PIXELS)[:, None]
        block = read(x + at * CHANNELS + where, known)
        off = tl.where(known, block - of_channel, 0.0)
        total += off * off
    variance = tl.sum(tl.reshape(tl.sum(total, 0), (OWN, WIDTH)), 1) / (PIXELS * WIDTH)
    scale = 1.0 / tl.sqrt(variance + eps)
    group = index * GROUPS + tl.program_id(1) * OWN + tl.arange(0, OWN)
    tl.store(means + group, mean)
    tl.store(scales + group, scale)
    by = _per_channel(scale, OWN, WIDTH) * tl.load(weight + client * CHANNELS + channel).to(tl.float32)
    plus = tl.load(bias + client * CHANNELS + channel).to(tl.float32)
    # subtract the mean first: x by - mean by would cancel if the mean is much larger than the deviation
    result = (first - of_channel) * by[None, :] + plus[None, :]
    tl.store(out + where, result, mask=(pixel < PIXELS)[:, None])
    for at in range(BM, PIXELS, BM):
        known = (at + pixel < PIXELS)[:, None]
        block = read(x + at * CHANNELS + where, known)
        tl.store(out + at * CHANNELS + where, (block - of_channel) * by[None, :] + plus[None, :], mask=known)


@triton.jit
def _backward(
    x,
    grad,
    weight,
    means,
    scales,
    by_x,
    by_weight,
    by_bias,
    images,
    PIXELS: constexpr,
    CHANNELS: constexpr,
    GROUPS: constexpr,
    BM: constexpr,
    BN: constexpr,
):
    """With u = (x - mean) scale: by_bias = sum of grad, by_weight = sum of grad u, per image and channel.

    by_x = scale (grad weight - mean of grad weight - u mean of grad weight u), means over a group.
    """
    WIDTH: constexpr = CHANNELS // GROUPS
    OWN: constexpr = BN // WIDTH
    index = tl.program_id(0).to(tl.int64)
    client = index // images
    channel = tl.program_id(1) * BN + tl.arange(0, BN)
    group = index * GROUPS + tl.program_id(1) * OWN + tl.arange(0, OWN)
    pixel = tl.arange(0, BM)
    where = pixel[:, None] * CHANNELS + channel[None, :]
    inside = (pixel < PIXELS)[:, None]
    x += index * PIXELS * CHANNELS
    grad += index * PIXELS * CHANNELS
    by_x += index * PIXELS * CHANNELS
    mean = _per_channel(tl.load(means + group), OWN, WIDTH)[None, :]
    scale = _per_channel(tl.load(scales + group), OWN, WIDTH)[None, :]
    first = read(grad + where, inside)
    unit = (read(x + where, inside) - mean) * scale
    totals = first
    products = first * unit
    for at in range(BM, PIXELS, BM):
        known = (at + pixel < PIXELS)[:, None]
        g = read(grad + at * CHANNELS + where, known)
        u = (read(x + at * CHANNELS + where, known) - mean) * scale
        totals += g
        products += g * u
    plain = tl.sum(totals, 0)
    along = tl.sum(products, 0)
    tl.store(by_bias + index * CHANNELS + channel, plain)
    tl.store(by_weight + index * CHANNELS + channel, along)
    w = tl.load(weight + client * CHANNELS + channel).to(tl.float32)
    plain = tl.sum(tl.reshape(plain * w, (OWN, WIDTH)), 1) / (PIXELS * WIDTH)
    plain = _per_channel(plain, OWN, WIDTH)[None, :]
    along = tl.sum(tl.reshape(along * w, (OWN, WIDTH)), 1) / (PIXELS * WIDTH)
    along = _per_channel(along, OWN, WIDTH)[None, :]
    tl.store(by_x + where, (first * w[None, :] - plain - unit * along) * scale, mask=inside)
    for at in range(BM, PIXELS, BM):
        known = (at + pixel < PIXELS)[:, None]
        g = read(grad + at * CHANNELS + where, known)
        u = (read(x + at * CHANNELS + where, known) - mean) * scale
        tl.store(by_x + at * CHANNELS + where, (g * w[None, :] - plain - u * along) * scale, mask=known)


# -- x and grad (c, n, channels, ...), weight and bias (c, channels) ---------------------------------------------------


def forward(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, and the mean and scale of each group, (c, n, groups), for the gradient."""
    c, n = x.shape[:2]
    x = channels_last(x)
    out = torch.empty_like(x)
    means, scales = (torch.empty((c, n, groups), dtype=torch.float32, device=x.device) for _ in range(2))
    size = _size(x, groups)
    with torch.cuda.device_of(x):
        _normalize[(c * n, x.shape[-1] // size[-1])](
            *(x, weight.contiguous(), bias.contiguous(), out, means, scales, n, eps, *size), num_warps=_warps(size)
        )
    return out.movedim(-1, 2), means, scales


def gradients(
    grad: Tensor, x: Tensor, groups: int, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to input, weight and bias."""
    c, n, channels = x.shape[:3]
    x, grad = channels_last(x), channels_last(grad)
    by_x = torch.empty_like(x)
    terms = torch.empty((2, c, n, channels), dtype=torch.float32, device=x.device)
    inputs, size = (x, grad, weight.contiguous(), means.contiguous(), scales.contiguous()), _size(x, groups)
    with torch.cuda.device_of(x):
        _backward[(c * n, channels // size[-1])](*inputs, by_x, *terms, n, *size, num_warps=_warps(size))
    by_weight, by_bias = terms.sum(2).to(weight.dtype)
    return by_x.movedim(-1, 2), by_weight, by_bias


def channels_last(x: Tensor) -> Tensor:
    """The same tensor as (c, n, ..., channels), contiguous."""
    return x.movedim(2, -1).contiguous()


def _size(x: Tensor, groups: int) -> tuple[int, int, int, int, int]:
    """Pixels, channels, groups; pixels that a program loads at a time, and its channels."""
    channels = x.shape[-1]
    pixels = x[0, 0].numel() // channels
    rows = 1 << (pixels - 1).bit_length()
    own = max(min(max(VALUES // rows, LINE), channels), channels // groups)
    most = VALUES if rows * own <= VALUES else VALUES // 2  # with sums of several loads, fewer registers are left
    return pixels, channels, groups, max(1, min(most // own, rows)), own


def _warps(size: tuple[int, ...]) -> int:
    """Warps of a program: at least 16 values for each thread."""
    return max(1, min(8, size[-1] * size[-2] >> 9))
