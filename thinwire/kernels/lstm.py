"""The recurrence of an LSTM layer, with gradients under autograd and vmap: on a GPU in Triton (`lstm_triton.py`).

    i, f, g, o = inputs_t + W h_{t-1};   c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),   h_t = sigmoid(o) tanh(c_t)

>>> recurrence(torch.zeros(5, 3, 64), torch.zeros(64, 16)).shape      # 5 steps, 3 examples, 16 hidden units
torch.Size([5, 3, 16])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.support import derivative, for_many, for_one, has_triton

UNITS = 16  # hidden units of a tile: their number is a multiple of it


def recurrence(inputs: Tensor, weight: Tensor) -> Tensor:
    """The hidden states (steps, n, hidden), from a zero state.

    Args:
        inputs: (steps, n, 4 hidden) what each step adds to the gates.
        weight: (4 hidden, hidden) W.
    """
    kernel = weight.to(inputs.dtype)
    if has_triton(inputs.device) and weight.shape[1] % UNITS == 0 and inputs.dtype in (torch.float32, torch.bfloat16):
        return _Recurrence.apply(inputs, kernel)[0]  # type: ignore[no-untyped-call]
    return _by_steps(inputs, kernel)


def _by_steps(inputs: Tensor, weight: Tensor) -> Tensor:
    """The same by torch's operations."""
    back, kind = weight.t(), torch.promote_types(inputs.dtype, torch.float32)
    h = inputs.new_zeros(inputs.shape[1], weight.shape[1])
    c = h.to(kind)
    states = []
    # unbind instead of indexing: its gradient is one stack, not a full-size tensor of zeros per step
    for step in inputs.unbind(0):
        i, f, g, o = torch.addmm(step, h, back).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = (torch.sigmoid(o) * torch.tanh(c)).to(inputs.dtype)
        states.append(h)
    return torch.stack(states)


def _kernels() -> Any:
    from thinwire.kernels import lstm_triton

    return lstm_triton


class _Recurrence(torch.autograd.Function):
    """The hidden states; gates and cells are further outputs, saved for the gradient."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return for_one(_kernels().forward, inputs, weight)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        hidden, gates, cells = output
        ctx.mark_non_differentiable(gates, cells)
        ctx.set_materialize_grads(False)  # no zeros for them
        ctx.save_for_backward(inputs[1], hidden, gates, cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:  # type: ignore[override]
        weight, hidden, gates, cells = ctx.saved_tensors
        by_inputs = _input_gradient(grad, gates, cells, weight)
        by_weight = by_inputs[1:].flatten(0, 1).mT @ hidden[:-1].flatten(0, 1)
        return by_inputs, by_weight

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Tensor) -> tuple:
        return for_many(_kernels().forward, info, in_dims, args)


@derivative
def _input_gradient(*args: Tensor) -> Tensor:
    """The gradient with respect to the inputs."""
    return _kernels().gradient(*args)  # type: ignore[no-any-return]
