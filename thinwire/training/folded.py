"""The step of many clients as one program of one model, without vmap: for adapters beside frozen weights.

    vmap:     each operation of the model has a client axis
    folded:   the examples of all clients are one batch of the frozen model; only A and B have a client axis

The loss of a client depends on its own examples and its own adapters alone, so the gradient of the sum of all losses is
the gradient of each. The frozen layers need no vmap, whose rules the host works through for every operation, and no
operation of the model falls back to a loop over clients.

It needs a model whose rows do not influence each other (`independent_rows`), such as a language model, and a space that
trains adapters only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from thinwire.core.state import State
from thinwire.core.tree import Tree, unstack
from thinwire.spaces.unmerged import A, B, Unmerged
from thinwire.training.functional import Functional
from thinwire.training.inputs import ExampleMask, TrainingInputs
from thinwire.training.step import Step, make_change, make_step, vmapped


def step_of_all(inputs: TrainingInputs, fixed: TrainingInputs | None = None, lr_factor: Tensor | None = None) -> Step:
    """The step of all clients at once; batch and mask have a client axis.

    Args:
        inputs: the inputs of a round.
        fixed: the same with other tensors, which the step reads.
        lr_factor: see `make_step`.
    """
    made = folded if can_fold(inputs) else lambda *args: vmapped(make_step(*args))
    return made(fixed or inputs, lr_factor)


def can_fold(inputs: TrainingInputs) -> bool:
    """Whether the examples of all clients can be one batch: nothing but adapters differs between clients."""
    model = inputs.model
    if not isinstance(model, Functional) or not getattr(model.module, "independent_rows", False):
        return False
    if not isinstance(inputs.space, Unmerged) or inputs.buffers or inputs.work.accumulate > 1:
        return False
    if inputs.optimizer.forward_only or inputs.penalty.active or model.logit_adjustment or model.adapter_dropout:
        return False
    if any(getattr(layer, "gradient_checkpointing", False) for layer in model.module.modules()):
        return False  # refused by vmap with a reason
    weights = inputs.space.expand(inputs.base, inputs.basis, unstack(inputs.start, 0))
    known = {*inputs.base, *(name + part for name in inputs.base for part in (A, B))}
    return weights.keys() <= known and all(weights[name] is block for name, block in inputs.base.items())


def folded(inputs: TrainingInputs, lr_factor: Tensor | None = None) -> Step:
    """The step of all clients, whose examples are one batch."""
    model, base = inputs.model, inputs.base
    assert isinstance(model, Functional)
    change = vmap(make_change(inputs, lr_factor))

    def adapters(coords: Tree) -> Tree:
        weights = inputs.space.expand(base, inputs.basis, coords)
        return {name: block for name, block in weights.items() if name not in base}

    def step(
        coords: Tree, opt: State, buffers: Tree, start: Tree, own: Tree, x: Any, y: Tensor, mask: ExampleMask
    ) -> tuple[Tree, State, Tree, Tensor]:
        leaves = {name: block.detach().requires_grad_() for name, block in coords.items()}
        with torch.enable_grad():
            losses = model.losses({**base, **vmap(adapters)(leaves)}, x, y, mask)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()))
        with torch.no_grad():
            coords, opt = change(dict(zip(leaves, grads, strict=True)), {}, coords, opt, start, own)
        return coords, opt, buffers, losses.detach()

    return step
