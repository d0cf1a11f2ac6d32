"""Products with a random matrix that is never stored: it is drawn from its key, block by block, as it is multiplied.

    forward   U = B A          backward   dB = dU A^T          A: p x e from a key;  memory O(block + k e + k p)

Entry (i, j) of A is number i e + j of the key's stream, so any block can be drawn at any time, and the result does not
depend on how the rows are cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.core.rng import Device, Key

BLOCK = 1 << 22  # entries drawn at a time: 16 MiB of float32


def draw_rows(key: Key, first: int, rows: int, e: int, entries: str, scale: float, device: Device) -> Tensor:
    """Rows `first` to `first + rows` of A."""
    draw = key.signs if entries == "sign" else key.normal
    return draw(rows, e, start=first * e, device=device).mul_(scale)


def multiply_generated(b: Tensor, key: Key, p: int, e: int, entries: str, scale: float) -> Tensor:
    """B A for a matrix A of p x e that is drawn as it is needed.

    Args:
        b: (..., k, p).
        key: the key of A.
        p: rows of A.
        e: columns of A.
        entries: "sign" or "gaussian".
        scale: what every entry is multiplied by.

    >>> b, key = torch.randn(2, 3), Key(5)
    >>> torch.allclose(multiply_generated(b, key, 3, 7, "sign", 1.0), b @ key.signs(3, 7), atol=1e-6)
    True
    """
    out: Tensor = _Multiply.apply(b, key.value, p, e, entries, scale)  # type: ignore[no-untyped-call]
    return out


def _blocks(p: int, e: int) -> list[tuple[int, int]]:
    step = max(1, BLOCK // e)
    return [(first, min(step, p - first)) for first in range(0, p, step)]


class _Multiply(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(b: Tensor, key: int, p: int, e: int, entries: str, scale: float) -> Tensor:
        out = b.new_zeros(*b.shape[:-1], e)
        for first, rows in _blocks(p, e):
            out = out + b[..., first : first + rows] @ draw_rows(Key(key), first, rows, e, entries, scale, b.device)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.of = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return (_Project.apply(grad, *ctx.of), None, None, None, None, None)  # type: ignore[no-untyped-call]


class _Project(torch.autograd.Function):
    """The other direction, G A^T; its own gradient is the first one again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, key: int, p: int, e: int, entries: str, scale: float) -> Tensor:
        parts = [
            g @ draw_rows(Key(key), first, rows, e, entries, scale, g.device).transpose(0, 1)
            for first, rows in _blocks(p, e)
        ]
        return torch.cat(parts, dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.of = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return (_Multiply.apply(grad, *ctx.of), None, None, None, None, None)  # type: ignore[no-untyped-call]
