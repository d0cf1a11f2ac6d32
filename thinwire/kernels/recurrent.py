"""Recurrent layers with gradients under autograd and vmap, for which torch's own kernels have no batching rule.

    recurrence     of an LSTM layer from a zero state: on a GPU in Triton (`lstm_triton.py`)
    layers         `nn.LSTM`, `nn.GRU` and `nn.RNN` by single operations

An LSTM layer is

    i, f, g, o = inputs_t + W h_{t-1};   c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),   h_t = sigmoid(o) tanh(c_t)

>>> recurrence(torch.zeros(5, 3, 64), torch.zeros(64, 16)).shape      # 5 steps, 3 examples, 16 hidden units
torch.Size([5, 3, 16])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

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


def layers(
    kind: str,
    x: Tensor,
    first: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    biases: bool,
    depth: int,
    dropout: float,
    training: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The layers of a module of torch: outputs, and the last state of each layer and direction.

    Args:
        kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`, the name of the function of torch.
        x: the inputs, (n, steps, inputs) if `batch_first`, else (steps, n, inputs).
        first: the initial states, each (layers and directions, n, hidden).
        weights: two matrices and, with `biases`, two vectors of each layer and direction.
        biases: whether a layer has vectors.
        depth: the number of layers.
        dropout: the probability with which an input of a later layer is left out.
        training: whether there is dropout.
        both: whether there is a second direction, from the last step to the first.
        batch_first: the order of the axes of `x` and of the outputs.

    >>> gru, x = torch.nn.GRU(3, 4), torch.ones(5, 2, 3)
    >>> ours = layers("gru", x, (torch.zeros(1, 2, 4),), gru._flat_weights, True, 1, 0.0, True, False, False)
    >>> torch.allclose(ours[0], gru(x)[0], atol=1e-6)
    True
    """
    states, last = x.transpose(0, 1) if batch_first else x, []
    width, ways = 4 if biases else 2, 2 if both else 1
    for layer in range(depth):
        if layer and dropout and training:
            states = F.dropout(states, dropout)
        made = []
        for way in range(ways):
            number = layer * ways + way
            into, own, *shift = weights[number * width : (number + 1) * width]
            given, kept = shift or (None, None)
            state, order = tuple(block[number] for block in first), -1 if way else 1
            outputs = []
            for step in F.linear(states, into, given).unbind(0)[::order]:
                state = _CELLS[kind](step, F.linear(state[0], own, kept), *state)
                outputs.append(state[0])
            made.append(torch.stack(outputs[::order]))
            last.append(state)
        states = torch.cat(made, -1)
    return states.transpose(0, 1) if batch_first else states, *map(torch.stack, zip(*last, strict=True))


def _lstm(x: Tensor, own: Tensor, _: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (x + own).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(x: Tensor, own: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    (reset, update, new), (own_reset, own_update, own_new) = x.chunk(3, -1), own.chunk(3, -1)
    new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
    return (new + torch.sigmoid(update + own_update) * (h - new),)


_CELLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda x, own, _: (torch.tanh(x + own),),
    "rnn_relu": lambda x, own, _: (torch.relu(x + own),),
}


class _Batchable(TorchFunctionMode):
    """Replaces recurrent layers, but for those of packed sequences or with projections."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CELLS and len(args) == 9 and isinstance(args[3], bool):
            x, first, weights, biases, depth, *_, both, _ = args
            if len(weights) == (4 if biases else 2) * depth * (1 + both):
                return layers(name, x, first if isinstance(first, tuple) else (first,), *args[2:])
        return func(*args, **(kwargs or {}))


@contextmanager
def batchable() -> Iterator[None]:
    """A context in which recurrent layers and attention are single operations, which vmap can batch.

    torch's fused kernels cannot be batched, and clients would be trained one after another.
    """
    with sdpa_kernel(SDPBackend.MATH), _Batchable():
        yield


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
