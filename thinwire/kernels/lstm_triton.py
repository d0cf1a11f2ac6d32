"""Triton kernels for the recurrence of an LSTM layer, for many clients at once, each with its own weights.

Each step of the recurrence is one kernel: the product with the hidden state, the gates and the new states. In separate
operations it would be about ten, and with them the time of a launch ten times. Imported only if there is a GPU and
triton is installed.

Shapes have a leading client axis: inputs, gates (c, steps, n, 4 hidden), states (c, steps, n, hidden), weight (c, 4
hidden, hidden). Sums are computed in float32 in a fixed order, so results are reproducible bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thinwire.kernels.sums_triton import read
from thinwire.kernels.support import dot_precision


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit(do_not_specialize=["t", "steps", "n"])
def _forward_step(
    inputs,
    weight,
    gates,
    cells,
    hidden,
    t,
    steps,
    n,
    HIDDEN: constexpr,
    PRECISION: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
):
    """States after step t: of BM examples, BN units of the hidden state."""
    client = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    unit = tl.program_id(1) * BN + tl.arange(0, BN)
    live = (row < n)[:, None]
    at = (client * steps + t) * n
    weight += client * (4 * HIDDEN * HIDDEN)
    place = row[:, None] * (4 * HIDDEN) + unit[None, :]
    inputs += at * (4 * HIDDEN)
    i = read(inputs + place, live)
    f = read(inputs + place + HIDDEN, live)
    g = read(inputs + place + 2 * HIDDEN, live)
    o = read(inputs + place + 3 * HIDDEN, live)
    own = row[:, None] * HIDDEN + unit[None, :]
    before = tl.zeros((BM, BN), dtype=tl.float32)
    if t > 0:
        last = hidden + (at - n) * HIDDEN
        for first in range(0, HIDDEN, BK):
            k = first + tl.arange(0, BK)
            h = tl.load(last + row[:, None] * HIDDEN + k[None, :], mask=live, other=0.0)
            w = weight + unit[None, :] * HIDDEN + k[:, None]
            i = tl.dot(h, tl.load(w), i, input_precision=PRECISION)
            f = tl.dot(h, tl.load(w + HIDDEN * HIDDEN), f, input_precision=PRECISION)
            g = tl.dot(h, tl.load(w + 2 * HIDDEN * HIDDEN), g, input_precision=PRECISION)
            o = tl.dot(h, tl.load(w + 3 * HIDDEN * HIDDEN), o, input_precision=PRECISION)
        before = tl.load(cells + (at - n) * HIDDEN + own, mask=live, other=0.0)
    i = tl.sigmoid(i)
    f = tl.sigmoid(f)
    g = _tanh(g)
    o = tl.sigmoid(o)
    c = f * before + i * g
    tl.store(cells + at * HIDDEN + own, c, mask=live)
    tl.store(hidden + at * HIDDEN + own, o * _tanh(c), mask=live)
    gates += at * (4 * HIDDEN)
    tl.store(gates + place, i, mask=live)
    tl.store(gates + place + HIDDEN, f, mask=live)
    tl.store(gates + place + 2 * HIDDEN, g, mask=live)
    tl.store(gates + place + 3 * HIDDEN, o, mask=live)


@triton.jit(do_not_specialize=["t", "steps", "n"])
def _backward_step(
    grad,
    gates,
    cells,
    weight,
    by_inputs,
    by_cell,
    t,
    steps,
    n,
    HIDDEN: constexpr,
    PRECISION: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
):
    """Gradients with respect to the inputs of step t, and to the cell before it (`by_cell`, overwritten)."""
    client = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    unit = tl.program_id(1) * BN + tl.arange(0, BN)
    live = (row < n)[:, None]
    at = (client * steps + t) * n
    own = row[:, None] * HIDDEN + unit[None, :]
    by_h = read(grad + at * HIDDEN + own, live)
    by_cell += client * n * HIDDEN
    by_c = tl.zeros((BM, BN), dtype=tl.float32)
    if t < steps - 1:
        weight += client * (4 * HIDDEN * HIDDEN)
        after = by_inputs + (at + n) * (4 * HIDDEN)
        for first in range(0, 4 * HIDDEN, BK):
            k = first + tl.arange(0, BK)
            d = tl.load(after + row[:, None] * (4 * HIDDEN) + k[None, :], mask=live, other=0.0)
            w = tl.load(weight + k[:, None] * HIDDEN + unit[None, :])
            by_h = tl.dot(d, w, by_h, input_precision=PRECISION)
        by_c = tl.load(by_cell + own, mask=live, other=0.0)
    place = row[:, None] * (4 * HIDDEN) + unit[None, :]
    gates += at * (4 * HIDDEN)
    i = read(gates + place, live)
    f = read(gates + place + HIDDEN, live)
    g = read(gates + place + 2 * HIDDEN, live)
    o = read(gates + place + 3 * HIDDEN, live)
    c = _tanh(tl.load(cells + at * HIDDEN + own, mask=live, other=0.0))
    before = tl.load(cells + (at - n) * HIDDEN + own, mask=live & (t > 0), other=0.0)
    by_c += by_h * o * (1 - c * c)
    tl.store(by_cell + own, by_c * f, mask=live)
    by_inputs += at * (4 * HIDDEN)
    tl.store(by_inputs + place, by_c * g * i * (1 - i), mask=live)
    tl.store(by_inputs + place + HIDDEN, by_c * before * f * (1 - f), mask=live)
    tl.store(by_inputs + place + 2 * HIDDEN, by_c * i * (1 - g * g), mask=live)
    tl.store(by_inputs + place + 3 * HIDDEN, by_h * c * o * (1 - o), mask=live)


def forward(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden states, and the gates and cells for the gradient."""
    c, steps, n, _ = inputs.shape
    size = weight.shape[-1]
    inputs, weight = inputs.contiguous(), weight.contiguous()
    gates = torch.empty_like(inputs)
    hidden = inputs.new_empty((c, steps, n, size))
    cells = hidden.new_empty(hidden.shape, dtype=torch.float32)
    grid, place = _place(n, size, c)
    with torch.cuda.device_of(inputs):
        for t in range(steps):
            _forward_step[grid](
                *(inputs, weight, gates, cells, hidden, t, steps, n, size, dot_precision(inputs.dtype)), *place
            )
    return hidden, gates, cells


def gradient(grad: Tensor, gates: Tensor, cells: Tensor, weight: Tensor) -> Tensor:
    """The gradient with respect to the inputs."""
    c, steps, n, size = cells.shape
    grad, gates, cells, weight = (block.contiguous() for block in (grad, gates, cells, weight))
    by_inputs, by_cell = torch.empty_like(gates), cells.new_empty((c, n, size))
    grid, place = _place(n, size, c)
    with torch.cuda.device_of(gates):
        for t in reversed(range(steps)):
            _backward_step[grid](
                *(grad, gates, cells, weight, by_inputs, by_cell, t, steps, n, size, dot_precision(gates.dtype)), *place
            )
    return by_inputs


def _place(n: int, size: int, clients: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The grid of programs, and the examples, units and products of one."""
    rows = 16 if n <= 16 else 32
    units = min(size & -size, 32)
    return (-(-n // rows), size // units, clients), (rows, units, min(size & -size, 64))
