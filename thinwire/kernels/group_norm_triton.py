"""Triton kernels for the group norm of many clients, each with its own weights.

torch has one kernel for group norm, but under vmap it is decomposed into about twenty passes over the data. Imported
only if there is a GPU and triton is installed.

Tensors are channels last, one program normalizes one image, and sums are computed in float32 in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 1 << 12  # values loaded at a time


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
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
):
    """out = (x - mean) / sqrt(variance + eps) weight + bias, mean and variance over the pixels of a group."""
    WIDTH: tl.constexpr = CHANNELS // GROUPS
    index = tl.program_id(0).to(tl.int64)
    client = index // images
    channel = tl.arange(0, CHANNELS)
    x += index * PIXELS * CHANNELS
    out += index * PIXELS * CHANNELS
    total = tl.zeros((CHANNELS,), dtype=tl.float32)
    for at in range(0, PIXELS, BM):
        pixel = at + tl.arange(0, BM)
        block = tl.load(x + pixel[:, None] * CHANNELS + channel[None, :], mask=(pixel < PIXELS)[:, None], other=0.0)
        total += tl.sum(block.to(tl.float32), 0)
    mean = tl.sum(tl.reshape(total, (GROUPS, WIDTH)), 1) / (PIXELS * WIDTH)
    of_channel = tl.reshape(tl.broadcast_to(mean[:, None], (GROUPS, WIDTH)), (CHANNELS,))
    total = tl.zeros((CHANNELS,), dtype=tl.float32)
    for at in range(0, PIXELS, BM):
        pixel = at + tl.arange(0, BM)
        known = (pixel < PIXELS)[:, None]
        block = tl.load(x + pixel[:, None] * CHANNELS + channel[None, :], mask=known, other=0.0)
        off = tl.where(known, block.to(tl.float32) - of_channel[None, :], 0.0)
        total += tl.sum(off * off, 0)
    variance = tl.sum(tl.reshape(total, (GROUPS, WIDTH)), 1) / (PIXELS * WIDTH)
    scale = 1.0 / tl.sqrt(variance + eps)
    group = tl.arange(0, GROUPS)
    tl.store(means + index * GROUPS + group, mean)
    tl.store(scales + index * GROUPS + group, scale)
    by = tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, WIDTH)), (CHANNELS,))
    by = by * tl.load(weight + client * CHANNELS + channel).to(tl.float32)
    plus = tl.load(bias + client * CHANNELS + channel).to(tl.float32)
    for at in range(0, PIXELS, BM):
        pixel = at + tl.arange(0, BM)
        known = (pixel < PIXELS)[:, None]
        where = pixel[:, None] * CHANNELS + channel[None, :]
        # subtract the mean first: x by - mean by would cancel if the mean is much larger than the deviation
        off = tl.load(x + where, mask=known, other=0.0).to(tl.float32) - of_channel[None, :]
        tl.store(out + where, off * by[None, :] + plus[None, :], mask=known)


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
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
):
    """With u = (x - mean) scale: by_bias = sum of grad, by_weight = sum of grad u, per image and channel.

    by_x = scale (grad weight - mean of grad weight - u mean of grad weight u), means over a group.
    """
    WIDTH: tl.constexpr = CHANNELS // GROUPS
    index = tl.program_id(0).to(tl.int64)
    client = index // images
    channel = tl.arange(0, CHANNELS)
    group = tl.arange(0, GROUPS)
    x += index * PIXELS * CHANNELS
    grad += index * PIXELS * CHANNELS
    by_x += index * PIXELS * CHANNELS
    mean = tl.load(means + index * GROUPS + group)
    mean = tl.reshape(tl.broadcast_to(mean[:, None], (GROUPS, WIDTH)), (CHANNELS,))
    scale = tl.load(scales + index * GROUPS + group)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, WIDTH)), (CHANNELS,))
    plain = tl.zeros((CHANNELS,), dtype=tl.float32)
    along = tl.zeros((CHANNELS,), dtype=tl.float32)
    for at in range(0, PIXELS, BM):
        pixel = at + tl.arange(0, BM)
        known = (pixel < PIXELS)[:, None]
        where = pixel[:, None] * CHANNELS + channel[None, :]
        g = tl.load(grad + where, mask=known, other=0.0).to(tl.float32)
        u = (tl.load(x + where, mask=known, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        plain += tl.sum(g, 0)
        along += tl.sum(g * u, 0)
    tl.store(by_bias + index * CHANNELS + channel, plain)
    tl.store(by_weight + index * CHANNELS + channel, along)
    w = tl.load(weight + client * CHANNELS + channel).to(tl.float32)
    plain = tl.sum(tl.reshape(plain * w, (GROUPS, WIDTH)), 1) / (PIXELS * WIDTH)
    plain = tl.reshape(tl.broadcast_to(plain[:, None], (GROUPS, WIDTH)), (CHANNELS,))
    along = tl.sum(tl.reshape(along * w, (GROUPS, WIDTH)), 1) / (PIXELS * WIDTH)
    along = tl.reshape(tl.broadcast_to(along[:, None], (GROUPS, WIDTH)), (CHANNELS,))
    for at in range(0, PIXELS, BM):
        pixel = at + tl.arange(0, BM)
        known = (pixel < PIXELS)[:, None]
        where = pixel[:, None] * CHANNELS + channel[None, :]
        g = tl.load(grad + where, mask=known, other=0.0).to(tl.float32)
        u = (tl.load(x + where, mask=known, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        result = (g * w[None, :] - plain[None, :] - u * along[None, :]) * scale[None, :]
        tl.store(by_x + where, result, mask=known)


# -- x and grad (c, n, channels, ...), weight and bias (c, channels) ---------------------------------------------------


def forward(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, and the mean and scale of each group, (c, n, groups), for the gradient."""
    c, n = x.shape[:2]
    x = channels_last(x)
    out = torch.empty_like(x)
    means, scales = (torch.empty((c, n, groups), dtype=torch.float32, device=x.device) for _ in range(2))
    size = _size(x, groups)
    with torch.cuda.device_of(x):
        _normalize[(c * n,)](x, weight.contiguous(), bias.contiguous(), out, means, scales, n, eps, *size, num_warps=8)
    return out.movedim(-1, 2), means, scales


def gradients(
    grad: Tensor, x: Tensor, groups: int, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to input, weight and bias."""
    c, n, channels = x.shape[:3]
    x, grad = channels_last(x), channels_last(grad)
    by_x = torch.empty_like(x)
    by_weight, by_bias = (torch.empty((c, n, channels), dtype=torch.float32, device=x.device) for _ in range(2))
    inputs = (x, grad, weight.contiguous(), means.contiguous(), scales.contiguous())
    with torch.cuda.device_of(x):
        _backward[(c * n,)](*inputs, by_x, by_weight, by_bias, n, *_size(x, groups), num_warps=8)
    return by_x.movedim(-1, 2), by_weight.sum(1).to(weight.dtype), by_bias.sum(1).to(weight.dtype)


def channels_last(x: Tensor) -> Tensor:
    """The same tensor as (c, n, ..., channels), contiguous."""
    return x.movedim(2, -1).contiguous()


def _size(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Pixels, channels, groups, and pixels loaded at a time."""
    channels = x.shape[-1]
    pixels = x[0, 0].numel() // channels
    return pixels, channels, groups, max(1, min(VALUES // channels, 1 << (pixels - 1).bit_length()))
