"""A Triton kernel for the states of an LSTM of several layers without gradients, with factors of 16 bits.

The product with the states, the gates and the new states of a layer's step are one kernel. Layers run as a wave: layer
l computes step t while layer l - 1 computes step t + 1. Imported only if there is a GPU and triton is installed.

Products have float16 factors, which suits states within (-1, 1), and sums, gates and cells are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 65504.0  # float16
ROWS, UNITS, PRODUCTS, WARPS, STAGES = 128, 32, 64, 8, 3  # of a program: two of them fit into a multiprocessor

ENOUGH = 104 << 10  # bytes of shared memory that a program with so many stages may need

Layer = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:  # one instruction, with an error below that of a float16 state
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 2 * tl.sigmoid(2 * x) - 1
    return y


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    return 0.5 * _tanh(0.5 * x, FAST) + 0.5


@triton.jit(do_not_specialize=["wave", "top", "n", "known", "steps"])
def _states(
    codes,
    inputs,
    weight,
    hidden,
    cells,
    wave,
    top,
    n,
    rows,
    known,
    steps,
    CODED: tl.constexpr,
    LAYERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PLUS: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BU: tl.constexpr,
    BK: tl.constexpr,
):
    """The states of BM examples and BU units of a layer after its step in this wave."""
    WIDTH: tl.constexpr = 2 * HIDDEN + PLUS
    layer = top - tl.program_id(2)  # the layers above take longer and begin first
    t = wave - layer
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * (4 * BU) + tl.arange(0, 4 * BU)
    k = tl.arange(0, BK)
    plus = tl.arange(0, PLUS)
    if CODED:
        code = tl.load(codes + row.to(tl.int64) * steps + t, mask=(row < n) & (layer == 0), other=0)
    else:
        code = tl.where(row < n, row, 0).to(tl.int64) * steps + t
    code = tl.where(layer == 0, code, known)
    x = tl.load(inputs + code[:, None] * PLUS + plus[None, :])
    size = rows.to(tl.int64) * HIDDEN  # of a state
    now = (t % 2) * LAYERS + layer
    own = ((1 - t % 2) * LAYERS + layer) * size
    below = (now - 1) * size - HIDDEN
    a = hidden + row[:, None] * HIDDEN + k[None, :]
    weight += layer * (4 * HIDDEN * WIDTH)
    b = weight + column[None, :] * WIDTH + k[:, None]
    total = tl.zeros((BM, 4 * BU), dtype=tl.float32)
    for first in range(0, HIDDEN * (1 + (layer > 0).to(tl.int32)), BK):
        at = tl.multiple_of(tl.where(first < HIDDEN, own, below) + first, 16)
        total = tl.dot(tl.load(a + at), tl.load(b + first), total)
    w = tl.load(weight + column[None, :] * WIDTH + (2 * HIDDEN + plus)[:, None])
    total = tl.dot(x, w, total)
    # with the columns in the order of `_order`, each thread has the four gates of its units, and these are adjacent
    total = total.reshape(BM, BU // 4, 2, 4, 2).permute(0, 3, 1, 2, 4).reshape(BM, BU, 2, 2)
    left, right = tl.split(total)
    i, g = tl.split(left)
    f, o = tl.split(right)
    place = row[:, None] * HIDDEN + tl.program_id(0) * BU + tl.arange(0, BU)[None, :]
    cells += layer * size
    c = _sigmoid(f, FAST) * tl.load(cells + place) + _sigmoid(i, FAST) * _tanh(g, FAST)
    tl.store(cells + place, c)
    tl.store(hidden + now * size + place, (_sigmoid(o, FAST) * _tanh(c, FAST)).to(tl.float16))


def last_state(x: Tensor, codes: Tensor | None, layers: Sequence[Layer]) -> Tensor:
    """The hidden state (n, hidden) of the last layer after the last step, in float32.

    Args:
        x: (n, steps, inputs) float32, or with codes the inputs of each code (values, inputs).
        codes: (n, steps) int64, or None.
        layers: the matrices (4 hidden, inputs) and (4 hidden, hidden) and the bias (4 hidden) of each layer.
    """
    n, steps = x.shape[:2] if codes is None else codes.shape
    hidden, rows = layers[0][1].shape[1], -(-n // ROWS) * ROWS
    units = min(hidden & -hidden, UNITS)
    inputs = _inputs(x.flatten(0, -2))
    weight = _packed(layers, inputs.shape[1], units)
    states = inputs.new_zeros((2, len(layers), rows, hidden))
    cells = inputs.new_zeros((len(layers), rows, hidden), dtype=torch.float32)
    given = inputs if codes is None else codes.contiguous()
    stages = STAGES if not x.is_cuda or _shared_memory(x.device) >= ENOUGH else 2
    with torch.cuda.device_of(x):
        for wave in range(steps + len(layers) - 1):
            top, bottom = min(wave, len(layers) - 1), max(0, wave - steps + 1)
            _states[(hidden // units, rows // ROWS, top - bottom + 1)](
                *(given, inputs, weight, states, cells, wave, top, n, rows, len(inputs) - 1, steps, codes is not None),
                *(len(layers), hidden, inputs.shape[1], x.is_cuda, ROWS, units, min(hidden & -hidden, PRODUCTS)),
                num_warps=WARPS,
                num_stages=stages,
            )
    return states[(steps - 1) % 2, -1, :n].float()


def _shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def _inputs(x: Tensor) -> Tensor:
    """Inputs in float16, followed by two ones, which are factors of the bias; the last row has no inputs."""
    out = x.new_zeros((len(x) + 1, plus(x.shape[1])), dtype=torch.float16)
    out[:-1, : x.shape[1]] = x.clamp(-LARGEST, LARGEST)
    out[:, x.shape[1] : x.shape[1] + 2] = 1
    return out


def plus(inputs: int) -> int:
    """The columns of `_inputs`: a power of two, as tensor cores need it.

    >>> plus(8), plus(30)
    (16, 32)
    """
    return max(16, 1 << (inputs + 1).bit_length())


def _packed(layers: Sequence[Layer], more: int, units: int) -> Tensor:
    """The matrices of each layer side by side, rows in `_order`: for its states, the layer below, inputs and bias."""
    wide, hidden = layers[0][1].shape
    out = layers[0][1].new_zeros((len(layers), wide, 2 * hidden + more), dtype=torch.float16)
    order = _order(hidden, units, out.device)
    for at, layer in enumerate(layers):
        inner, own, bias = (block[order].float().clamp(-LARGEST, LARGEST) for block in layer)
        out[at, :, :hidden] = own
        first = 2 * hidden if at == 0 else hidden
        out[at, :, first : first + inner.shape[1]] = inner
        first = 2 * hidden + layers[0][0].shape[1]
        out[at, :, first] = bias
        out[at, :, first + 1] = bias - out[at, :, first]  # what the first column rounded off
    return out


def _order(hidden: int, units: int, device: torch.device) -> Tensor:
    """The rows of gates i, f, g, o in the order in which programs of so many units have them as columns.

    Of 16 adjacent columns of a product, a thread has four, at 2 q + {0, 1, 8, 9}: these are the gates of one unit.
    """
    row = torch.arange(4 * hidden, device=device).view(2, 2, hidden // units, 4, units // 4)
    return row.permute(2, 4, 0, 3, 1).flatten()
