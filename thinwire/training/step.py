"""One local training step of one client, as a pure function.

    g = gradient of loss(expand(base, basis, coords));   g <- correction(g);   coords <- coords + optimizer(g)

All backends call the same step with the same batches, so their results differ by rounding only.

Gradient accumulation: the gradient of a batch from that of its parts, one part in memory at a time.

    g = sum_p (n_p / n) g_p        n_p: labels of part p that are not -100, n: those of the batch

This is the gradient of the mean over all labels of the batch, not the mean of the means of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vjp, vmap

from thinwire.core.state import State
from thinwire.core.tree import Tree, add, repeat, tmap, unstack
from thinwire.errors import ConfigError
from thinwire.metrics.classification import label_counts
from thinwire.optimizers.base import Optimizer
from thinwire.training.inputs import (
    ExampleMask,
    TrainableModel,
    TrainingInputs,
    TrainingOutcome,
    UnsupportedModel,
    Workload,
)

Step: TypeAlias = Callable[..., tuple[Tree, State, Tree, Tensor]]
Change: TypeAlias = Callable[..., tuple[Tree, State]]
Descent: TypeAlias = Callable[..., tuple[Tree, Tree, Tensor]]

RECOMPUTES = (
    "the model recomputes layers in the backward pass (gradient checkpointing), which torch.func does not support"
)
OLD_FUNCTION = "the model has an autograd.Function that torch.func does not support, such as reentrant checkpointing"


def make_step(inputs: TrainingInputs, lr_factor: Tensor | None = None, *, autograd: bool = False) -> Step:
    """The training step of one client, without a client axis.

    Args:
        inputs: space, optimizer, correction and everything else that does not change between steps.
        lr_factor: a factor on every step, for recordings in which the learning rate must not be a constant.
        autograd: compute gradients with autograd instead of torch.func. Not under vmap; takes less time and supports
            gradient checkpointing.
    """
    optimizer = _optimizer(inputs, lr_factor)
    gradients = accumulated(_autograd_gradients if autograd else _functional_gradients, inputs.work.accumulate)
    change = make_change(inputs, lr_factor)

    def step(
        coords: Tree, opt: State, buffers: Tree, start: Tree, own: Tree, x: Any, y: Tensor, mask: ExampleMask
    ) -> tuple[Tree, State, Tree, Tensor]:
        batch = (buffers, x, y, mask)
        if optimizer.forward_only:
            by_weights: Tree = {}
            grads, (loss, after) = optimizer.estimate(_loss_after(inputs, coords, batch), coords, opt)
        else:
            grads, by_weights, (loss, after) = gradients(
                inputs.model, inputs.expand, coords, batch, inputs.penalty.active
            )
        coords, opt = change(grads, by_weights, coords, opt, start, own)
        return coords, opt, after, loss

    return step


def make_change(inputs: TrainingInputs, lr_factor: Tensor | None = None) -> Change:
    """The second half of a step: next coordinates and optimizer state from gradients by coordinates and by weights."""
    optimizer, correction, penalty = _optimizer(inputs, lr_factor), inputs.correction, inputs.penalty

    def change(grads: Tree, by_weights: Tree, coords: Tree, opt: State, start: Tree, own: Tree) -> tuple[Tree, State]:
        if penalty.active:
            # in the step, not before: the factor is a tensor that later rounds overwrite
            lr = optimizer.lr if lr_factor is None else optimizer.lr * lr_factor
            grads = add(grads, penalty.gradient(inputs.expand, coords, by_weights, lr))
        if correction.active:
            g, w, w0 = ({n: b for n, b in tree.items() if n not in inputs.private} for tree in (grads, coords, start))
            grads = {**grads, **correction.gradient(g, w, w0, own, inputs.shared)}
        if optimizer.clip_norm < math.inf:  # the norm is that of what is trained
            frozen = {name: torch.where(may_change, grads[name], 0) for name, may_change in inputs.trainable.items()}
            grads = {**grads, **frozen}
        moved, opt = optimizer.update(grads, opt, coords)
        if lr_factor is not None:
            moved = tmap(lambda block: block * lr_factor, moved)
        for name, may_change in inputs.trainable.items():
            moved[name] = torch.where(may_change, moved[name], 0)
        return add(coords, moved), opt

    return change


def make_descent(inputs: TrainingInputs) -> Descent | None:
    """The first half of the steps of all clients, if the second one is plain gradient descent, else None.

    It returns gradients, next buffers and losses: coordinates can then be changed in place, in one pass over them.
    """
    if inputs.correction.active or inputs.penalty.active or inputs.trainable or not inputs.optimizer.plain:
        return None
    gradients = accumulated(_functional_gradients, inputs.work.accumulate)

    def descent(coords: Tree, buffers: Tree, x: Any, y: Tensor) -> tuple[Tree, Tree, Tensor]:
        grads, _, (loss, after) = gradients(inputs.model, inputs.expand, coords, (buffers, x, y, None), False)
        return grads, after, loss

    return vmap(descent, randomness="different")


def _optimizer(inputs: TrainingInputs, lr_factor: Tensor | None) -> Optimizer:
    """The optimizer with the learning rate of the round, unless that is a factor on every step."""
    if lr_factor is not None or inputs.lr_factor is None:
        return inputs.optimizer
    return replace(inputs.optimizer, lr=inputs.optimizer.lr * inputs.lr_factor)  # type: ignore[type-var]


def _loss_after(inputs: TrainingInputs, coords: Tree, batch: tuple) -> Callable[[Tree], tuple[Tensor, Tree]]:
    """The loss after a change of the coordinates, for steps without a backward pass."""
    if not inputs.space.additive:
        return lambda change: inputs.model.loss(inputs.expand(add(coords, change)), *batch)
    with torch.no_grad():  # once a step: of the changes, only directions that are not zero are drawn
        moved = replace(inputs, base=inputs.expand(coords))
    return lambda change: inputs.model.loss(moved.expand(change), *batch)


def _functional_gradients(
    model: TrainableModel, expand: Callable[[Tree], Tree], coords: Tree, batch: tuple, every: bool
) -> Gradients:
    """Gradients by torch.func, for use under vmap. With `every`, also with respect to the weights, in two steps."""

    def loss_of(weights: Tree) -> tuple[Tensor, Tree]:
        with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTES):
            return model.loss(weights, *batch)

    try:
        if every:  # a penalty needs the gradient with respect to the weights
            weights, back = vjp(expand, coords)  # type: ignore[misc]
            by_weights, out = grad_and_value(loss_of, has_aux=True)(weights)
            return back(by_weights)[0], by_weights, out
        grads, out = grad_and_value(lambda point: loss_of(expand(point)), has_aux=True)(coords)
        return grads, {}, out
    except RuntimeError as error:
        # the second with torch 2.11, the third a hook of transformers for checkpointing
        if any(sign in str(error) for sign in (RECOMPUTES, "_NoopSaveInputs", "Tensor.requires_grad_()")):
            raise UnsupportedModel(RECOMPUTES) from error
        if any(sign in str(error) for sign in ("setup_context staticmethod", "does not have vmap support")):
            raise UnsupportedModel(OLD_FUNCTION) from error
        raise


def _autograd_gradients(
    model: TrainableModel, expand: Callable[[Tree], Tree], coords: Tree, batch: tuple, every: bool
) -> Gradients:
    """Gradients by autograd. With `every`, weights that do not depend on coordinates get a gradient too."""
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


def vmapped(step: Step) -> Step:
    """The step of all clients at once; batch and mask have a client axis."""

    def call(*args: Any) -> tuple[Tree, State, Tree, Tensor]:
        dims = (*(0,) * 7, None if args[-1] is None else 0)
        return vmap(step, in_dims=dims, randomness="different")(*args)

    return call


def initial_opt_state(inputs: TrainingInputs) -> State:
    """The stacked optimizer states that training begins with."""
    if inputs.opt_state is not None:
        return inputs.opt_state
    fresh = inputs.optimizer.init(unstack(inputs.start, 0))
    return {slot: repeat(tree, len(inputs.work.samples)) for slot, tree in fresh.items()}


def run_steps(step: Step, inputs: TrainingInputs, opt: State) -> TrainingOutcome:
    """All steps of a workload; clients that have no steps left do not change.

    Args:
        step: the step of all clients of `inputs`; batch and mask have a client axis.
        inputs: initial coordinates and buffers in the form that `step` takes, and the batches.
        opt: the initial optimizer states.
    """
    work, device = inputs.work, inputs.work.index.device
    width, rows = work.index.shape[-1], torch.from_numpy(work.rows).to(device)
    loss_sum = torch.zeros(len(work.samples), device=device)
    coords, buffers = inputs.start, inputs.buffers
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
    return TrainingOutcome(coords, buffers, loss_sum / rows.sum(1), work.steps, opt)


def keep_finished(
    active: Tensor, new: tuple[Tree, State, Tree], old: tuple[Tree, State, Tree]
) -> tuple[Tree, State, Tree]:
    """New coordinates, optimizer states and buffers of active clients, the old ones of clients that have finished."""

    def chosen(after: Tree, before: Tree) -> Tree:
        return tmap(lambda a, b: torch.where(active.view(-1, *(1,) * (a.dim() - 1)), a, b), after, before)

    opt = {slot: chosen(tree, old[1][slot]) for slot, tree in new[1].items()}
    return chosen(new[0], old[0]), opt, chosen(new[2], old[2])


@contextmanager
def seeded(work: Workload) -> Iterator[None]:
    """Seed torch's generator, from which random layers draw; the caller's generator state is restored."""
    device = work.index.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(work.keys[0].value)
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
    return replace(inputs, start=start, correction_state=own, work=inputs.work.client(i))


Gradients = tuple[Tree, Tree, tuple[Tensor, Tree]]  # by coordinates, by weights; loss and buffers


def accumulated(gradients: Callable[..., Gradients], parts: int) -> Callable[..., Gradients]:
    """A function like `gradients` that divides each batch into so many parts and adds up their gradients.

    Args:
        gradients: `gradients(model, expand, coords, (buffers, inputs, targets, mask), every)`.
        parts: number of parts; a batch with fewer examples has parts of one example.

    >>> def mean(model, expand, coords, batch, every):
    ...     return {"w": batch[2].float().mean()}, {}, (batch[2].float().mean(), {})
    >>> y = torch.tensor([1, 2, 6])
    >>> accumulated(mean, 2)(None, None, {}, ({}, y, y, None), False)[0]["w"].item()
    3.0
    """
    if parts == 1:
        return gradients

    def call(model: Any, expand: Any, coords: Tree, batch: tuple, every: bool) -> Gradients:
        buffers, inputs, targets, mask = batch
        counts = label_counts(targets) if mask is None else label_counts(targets) * mask
        total, length = counts.sum().clamp(min=1), -(-len(targets) // parts)
        sums: list[Tree] = []
        for first in range(0, len(targets), length):
            rows = slice(first, first + length)
            part = (buffers, _rows(inputs, rows), targets[rows], None if mask is None else mask[rows])
            by_coords, by_weights, (loss, buffers) = gradients(model, expand, coords, part, every)
            share = counts[rows].sum() / total
            # a part without labels has share 0, and a gradient that some losses make NaN
            found = [
                tmap(lambda g, s=share: torch.where(s > 0, g * s.to(g.dtype), 0), tree)
                for tree in (by_coords, by_weights, {"": loss})
            ]
            sums = [tmap(torch.add, old, new) for old, new in zip(sums, found, strict=True)] if sums else found
        return sums[0], sums[1], (sums[2][""], buffers)

    return call


def check_accumulates(module: nn.Module, logit_adjustment: float) -> None:
    """Raise ConfigError for a model or a loss whose gradient of a batch is not the sum of those of its parts.

    >>> check_accumulates(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 0.0)
    Traceback (most recent call last):
    thinwire.errors.ConfigError: local.accumulate is above 1, but layer '1' (BatchNorm1d) computes statistics of ...
    """
    for name, layer in module.named_modules():
        whole = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if whole or (isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats):
            raise ConfigError(
                f"local.accumulate is above 1, but layer {name!r} ({type(layer).__name__}) computes statistics of the "
                "whole batch; write accumulate = 1, or use a model without them, for example with group norm"
            )
    if logit_adjustment:
        raise ConfigError(
            "local.accumulate is above 1, but local.logit_adjustment counts the classes of the whole batch; write "
            "accumulate = 1, or logit_adjustment = 0"
        )


def _rows(inputs: Any, rows: slice) -> Any:
    """Some examples of a batch."""
    return {name: block[rows] for name, block in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
