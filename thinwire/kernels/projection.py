"""Products with a random matrix that is never stored: blocks of it are drawn from its key during the product.

    forward   U = B A          backward   dB = dU A^T          A: p x e from a key;  memory O(block + k e + k p)

Entry (i, j) of A is value i e + j of the stream of the key, so any block can be drawn at any time, and A does not
depend on the blocking. On a CPU, products with signs use lookup tables (`projection_cpu.py`); on a GPU with triton,
entries are drawn inside the kernel of the product (`projection_triton.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thinwire.core.key import NORMAL_SCALE, Device, Key
from thinwire.kernels import projection_cpu as packed
from thinwire.kernels.support import has_triton

BLOCK = 1 << 22  # entries drawn at a time: 16 MiB of float32


def key_words(key: Key, device: Device) -> Tensor:
    """A key as two words of 32 bits, on the device where the product reads them."""
    device = torch.device(device or "cpu")
    return torch.tensor([key.value & 0xFFFFFFFF, key.value >> 32], device=device if has_triton(device) else "cpu")


def draw_rows(key: Key, first: int, rows: int, e: int, entries: str, scale: float, device: Device) -> Tensor:
    """Rows `first` to `first + rows` of A."""
    draw = key.signs if entries == "sign" else key.normal
    return draw(rows, e, start=first * e, device=device).mul_(scale)


def square_sums(integers: Tensor) -> list[int]:
    """Exact sums of squares of each row of integers below 2**21 in magnitude, in parts that fit into 64 bits.

    >>> square_sums(torch.tensor([[3, 4], [0, -1]]))
    [25, 1]
    """
    pieces = torch.stack([(piece * piece).sum(1) for piece in torch.split(integers, 1 << 20, dim=1)])
    return [sum(row) for row in pieces.T.tolist()]


def unit_scales(key: Key, p: int, e: int, device: Device) -> Tensor:
    """The factors that normalize the rows of a Gaussian matrix of p x e to length one, (p,) in float32.

    Squares are summed as integers, so that the factors have the same bits on all platforms.

    >>> scales = unit_scales(Key(1), 3, 50, None)
    >>> (Key(1).normal(3, 50) * scales[:, None]).norm(dim=1).tolist()
    [1.0, 1.0, 1.0]
    """
    sums: list[int] = []
    for first, rows in _blocks(p, e):
        totals = [0] * rows
        for at in range(0, e, BLOCK):  # a row that is longer than a block is split
            width = min(BLOCK, e - at)
            integers = key.normal_integers(rows, width, start=first * e + at, device=device)
            totals = [a + b for a, b in zip(totals, square_sums(integers), strict=True)]
        sums += totals
    return torch.tensor([1 / (math.sqrt(n) * NORMAL_SCALE) for n in sums], dtype=torch.float32, device=device or "cpu")


def multiply_generated(b: Tensor, key: Tensor, p: int, e: int, entries: str, scale: float) -> Tensor:
    """B A for a random matrix A of p x e that is drawn during the product.

    Args:
        b: (..., k, p).
        key: the key of A, from `key_words`.
        p: rows of A.
        e: columns of A.
        entries: "sign" or "gaussian".
        scale: the factor of all entries.

    >>> b, key = torch.randn(2, 3), Key(5)
    >>> torch.allclose(multiply_generated(b, key_words(key, None), 3, 7, "sign", 1.0), b @ key.signs(3, 7), atol=1e-6)
    True
    """
    out: Tensor = _Product.apply(b, key, p, e, entries, scale, False)  # type: ignore[no-untyped-call]
    return out


def _fused(vectors: Tensor, key: Tensor) -> Any:
    """The module of Triton kernels, or None where they cannot run."""
    if vectors.dtype != torch.float32 or key.device != vectors.device or not has_triton(vectors.device):
        return None
    from thinwire.kernels import projection_triton

    return projection_triton


def _packed(vectors: Tensor, p: int, e: int, entries: str) -> bool:
    """Whether the lookup tables of `projection_cpu.py` are faster."""
    return entries == "sign" and vectors.device.type == "cpu" and vectors.dtype == torch.float32 and p * e >= BLOCK


def _blocks(p: int, e: int) -> list[tuple[int, int]]:
    step = max(1, BLOCK // e)
    return [(first, min(step, p - first)) for first in range(0, p, step)]


def _used(b: Tensor, e: int) -> list[tuple[int, int]]:
    """Blocks of the rows of A that have a coefficient other than zero; all blocks of a matrix without zeros.

    >>> _used(torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 0.0, 0.0]]), 8), _used(torch.ones(1, 4), 8)
    ([(1, 2)], [(0, 4)])
    """
    p, found = b.shape[-1], list[tuple[int, int]]()
    at = torch.cat((b.new_zeros(1), (b.detach() != 0).reshape(-1, p).any(0), b.new_zeros(1))).diff().nonzero()[:, 0]
    for first, end in at.view(-1, 2).tolist():
        found += [(first + start, rows) for start, rows in _blocks(end - first, e)]
    return found


def _key(words: Tensor) -> Key:
    low, high = words.tolist()
    return Key(low | high << 32)


class _Product(torch.autograd.Function):
    """Vectors times A or, if `back`, times A^T; each is the gradient of the other."""

    @staticmethod
    def forward(vectors: Tensor, words: Tensor, p: int, e: int, entries: str, scale: float, back: bool) -> Tensor:
        if fused := _fused(vectors, words):
            product = fused.project if back else fused.expand
            return product(vectors, words, p, e, entries, scale)  # type: ignore[no-any-return]
        key = _key(words)
        if _packed(vectors, p, e, entries):
            return (packed.project if back else packed.expand)(vectors, key, p, e, scale)

        def rows_of(first: int, rows: int) -> Tensor:
            return draw_rows(key, first, rows, e, entries, scale, vectors.device)

        if back:
            return torch.cat([vectors @ rows_of(*block).mT for block in _blocks(p, e)], dim=-1)
        out = vectors.new_zeros(*vectors.shape[:-1], e)
        for first, rows in _used(vectors, e):
            out = out + vectors[..., first : first + rows] @ rows_of(first, rows)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.matrix = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        *matrix, back = ctx.matrix
        by_vectors = _Product.apply(grad, *ctx.saved_tensors, *matrix, not back)  # type: ignore[no-untyped-call]
        return by_vectors, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, vectors: Tensor, *matrix: Any) -> tuple[Tensor, int]:
        return _Product.apply(vectors.movedim(in_dims[0], 0), *matrix), 0  # type: ignore[no-untyped-call]
