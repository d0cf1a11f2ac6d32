"""Frozen layers of a language model in 4 or 8 bits, computed in the type of their inputs.

    weight = low + step * code          one low and one step for each 32 values of a row;  code: 4 or 8 bits

Of each block the number of steps between its smallest and its largest value is chosen, so that the values of a GGUF
file with 4 bits (Q4_0, Q4_1) are kept up to rounding; with 8 bits those of Q8_0 and, in blocks of 16, of Q6_K. Such
layers are constants: not trained, not sent, without coordinates. Layers with adapters stay as they are.

>>> weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
>>> layer = Blocks.of(weight, bits=8)
>>> bool((layer.decoded(torch.float32) - weight).abs().max() < 0.02), layer.nbytes < 0.4 * 4 * weight.numel()
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.names import makes_query_or_value

BLOCK = 32  # values with one low and one step
SMALL = 16  # the same of embeddings
EXACT = 1e-5  # of the range of a block: an error that is rounding


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix in blocks of few bits.

    Args:
        codes: (rows, blocks, block) uint8; with 4 bits (rows, blocks, block / 2), two codes a byte.
        low, step: (rows, blocks) float32.
        columns: of the matrix; its last block may have more.
        bits: 4 or 8.
        moved: copies on other devices.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    columns: int
    bits: int
    moved: dict[torch.device, Blocks] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, weight: Tensor, bits: int, block: int = BLOCK) -> Blocks:
        """The blocks of a matrix."""
        columns = weight.shape[1]
        values = F.pad(weight.detach().float(), (0, -columns % block), mode="replicate")
        values = values.reshape(len(weight), -1, block)
        low, span = values.amin(2), values.amax(2) - values.amin(2)
        most = (1 << bits) - 1
        step = span / most
        error = _error(values, low, step)
        if bits == 8:
            symmetric = _symmetric_step(values)
            found = _error(values, low, symmetric)
            better = (found < error) & (span <= (most + 0.5) * symmetric)
            step, error = torch.where(better, symmetric, step), torch.where(better, found, error)
        grids = {most // k * k for k in range(2, 1 << min(bits, 6))} - {most}  # that have k steps in them
        for count in sorted(grids, reverse=True):
            open_ = error > EXACT * span
            if not open_.any():
                break
            trial = span[open_] / count
            found = _error(values[open_], low[open_], trial)
            better = found < error[open_]
            step[open_] = torch.where(better, trial, step[open_])
            error[open_] = torch.where(better, found, error[open_])
        codes = ((values - low[..., None]) / step.clamp(min=1e-30)[..., None]).round().clamp(0, most).to(torch.uint8)
        if bits == 4:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return cls(codes, low, step, columns, bits)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The matrix."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(2)
        values = self.low[..., None] + self.step[..., None] * codes
        return values.flatten(1)[:, : self.columns].to(dtype)

    def with_each(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """The blocks with changed tensors, for example some of the rows."""
        return Blocks(change(self.codes), change(self.low), change(self.step), self.columns, self.bits)

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on a device: one copy, which layers that share a matrix go on sharing."""
        if device == self.codes.device:
            return self
        if device not in self.moved:
            self.moved[device] = self.with_each(lambda one: one.to(device))
        return self.moved[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> Blocks:
        return self  # constants: copies of a model share them

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(one.nbytes for one in (self.codes, self.low, self.step))


class _Product(torch.autograd.Function):
    """x W^T of a matrix in blocks; the matrix is decoded again in the backward pass instead of being kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, codes: Tensor, low: Tensor, step: Tensor, columns: int, bits: int) -> Tensor:
        return F.linear(x, Blocks(codes, low, step, columns, bits).decoded(x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:4])
        ctx.form = inputs[4:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (grad @ Blocks(*ctx.saved_tensors, *ctx.form).decoded(grad.dtype), None, None, None, None, None)


class _Constant(nn.Module):
    """A module with a matrix in blocks: neither a parameter nor a buffer, so nothing copies, trains or sends it."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Constant:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.blocks = self.blocks.to(fn(torch.empty(0, device=self.blocks.low.device)).device)
        return self


class QuantizedLinear(_Constant):
    """A linear layer with a frozen matrix in blocks."""

    def __init__(self, blocks: Blocks, bias: Tensor | None = None) -> None:
        super().__init__(blocks)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + bias."""
        blocks = self.blocks
        out: Tensor = _Product.apply(x, blocks.codes, blocks.low, blocks.step, blocks.columns, blocks.bits)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class QuantizedEmbedding(_Constant):
    """A lookup in a frozen matrix in blocks."""

    def __init__(self, blocks: Blocks, dtype: torch.dtype) -> None:
        super().__init__(blocks)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these ids."""
        rows = self.blocks.with_each(lambda one: one[ids.reshape(-1)])
        return rows.decoded(self.dtype).reshape(*ids.shape, -1)


def quantize(model: Any, bits: int, dtype: torch.dtype) -> None:
    """Replace the linear layers of a language model, in place, but those of queries and values, and its embedding.

    Embedding and output layer have 8 bits; if they are one matrix, they share it.

    Args:
        model: a model of transformers with its weights in float32.
        bits: 4 or 8.
        dtype: the type in which it will compute.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head and not makes_query_or_value(path):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, QuantizedLinear(Blocks.of(layer.weight, bits), layer.bias))
    if type(embedding) is nn.Embedding and type(head) is nn.Linear:
        shared = Blocks.of(embedding.weight, 8, SMALL)
        own = shared if head.weight is embedding.weight else Blocks.of(head.weight, 8, SMALL)
        model.set_input_embeddings(QuantizedEmbedding(shared, dtype))
        model.set_output_embeddings(QuantizedLinear(own, head.bias))
    with torch.no_grad():
        for weight in model.parameters():  # copied, because weights that were read from a file keep all of it in memory
            weight.data = weight.data.clone()


def _symmetric_step(values: Tensor) -> Tensor:
    """The steps of Q8_0, whose largest magnitude among 32 values is 127 steps: one for each block of 16 or 32."""
    largest = values.abs().amax(2)
    together = BLOCK // values.shape[2]  # blocks with the same step
    rows, blocks = largest.shape
    groups = F.pad(largest, (0, -blocks % together)).view(rows, -1, together)
    return groups.amax(2).repeat_interleave(together, 1)[:, :blocks] / 127


def _error(values: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """The largest error in each block with these steps."""
    step, moved = step.clamp(min=1e-30)[..., None], values - low[..., None]
    return (moved - step * (moved / step).round()).abs().amax(-1)
