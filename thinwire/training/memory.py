"""Memory of local training, measured on a few examples before a run starts.

    activations    tensors that autograd keeps from the forward to the backward pass of a batch
    a client       4 copies of what it trains: values, gradient, change, optimizer state

>>> from thinwire.data.examples import Arrays
>>> from thinwire.spaces import Full
>>> model = Functional.of(nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 2)))
>>> pool = Arrays(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
>>> one, two = (activation_bytes(model, Full(), model.weights(), {}, model.weights(), pool, batch=n) for n in (10, 20))
>>> 4_000 <= (two - one) / 10 < 5_000
True
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from thinwire.core.tree import Tree
from thinwire.data.examples import Examples
from thinwire.spaces.base import Space
from thinwire.training.functional import Functional

FEW = 2  # examples; batch norm needs two


def activation_bytes(
    model: Functional, space: Space, base: Tree, basis: Tree, coords: Tree, examples: Examples, *, batch: int
) -> int:
    """The bytes that autograd keeps for the backward pass of a batch of the widest examples.

    They grow linearly with the batch, so they are measured with two and with four examples.

    Args:
        model: the model and its loss.
        space: the space in which clients are trained.
        base: its base weights.
        basis: its basis.
        coords: its coordinates.
        examples: the training examples.
        batch: examples in a step.
    """
    widest = examples.widest(torch.arange(len(examples)))
    few = widest.repeat(FEW)[:FEW]

    def measured(times: int) -> int:
        return _kept(model, space, base, basis, coords, *examples.gather(few.repeat(times)))

    first, second = measured(1), measured(2)
    return max(0, first + (second - first) * (batch - FEW) // FEW)


def model_bytes(module: nn.Module, copies: int = 1) -> int:
    """The bytes of a model: of its weights and buffers in each copy, and of layers in few bits, which copies share.

    >>> model_bytes(nn.Linear(4, 2)), model_bytes(nn.Linear(4, 2), copies=2)
    (40, 80)
    """
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    seen: dict[int, int] = {}
    for part in module.modules():
        if hasattr(part, "blocks"):
            seen[id(part.blocks)] = int(getattr(part, "constant_bytes", 0))
    return copies * own + sum(seen.values())


def _kept(
    model: Functional, space: Space, base: Tree, basis: Tree, coords: Tree, inputs: Tree | Tensor, targets: Tensor
) -> int:
    """The bytes of all different tensors that autograd keeps, without the weights."""
    weights = {block.untyped_storage().data_ptr() for tree in (base, basis, coords) for block in tree.values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # a reference, so that its memory is not used again
        return tensor

    with torch.enable_grad(), torch.random.fork_rng(devices=[]), saved_tensors_hooks(keep, lambda tensor: tensor):
        leaves = {name: block.detach().requires_grad_() for name, block in coords.items()}
        loss, _ = model.loss(space.expand(base, basis, leaves), model.buffers(), inputs, targets, None)
    del loss
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
