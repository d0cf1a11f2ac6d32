"""One local training step of one client, as a pure function.

    g = gradient of loss(expand(base, basis, coords));   g <- correction(g);   coords <- coords + optimizer(g)

All backends call the same step with the same batches, so their results differ by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap
from torch.utils._pytree import tree_map

from thinwire.core.tree import State, Tree, add, tmap, unstack
from thinwire.kernels.recurrent import batchable
from thinwire.optimizers.base import Optimizer
from thinwire.training.inputs import (
    ExampleMask,
    TrainingInputs,
    TrainingOutcome,
    UnsupportedModel,
    Workload,
)

Step: TypeAlias = Callable[..., tuple[Tree, State, Tree, Tensor]]
Expand: TypeAlias = Callable[[Tree], Tree]
Gradients: TypeAlias = tuple[Tree, Tree, tuple[Tensor, Tree]]  # by coordinates, by weights; loss and buffers

RECOMPUTES = (
    "the model recomputes layers in the backward pass (gradient checkpointing), which torch.func does not support"
)
OLD_FUNCTION = "the model has an autograd.Function that torch.func does not support, such as reentrant checkpointing"


@dataclass(frozen=True, eq=False, repr=False)  # vmap asks for a name, which would be a long text
class LocalStep:
    """The training step of one client, without a client axis.

    Args:
        inputs: everything that does not change between steps.
        expand: the weights of coordinates.
        optimizer: the optimizer, with the learning rate of the round.
        gradients: gradients, loss and buffers of a batch.
        lr_factor: a factor on every step, for recordings in which the learning rate must not be a constant.
    """

    inputs: TrainingInputs
    expand: Expand
    optimizer: Optimizer
    gradients: Callable[..., Gradients]
    lr_factor: Tensor | None = None

    def __call__(
        self, coords: Tree, opt: State, buffers: Tree, start: Tree, own: Tree, x: Any, y: Tensor, mask: ExampleMask
    ) -> tuple[Tree, State, Tree, Tensor]:
        """Next coordinates, optimizer state and buffers, and the loss of the batch."""
        batch, by_weights = (buffers, x, y, mask), dict[str, Tensor]()
        if self.optimizer.forward_only:
            grads, (loss, after) = self.optimizer.estimate(self._loss_after(coords, batch), coords, opt)
        else:
            grads, by_weights, (loss, after) = self.gradients(self, coords, batch)
        coords, opt = self.change(grads, by_weights, coords, opt, start, own)
        return coords, opt, after, loss

    def change(
        self, grads: Tree, by_weights: Tree, coords: Tree, opt: State, start: Tree, own: Tree
    ) -> tuple[Tree, State]:
        """The second half of a step: next coordinates and state from gradients by coordinates and by weights."""
        inputs, optimizer, factor = self.inputs, self.optimizer, self.lr_factor
        if inputs.penalty.active:
            # in the step, not before: the factor is a tensor that later rounds overwrite
            lr = optimizer.lr if factor is None else optimizer.lr * factor
            grads = add(grads, inputs.penalty.gradient(self.expand, coords, by_weights, lr))
        if inputs.correction.active:
            g, w, w0 = ({n: b for n, b in tree.items() if n not in inputs.private} for tree in (grads, coords, start))
            grads = {**grads, **inputs.correction.gradient(g, w, w0, own, inputs.shared)}
        if optimizer.clip_norm < math.inf:  # the norm is that of what is trained
            frozen = {name: torch.where(may_change, grads[name], 0) for name, may_change in inputs.trainable.items()}
            grads = {**grads, **frozen}
        moved, opt = optimizer.update(grads, opt, coords)
        if factor is not None:
            moved = tmap(lambda block: block * factor, moved)
        for name, may_change in inputs.trainable.items():
            moved[name] = torch.where(may_change, moved[name], 0)
        return add(coords, moved), opt

    def _loss_after(self, coords: Tree, batch: tuple) -> Callable[[Tree], tuple[Tensor, Tree]]:
        """The loss after a change of the coordinates, for steps without a backward pass."""
        model, space, basis = self.inputs.model, self.inputs.space, self.inputs.basis
        if not space.additive:
            return lambda change: model.loss(self.expand(add(coords, change)), *batch)
        with torch.no_grad():  # once a step: of the changes, only directions that are not zero are drawn
            moved = self.expand(coords)
        return lambda change: model.loss(space.expand(moved, basis, change), *batch)


def make_step(inputs: TrainingInputs, lr_factor: Tensor | None = None, *, autograd: bool = False) -> LocalStep:
    """The training step of one client of a round.

    Args:
        inputs: the inputs.
        lr_factor: see `LocalStep`; the `lr_factor` of the inputs is then None.
        autograd: compute gradients with autograd instead of torch.func. Not under vmap; takes less time and supports
            gradient checkpointing.
    """
    optimizer = inputs.optimizer if inputs.lr_factor is None else inputs.optimizer.scaled(inputs.lr_factor)
    gradients = _autograd_gradients if autograd else _functional_gradients
    return LocalStep(inputs, partial(inputs.space.expand, inputs.base, inputs.basis), optimizer, gradients, lr_factor)


def make_descent(inputs: TrainingInputs) -> Callable[..., tuple[Tree, Tree, Tensor]] | None:
    """The first half of the steps of all clients, if the second one is plain gradient descent, else None.

    It returns gradients, next buffers and losses: coordinates can then be changed in place, in one pass over them.
    """
    if inputs.correction.active or inputs.penalty.active or inputs.trainable or not inputs.optimizer.plain:
        return None
    step = make_step(inputs)

    def descent(coords: Tree, buffers: Tree, x: Any, y: Tensor) -> tuple[Tree, Tree, Tensor]:
        grads, _, (loss, after) = step.gradients(step, coords, (buffers, x, y, None))
        return grads, after, loss

    return vectorized(descent)


def vectorized(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same for all clients at once; arguments that are not None have a client axis."""

    def call(*args: Any) -> Any:
        with batchable():
            return vmap(step, tuple(None if one is None else 0 for one in args), randomness="different")(*args)

    return call


def _functional_gradients(step: LocalStep, coords: Tree, batch: tuple) -> Gradients:
    """Gradients by torch.func, for use under vmap. With a penalty, also with respect to the weights, in two steps."""
    model, expand = step.inputs.model, step.expand
    try:
        if step.inputs.penalty.active:  # it needs the gradient with respect to the weights
            weights, back = vjp(expand, coords)  # type: ignore[misc]
            by_weights, out = grad_and_value(lambda weights: model.loss(weights, *batch), has_aux=True)(weights)
            return back(by_weights)[0], by_weights, out
        grads, out = grad_and_value(lambda coords: model.loss(expand(coords), *batch), has_aux=True)(coords)
        return grads, {}, out
    except RuntimeError as error:
        # the second with torch 2.11, the third a hook of transformers for checkpointing
        if any(sign in str(error) for sign in ("saved tensor hooks", "_NoopSaveInputs", "Tensor.requires_grad_()")):
            raise UnsupportedModel(RECOMPUTES) from error
        if any(sign in str(error) for sign in ("setup_context staticmethod", "does not have vmap support")):
            raise UnsupportedModel(OLD_FUNCTION) from error
        raise


def _autograd_gradients(step: LocalStep, coords: Tree, batch: tuple) -> Gradients:
    """Gradients by autograd. With a penalty, weights that do not depend on coordinates get a gradient too."""
    model, expand, every = step.inputs.model, step.expand, step.inputs.penalty.active
    if model.explicit and expand(coords) is coords:  # no graph at all
        by_weights, out = model.gradient(coords, *batch)
        return by_weights, by_weights, out
    leaves = {name: block.detach().requires_grad_() for name, block in coords.items()}
    with torch.enable_grad():
        weights = expand(leaves)
    asked = {n: w.detach().requires_grad_() if every and not w.requires_grad else w for n, w in weights.items()}
    by_weights, out = model.gradient(asked, *batch)
    if weights is leaves:
        return by_weights, by_weights, out
    made = {name: grad for name, grad in by_weights.items() if weights[name].requires_grad}
    ends = [weights[name] for name in made]
    found = torch.autograd.grad(
        ends, list(leaves.values()), list(made.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True)), by_weights, out


def run_steps(step: Step, inputs: TrainingInputs) -> TrainingOutcome:
    """All steps of a workload; clients that have no steps left do not change.

    Args:
        step: the step of all clients of `inputs`; batch and mask have a client axis.
        inputs: initial coordinates, optimizer states and buffers in the form that `step` takes, and the batches.
    """
    work, device = inputs.work, inputs.work.index.device
    width, rows = work.index.shape[-1], torch.from_numpy(work.rows).to(device)
    loss_sum = torch.zeros(len(work.samples), device=device)
    coords, opt, buffers = inputs.start, inputs.opt_state, inputs.buffers
    short = np.asarray((work.rows < width).any(axis=0))
    finished = np.asarray((work.rows == 0).any(axis=0))
    for s in range(work.rows.shape[1]):
        x, y = work.gather(work.index[:, s])
        mask = None
        if short[s]:
            mask = (torch.arange(width, device=device) < rows[:, s, None]).to(torch.float32)
        now = (coords, opt, buffers)
        coords, opt, buffers, loss = step(*now, inputs.start, inputs.correction_state, x, y, mask)
        if finished[s]:
            coords, opt, buffers = keep_finished(rows[:, s] > 0, (coords, opt, buffers), now)
        loss_sum = loss_sum + loss.detach() * rows[:, s]
    return TrainingOutcome(coords, buffers, loss_sum / rows.sum(1), opt)


def keep_finished(
    active: Tensor, new: tuple[Tree, State, Tree], old: tuple[Tree, State, Tree]
) -> tuple[Tree, State, Tree]:
    """New coordinates, optimizer states and buffers of active clients, the old ones of clients that have finished."""
    return tree_map(lambda a, b: torch.where(active.view(-1, *(1,) * (a.dim() - 1)), a, b), new, old)


@contextmanager
def seeded(work: Workload) -> Iterator[None]:
    """Seed torch's generator, from which random layers draw; the caller's generator state is restored."""
    device = work.index.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(work.seed)
        yield


@contextmanager
def no_randomness(device: torch.device) -> Iterator[None]:
    """Raise UnsupportedModel if random numbers are drawn inside: their order would not be defined."""
    cuda = device.type == "cuda"

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    with torch.random.fork_rng(devices=[device] if cuda else []):
        before = states()
        yield
        if any(not torch.equal(a, b) for a, b in zip(before, states(), strict=True)):
            raise UnsupportedModel("the model draws random numbers in training")


def of_client(inputs: TrainingInputs, i: int) -> TrainingInputs:
    """The inputs of client i alone, without a client axis in its trees."""
    start, own = unstack(inputs.start, i), unstack(inputs.correction_state, i)
    opt = {slot: unstack(tree, i) for slot, tree in inputs.opt_state.items()}
    return replace(inputs, start=start, correction_state=own, opt_state=opt, work=inputs.work.client(i))
