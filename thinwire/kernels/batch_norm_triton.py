"""Triton kernels for the batch norm of many clients, each with its own weights and statistics.

torch's vmap moves the client axis of a batch norm next to the channels, which copies all activations, and has no rule
for it in 16 bits. Imported only if there is a GPU and triton is installed.

Tensors are channels last, (clients, rows, channels) with a row for each pixel of each image. Rows are divided into
parts: one program sums over a part, and the programs of the second kernel add up the sums of all parts, in a fixed
order and in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.group_norm_triton import channels_last

VALUES = 1 << 12  # values loaded at a time
PARTS = 16  # parts of the rows of a client, at most


@triton.jit
def _moments(x, sums, rows, each, PARTS: tl.constexpr, CHANNELS: tl.constexpr, BM: tl.constexpr):
    """The sums of x - x0 and (x - x0)^2 over a part; x0 is the first row, so that a large mean does not cancel."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, CHANNELS)
    x += client * rows * CHANNELS
    first = tl.load(x + channel).to(tl.float32)
    plain = tl.zeros((CHANNELS,), dtype=tl.float32)
    square = tl.zeros((CHANNELS,), dtype=tl.float32)
    for at in range(part * each, tl.minimum(part * each + each, rows), BM):
        row = at + tl.arange(0, BM)
        known = (row < rows)[:, None]
        block = tl.load(x + row[:, None] * CHANNELS + channel[None, :], mask=known, other=0.0).to(tl.float32)
        off = tl.where(known, block - first[None, :], 0.0)
        plain += tl.sum(off, 0)
        square += tl.sum(off * off, 0)
    sums += (client * PARTS + part) * 2 * CHANNELS
    tl.store(sums + channel, plain)
    tl.store(sums + CHANNELS + channel, square)


@triton.jit
def _normalize(
    x,
    sums,
    weight,
    bias,
    out,
    means,
    variances,
    rows,
    each,
    eps,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BM: tl.constexpr,
):
    """out = (x - mean) / sqrt(variance + eps) weight + bias, for one part."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, CHANNELS)
    index = tl.arange(0, PARTS)
    x += client * rows * CHANNELS
    out += client * rows * CHANNELS
    where = (client * PARTS + index[:, None]) * 2 * CHANNELS + channel[None, :]
    plain = tl.sum(tl.load(sums + where), 0) / rows
    square = tl.sum(tl.load(sums + CHANNELS + where), 0) / rows
    mean = tl.load(x + channel).to(tl.float32) + plain
    variance = tl.maximum(square - plain * plain, 0.0)
    if part == 0:
        tl.store(means + client * CHANNELS + channel, mean)
        tl.store(variances + client * CHANNELS + channel, variance)
    by = tl.load(weight + client * CHANNELS + channel).to(tl.float32) / tl.sqrt(variance + eps)
    plus = tl.load(bias + client * CHANNELS + channel).to(tl.float32)
    for at in range(part * each, tl.minimum(part * each + each, rows), BM):
        row = at + tl.arange(0, BM)
        known = (row < rows)[:, None]
        place = row[:, None] * CHANNELS + channel[None, :]
        off = tl.load(x + place, mask=known, other=0.0).to(tl.float32) - mean[None, :]
        tl.store(out + place, off * by[None, :] + plus[None, :], mask=known)


@triton.jit
def _gradient_sums(
    x, grad, means, variances, sums, rows, each, eps, PARTS: tl.constexpr, CHANNELS: tl.constexpr, BM: tl.constexpr
):
    """With u = (x - mean) / sqrt(variance + eps): the sums of grad and of grad u over a part."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, CHANNELS)
    x += client * rows * CHANNELS
    grad += client * rows * CHANNELS
    mean = tl.load(means + client * CHANNELS + channel)
    scale = 1.0 / tl.sqrt(tl.load(variances + client * CHANNELS + channel) + eps)
    plain = tl.zeros((CHANNELS,), dtype=tl.float32)
    along = tl.zeros((CHANNELS,), dtype=tl.float32)
    for at in range(part * each, tl.minimum(part * each + each, rows), BM):
        row = at + tl.arange(0, BM)
        known = (row < rows)[:, None]
        place = row[:, None] * CHANNELS + channel[None, :]
        g = tl.load(grad + place, mask=known, other=0.0).to(tl.float32)
        u = (tl.load(x + place, mask=known, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        plain += tl.sum(g, 0)
        along += tl.sum(g * u, 0)
    sums += (client * PARTS + part) * 2 * CHANNELS
    tl.store(sums + channel, plain)
    tl.store(sums + CHANNELS + channel, along)


@triton.jit
def _input_gradient(
    x,
    grad,
    weight,
    means,
    variances,
    sums,
    by_x,
    by_weight,
    by_bias,
    rows,
    each,
    eps,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BM: tl.constexpr,
):
    """by_x = weight / sqrt(variance + eps) (grad - mean of grad - u mean of grad u), for one part."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, CHANNELS)
    index = tl.arange(0, PARTS)
    x += client * rows * CHANNELS
    grad += client * rows * CHANNELS
    by_x += client * rows * CHANNELS
    mean = tl.load(means + client * CHANNELS + channel)
    scale = 1.0 / tl.sqrt(tl.load(variances + client * CHANNELS + channel) + eps)
    where = (client * PARTS + index[:, None]) * 2 * CHANNELS + channel[None, :]
    plain = tl.sum(tl.load(sums + where), 0)
    along = tl.sum(tl.load(sums + CHANNELS + where), 0)
    if part == 0:
        tl.store(by_bias + client * CHANNELS + channel, plain)
        tl.store(by_weight + client * CHANNELS + channel, along)
    plain = plain / rows
    along = along / rows
    by = tl.load(weight + client * CHANNELS + channel).to(tl.float32) * scale
    for at in range(part * each, tl.minimum(part * each + each, rows), BM):
        row = at + tl.arange(0, BM)
        known = (row < rows)[:, None]
        place = row[:, None] * CHANNELS + channel[None, :]
        g = tl.load(grad + place, mask=known, other=0.0).to(tl.float32)
        u = (tl.load(x + place, mask=known, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        tl.store(by_x + place, by[None, :] * (g - plain[None, :] - u * along[None, :]), mask=known)


# -- x and grad (c, n, channels, ...), weight and bias (c, channels) ---------------------------------------------------


def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, and mean and variance of each channel, (c, channels), in float32."""
    x = channels_last(x)
    c, channels = x.shape[0], x.shape[-1]
    out = torch.empty_like(x)
    means, variances = (torch.empty((c, channels), dtype=torch.float32, device=x.device) for _ in range(2))
    rows, each, parts, block = _size(x)
    sums = torch.empty((c, parts, 2, channels), dtype=torch.float32, device=x.device)
    shape = (rows, each)
    with torch.cuda.device_of(x):
        _moments[(c, parts)](x, sums, *shape, parts, channels, block, num_warps=8)
        inputs = (x, sums, weight.contiguous(), bias.contiguous())
        _normalize[(c, parts)](*inputs, out, means, variances, *shape, eps, parts, channels, block, num_warps=8)
    return out.movedim(-1, 2), means, variances


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, variances: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to input, weight and bias."""
    x, grad = channels_last(x), channels_last(grad)
    c, channels = x.shape[0], x.shape[-1]
    by_x = torch.empty_like(x)
    by_weight, by_bias = (torch.empty((c, channels), dtype=torch.float32, device=x.device) for _ in range(2))
    rows, each, parts, block = _size(x)
    sums = torch.empty((c, parts, 2, channels), dtype=torch.float32, device=x.device)
    size, moments = (rows, each, eps, parts, channels, block), (means.contiguous(), variances.contiguous())
    with torch.cuda.device_of(x):
        _gradient_sums[(c, parts)](x, grad, *moments, sums, *size, num_warps=8)
        results = (by_x, by_weight, by_bias)
        _input_gradient[(c, parts)](x, grad, weight.contiguous(), *moments, sums, *results, *size, num_warps=8)
    return by_x.movedim(-1, 2), by_weight.to(weight.dtype), by_bias.to(weight.dtype)


def _size(x: Tensor) -> tuple[int, int, int, int]:
    """Rows of a client, rows of a part, parts (a power of two), and rows loaded at a time."""
    channels = x.shape[-1]
    rows = x[0].numel() // channels
    block = max(1, min(VALUES // channels, 1 << (rows - 1).bit_length()))
    parts = min(PARTS, 1 << (-(-rows // block) - 1).bit_length())
    each = -(-rows // (parts * block)) * block
    return rows, each, parts, block
