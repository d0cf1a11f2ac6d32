"""Triton kernels for what is between the products of a network that is a chain of layers, for many clients at once.

Each of them does in one pass over the data what takes several operations of torch: a step of a small network is bound
by the number of its kernels. Imported only if there is a GPU and triton is installed. Sums are computed in float32 in a
fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thinwire.kernels.sums_triton import read

Pair = tuple[int, int]
BLOCK = 1024  # values of one program


@triton.jit
def _gather(
    batches,
    done,
    pixels,
    targets,
    means,
    deviations,
    x,
    y,
    rows,
    clients,
    WIDTH: constexpr,
    PIXELS: constexpr,
    AREA: constexpr,
    CHANNELS: constexpr,
    B: constexpr,
):
    """The images and targets of a step, normalized: (pixel / 255 - mean) / deviation.

    CHANNELS: if above 0, channels come last, and there are so many, the last of which is one everywhere.
    """
    example = tl.program_id(1)
    step = tl.load(done)
    batch = batches + (step * clients + example // WIDTH) * (WIDTH + 1)
    index = tl.load(batch + example % WIDTH)
    at = tl.program_id(0) * B + tl.arange(0, B)
    known = at < PIXELS
    value = tl.load(pixels + index * PIXELS + at, mask=known, other=0).to(tl.float32)
    mean = tl.load(means + at // AREA, mask=known, other=0.0)
    deviation = tl.load(deviations + at // AREA, mask=known, other=1.0)
    value = tl.math.div_rn(tl.math.div_rn(value, 255.0) - mean, deviation)
    if CHANNELS == 0:
        tl.store(x + example.to(tl.int64) * PIXELS + at, value, mask=known)
    else:
        to = x + example.to(tl.int64) * (AREA * CHANNELS) + (at % AREA) * CHANNELS
        tl.store(to + at // AREA, value, mask=known)
        tl.store(to + CHANNELS - 1, value * 0 + 1, mask=at < AREA)
    if tl.program_id(0) == 0:
        tl.store(y + example, tl.load(targets + index).to(tl.int64))
        if example % WIDTH == 0:
            tl.store(rows + example // WIDTH, tl.load(batch + WIDTH))


@triton.jit
def _average(
    x,
    out,
    count,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    KH: constexpr,
    KW: constexpr,
    FIRST: constexpr,
    B: constexpr,
):
    """Means over adjacent windows; FIRST: channels first in the result."""
    OH: constexpr = H // KH
    OW: constexpr = W // KW
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    known = at < count
    channel = at % C
    v = (at // C) % OW
    u = (at // (C * OW)) % OH
    image = at // (C * OW * OH)
    total = tl.zeros((B,), dtype=tl.float32)
    source = x + ((image * H + u * KH) * W + v * KW) * C + channel
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            total += read(source + (i * W + j) * C, known)
    to = at
    if FIRST:
        to = ((image * C + channel) * OH + u) * OW + v
    tl.store(out + to, total / (KH * KW), mask=known)


@triton.jit
def _spread(
    grad,
    y,
    out,
    count,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    KH: constexpr,
    KW: constexpr,
    FIRST: constexpr,
    B: constexpr,
):
    """The gradient of `_average` of the ReLU whose result was y."""
    OH: constexpr = H // KH
    OW: constexpr = W // KW
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    known = at < count
    channel = at % C
    v = ((at // C) % W) // KW
    u = ((at // (C * W)) % H) // KH
    image = at // (C * W * H)
    if FIRST:
        source = ((image * C + channel) * OH + u) * OW + v
    else:
        source = ((image * OH + u) * OW + v) * C + channel
    g = read(grad + source, known) / (KH * KW)
    above = tl.load(y + at, mask=known, other=0.0) > 0
    tl.store(out + at, tl.where(above, g, 0.0), mask=known)


@triton.jit
def _sum_parts(
    partial,
    by_kernel,
    by_bias,
    parts,
    kernel_client,
    bias_client,
    OUTER: constexpr,
    INNER: constexpr,
    KEPT: constexpr,
    TAPS: constexpr,
    K_OUTER: constexpr,
    K_INNER: constexpr,
    K_TAP: constexpr,
    COLUMNS: constexpr,
    BIAS: constexpr,
    B: constexpr,
):
    """Sum of the terms of a kernel gradient, (o, tap, i), of the first KEPT channels.

    BIAS is the column of the bias gradient, -1 if there is none.
    """
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * B + tl.arange(0, B)
    known = at < OUTER * COLUMNS
    total = tl.zeros((B,), dtype=tl.float32)
    for part in range(parts):
        total += tl.load(partial + (client * parts + part) * (OUTER * COLUMNS) + at, mask=known, other=0.0)
    o = at // COLUMNS
    column = at % COLUMNS
    weight = (column < TAPS * INNER) & (column % INNER < KEPT)
    to = o * K_OUTER + (column % INNER) * K_INNER + (column // INNER) * K_TAP
    tl.store(by_kernel + client * kernel_client + to, total, mask=known & weight)
    if BIAS >= 0:
        tl.store(by_bias + client * bias_client + o, total, mask=known & (column == BIAS))


@triton.jit
def _cross_entropy(
    outputs,
    bias,
    targets,
    rows,
    by_outputs,
    by_bias,
    losses,
    n,
    bias_client,
    grad_client,
    rows_client,
    CLASSES: constexpr,
    BIAS: constexpr,
    N: constexpr,
    K: constexpr,
):
    """Mean loss of one client, added to `losses` times its rows, and the gradients by the outputs and their bias."""
    client = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    k = tl.arange(0, K)
    real = (k < CLASSES)[None, :]
    place = (client * n + j)[:, None] * CLASSES + k[None, :]
    known = (j < n)[:, None] & real
    z = read(outputs + place, known)
    if BIAS:
        z += tl.load(bias + client * bias_client + k, mask=k < CLASSES, other=0.0)[None, :]
    z = tl.where(real, z, float("-inf"))
    count = tl.load(rows + client * rows_client)
    target = tl.load(targets + client * n + j, mask=j < n, other=-100)
    counted = ((j < n) & (j < count) & (target != -100)).to(tl.float32)
    labels = tl.maximum(tl.sum(counted, 0), 1.0)
    top = tl.max(z, 1)
    e = tl.exp(z - top[:, None])
    total = tl.sum(e, 1)
    right = k[None, :] == target[:, None]
    each = tl.log(total) + top - tl.sum(tl.where(right, z, 0.0), 1)
    loss = tl.sum(tl.where(counted > 0, each, 0.0), 0) / labels
    d = (e / total[:, None] - right.to(tl.float32)) * (counted / labels)[:, None]
    d = tl.where(counted[:, None] > 0, d, 0.0)
    tl.store(by_outputs + place, d, mask=known)
    if BIAS:
        tl.store(by_bias + client * grad_client + k, tl.sum(d, 0), mask=k < CLASSES)
    tl.store(losses + client, tl.load(losses + client) + loss * count)


def gather(
    batches: Tensor,
    done: Tensor,
    pixels: Tensor,
    targets: Tensor,
    statistics: tuple[Tensor, Tensor],
    kind: torch.dtype,
    channels: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized images (c, n, channels, height, width) of a step, their targets (c, n), and the last column.

    Args:
        batches: (steps, c, n + 1) indices of images; the last column is the number of those that count.
        done: (1,) the step.
        pixels: (images, channels, height, width) uint8.
        targets: (images,).
        statistics: mean and standard deviation of each channel, float32.
        kind: type of the images.
        channels: if above 0, the images have so many, last in memory; the last one is one everywhere.
    """
    _, c, width = batches.shape
    shape, size, n = pixels.shape[1:], pixels[0].numel(), width - 1
    made = (*shape[1:], channels) if channels else shape
    x = torch.empty((c, n, *made), dtype=kind, device=pixels.device)
    y, rows = (torch.empty(made, dtype=torch.int64, device=pixels.device) for made in ((c, n), (c,)))
    with torch.cuda.device_of(pixels):
        _gather[(-(-size // BLOCK), c * n)](
            *(batches, done, pixels, targets, *statistics, x, y, rows, c, n, size, size // shape[0], channels, BLOCK)
        )
    return x.movedim(-1, 2) if channels else x, y, rows


def average(x: Tensor, window: Pair, first: bool) -> Tensor:
    """Average pooling of (c, n, h, w, channels) over adjacent windows; `first`: the result has channels first."""
    c, n, h, w, channels = x.shape
    oh, ow = h // window[0], w // window[1]
    shape = (c, n, channels, oh, ow) if first else (c, n, oh, ow, channels)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _average[(-(-out.numel() // BLOCK),)](x, out, out.numel(), h, w, channels, *window, first, BLOCK)
    return out


def spread(grad: Tensor, y: Tensor, window: Pair, first: bool) -> Tensor:
    """The gradient of `average(relu(x))` with respect to x, where y = relu(x)."""
    out = torch.empty_like(y)
    with torch.cuda.device_of(y):
        _spread[(-(-y.numel() // BLOCK),)](grad, y, out, y.numel(), *y.shape[2:], *window, first, BLOCK)
    return out


def sum_parts(partial: Tensor, by_kernel: Tensor, by_bias: Tensor | None, column: int) -> None:
    """Write the sums of the terms of a kernel gradient (`kernel_gradient_parts`).

    Args:
        partial: (c, parts, o, kh kw channels), with one more column for the bias, or without.
        by_kernel: (c, o, i, kh, kw), taps or channels last in memory: is overwritten with the first i channels.
        by_bias: (c, o): is overwritten if there is such a column.
        column: of the bias gradient; -1 if there is none.
    """
    c, parts, o, columns = partial.shape
    i, taps = by_kernel.shape[2], by_kernel[0, 0, 0].numel()
    bias = by_kernel if by_bias is None else by_bias
    with torch.cuda.device_of(partial):
        _sum_parts[(-(-o * columns // BLOCK), c)](
            *(partial, by_kernel, bias, parts, by_kernel.stride(0), bias.stride(0), o, columns // taps, i, taps),
            *(by_kernel.stride(1), by_kernel.stride(2), by_kernel.stride(4)),
            *(columns, column if by_bias is not None else -1, BLOCK),
        )


def cross_entropy(
    outputs: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor, by_bias: Tensor | None, losses: Tensor
) -> Tensor:
    """The gradient of each client's mean cross entropy with respect to its outputs (c, n, classes).

    Args:
        outputs: outputs without the bias.
        bias: (c, classes) or None.
        targets: (c, n).
        rows: (c,) the number of examples that count.
        by_bias: (c, classes) is overwritten with the gradient of the bias.
        losses: (c,) the mean losses times the rows are added.
    """
    c, n, classes = outputs.shape
    grad = torch.empty_like(outputs)
    given = losses if bias is None else bias
    found = losses if by_bias is None else by_bias
    with torch.cuda.device_of(outputs):
        _cross_entropy[(c,)](
            *(outputs, given, targets, rows, grad, found, losses, n, given.stride(0), found.stride(0), rows.stride(0)),
            *(classes, bias is not None, triton.next_power_of_2(n), triton.next_power_of_2(classes)),
        )
    return grad
