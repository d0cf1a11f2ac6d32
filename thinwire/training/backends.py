"""Training backends: clients one after another, one on each core, or all in one program.

    LoopTrainer         one client after another, with autograd; supports every model
    ThreadPoolTrainer   one client on each core of a CPU: a step of a small model is too little work for several cores
    VmapTrainer         all clients in one vectorized program (torch.func.vmap)
    folded              all clients in one program without vmap, for adapters beside frozen weights

All take the same steps with the same batches, so they differ by rounding only. In threads each core has its own copy of
the model, because `functional_call` replaces the module's weights while it runs; the result of a client does not depend
on the thread that trains it.

`folded` needs a model whose rows do not influence each other (`independent_rows`), such as a language model, and a
space that trains adapters only. The examples of all clients are one batch of the frozen model; only A and B have a
client axis. The loss of a client depends on its own examples and adapters alone, so the gradient of the sum of all
losses is the gradient of each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from thinwire.core.parallel import PARALLEL_BYTES, cores, each, on_one_core
from thinwire.core.tree import Spec, State, Tree, Vector, add, flatten, repeat, stack, stack_states, unstack, zeros_like
from thinwire.spaces.lora import A, B
from thinwire.training.functional import Functional
from thinwire.training.inputs import ExampleMask, TrainableModel, TrainingInputs, TrainingOutcome
from thinwire.training.step import (
    LocalStep,
    Step,
    make_step,
    no_randomness,
    of_client,
    run_steps,
    seeded,
    vectorized,
)


class LoopTrainer:
    """Trains one client after another. Supports every model."""

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train the clients in order."""
        runs = []
        for i in range(len(inputs.work.samples)):
            with seeded(inputs.work.client(i)):
                runs.append(train_client(inputs, i))
        return stack_outcomes(runs)


def train_client(inputs: TrainingInputs, i: int) -> TrainingOutcome:
    """Train client i alone; the trees of the outcome have no client axis."""
    one = of_client(inputs, i)
    if one.optimizer.forward_only and one.space.additive:
        return _from_zero(one)
    if one.model.explicit and not one.trainable and len({block.dtype for block in one.start.values()}) == 1:
        # one call of torch for all blocks
        one = replace(one, start=Vector(flatten(one.start), Spec.of(one.start)))
    return run_steps(_of_one(make_step(one, autograd=True)), one)


def _from_zero(one: TrainingInputs) -> TrainingOutcome:
    """Train from the weights of the start: of all coordinates, only those that this client moves differ from zero."""
    with torch.no_grad():
        moved = replace(one, base=one.space.expand(one.base, one.basis, one.start), start=zeros_like(one.start))
    outcome = run_steps(_of_one(make_step(moved, autograd=True)), moved)
    return outcome._replace(coords=add(one.start, outcome.coords))


def stack_outcomes(runs: Sequence[TrainingOutcome]) -> TrainingOutcome:
    """The outcomes of clients that were trained alone, stacked."""
    return TrainingOutcome(
        stack([run.coords for run in runs]),
        stack([run.buffers for run in runs]),
        torch.cat([run.loss for run in runs]),
        stack_states([run.opt_state for run in runs]),
    )


def _of_one(step: Step) -> Step:
    """The step of one client, for a batch with a client axis of length one."""

    def call(*args: Any) -> tuple[Tree, State, Tree, Tensor]:
        *trees, x, y, mask = args
        x = tree_map(lambda block: block[0], x)
        coords, opt, buffers, loss = step(*trees, x, y[0], None if mask is None else mask[0])
        return coords, opt, buffers, loss[None]

    return call


def step_of_all(inputs: TrainingInputs, fixed: TrainingInputs | None = None, lr_factor: Tensor | None = None) -> Step:
    """The step of all clients at once; batch and mask have a client axis.

    Args:
        inputs: the inputs of a round.
        fixed: the same with other tensors, which the step reads.
        lr_factor: see `make_step`.
    """
    step = make_step(fixed or inputs, lr_factor)
    if can_fold(inputs):
        return folded(step)
    return vectorized(step)


def can_fold(inputs: TrainingInputs) -> bool:
    """Whether the examples of all clients can be one batch: nothing but adapters differs between clients."""
    model = inputs.model
    if not isinstance(model, Functional) or not getattr(model.module, "independent_rows", False):
        return False
    if inputs.buffers:
        return False
    if inputs.optimizer.forward_only or inputs.penalty.active or model.logit_adjustment or model.adapter_dropout:
        return False
    if any(getattr(layer, "gradient_checkpointing", False) for layer in model.module.modules()):
        return False  # refused by vmap with a reason
    weights = inputs.space.expand(inputs.base, inputs.basis, unstack(inputs.start, 0))
    known = {*inputs.base, *(name + part for name in inputs.base for part in (A, B))}
    return weights.keys() <= known and all(weights[name] is block for name, block in inputs.base.items())


def folded(one: LocalStep) -> Step:
    """The step of all clients, whose examples are one batch, from that of one."""
    model, base, change = one.inputs.model, one.inputs.base, vmap(one.change)
    assert isinstance(model, Functional)

    def adapters(coords: Tree) -> Tree:
        return {name: block for name, block in one.expand(coords).items() if name not in base}

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


class VmapTrainer:
    """Trains all clients at once. Fastest for small models on a CPU, and for large models on a GPU."""

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train all clients in one program."""
        stacked = replace(inputs, buffers=repeat(inputs.buffers, len(inputs.work.samples)))
        with seeded(inputs.work):
            return run_steps(step_of_all(inputs), stacked)


class ThreadPoolTrainer:
    """Trains clients at the same time, in the threads of `parallel.each`; with one core, no thread is started."""

    def __init__(self) -> None:
        self._model: TrainableModel | None = None  # the last one
        self._idle = SimpleQueue[TrainableModel]()  # its copies, one for each thread

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train several clients at a time. Raises UnsupportedModel for a model that draws random numbers."""

        def train_one(i: int) -> TrainingOutcome:
            model = self._idle.get()
            try:
                return train_client(replace(inputs, model=model), i)
            finally:
                self._idle.put(model)

        with no_randomness(inputs.work.index.device):  # all threads share one generator
            if self._model is not inputs.model:
                self._model, self._idle = inputs.model, SimpleQueue()
                for _ in range(cores()):
                    self._idle.put(copy.deepcopy(inputs.model))
                if cores() > 1:  # torch imports some modules lazily, which two threads must not do at the same time
                    with on_one_core():
                        train_one(0)
            return stack_outcomes(each(train_one, range(len(inputs.work.samples)), PARALLEL_BYTES))
