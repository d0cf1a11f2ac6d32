"""Triton kernels for max pooling over adjacent windows of channels-last images.

Indices are not stored: the gradient finds the largest value of each window again. Imported only if there is a GPU and
triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]
BLOCK = 1024  # windows of one program


@triton.jit
def _places(
    count, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, B: tl.constexpr
):
    """The windows of a program, whether they exist, and the places of their first pixels."""
    OH: tl.constexpr = H // KH
    OW: tl.constexpr = W // KW
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = (at // C) % OW
    u = (at // (C * OW)) % OH
    image = (at // (C * OW * OH)).to(tl.int64)
    return at, at < count, ((image * H + u * KH) * W + v * KW) * C + at % C


@triton.jit
def _forward(
    x,
    out,
    count,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    B: tl.constexpr,
):
    """The largest value of each window; NaN if there is one."""
    at, known, first = _places(count, H, W, C, KH, KW, B)
    most = tl.load(x + first, mask=known, other=0.0)
    for tap in tl.static_range(1, KH * KW):
        value = tl.load(x + first + (tap // KW * W + tap % KW) * C, mask=known, other=0.0)
        most = tl.where((value > most) | (value != value), value, most)
    tl.store(out + at, most, mask=known)


@triton.jit
def _gradient(
    grad,
    x,
    out,
    by_x,
    count,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    B: tl.constexpr,
):
    """The gradient goes to the first of the largest values of a window, as in torch."""
    at, known, first = _places(count, H, W, C, KH, KW, B)
    g = tl.load(grad + at, mask=known, other=0.0)
    most = tl.load(out + at, mask=known, other=0.0)
    left = known
    for tap in tl.static_range(KH * KW):
        place = first + (tap // KW * W + tap % KW) * C
        value = tl.load(x + place, mask=known, other=0.0)
        here = left & ((value == most) | (value != value))
        tl.store(by_x + place, tl.where(here, g, 0.0).to(g.dtype), mask=known)
        left = left & (value != most) & (value == value)


# -- x (..., channels, h, w) with sides that are multiples of the window's ---------------------------------------------


def forward(x: Tensor, window: Pair) -> Tensor:
    """The pooled images, channels last in memory."""
    x = _last(x)
    *images, h, w, channels = x.shape
    out = torch.empty((*images, h // window[0], w // window[1], channels), dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _forward[(-(-out.numel() // BLOCK),)](x, out, out.numel(), h, w, channels, *window, BLOCK)
    return out.movedim(-1, -3)


def gradient(grad: Tensor, x: Tensor, out: Tensor, window: Pair) -> Tensor:
    """The gradient with respect to images whose pooled ones are `out`."""
    grad, x, out = _last(grad), _last(x), _last(out)
    by_x = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _gradient[(-(-out.numel() // BLOCK),)](grad, x, out, by_x, out.numel(), *x.shape[-3:], *window, BLOCK)
    return by_x.movedim(-1, -3)


def _last(x: Tensor) -> Tensor:
    """The same tensor as (..., h, w, channels), contiguous."""
    return x.movedim(-3, -1).contiguous()
