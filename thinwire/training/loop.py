"""Training backend that trains one client after another, with autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.core.state import State, stack_states
from thinwire.core.tree import Tree, add, cut, flatten, stack, unstack, zeros_like
from thinwire.training.inputs import TrainingInputs, TrainingOutcome
from thinwire.training.step import Step, initial_opt_state, make_step, of_client, run_steps, seeded


@dataclass(frozen=True)
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
    opt = {slot: unstack(tree, i) for slot, tree in initial_opt_state(inputs).items()}
    one = of_client(inputs, i)
    if one.optimizer.forward_only and one.space.additive:
        return _from_zero(one, opt)
    if one.model.explicit and not one.trainable and len({block.dtype for block in one.start.values()}) == 1:
        # one call of torch for all blocks
        one = replace(one, start=cut(flatten(one.start), list(one.start), list(one.start.values())))
    return run_steps(_of_one(make_step(one, autograd=True)), one, opt)


def _from_zero(one: TrainingInputs, opt: State) -> TrainingOutcome:
    """Train from the weights of the start: of all coordinates, only those that this client moves differ from zero."""
    with torch.no_grad():
        base = one.space.expand(one.base, one.basis, one.start)
    moved = replace(one, base=base, start=zeros_like(one.start))
    outcome = run_steps(_of_one(make_step(moved, autograd=True)), moved, opt)
    return outcome._replace(coords=add(one.start, outcome.coords))


def stack_outcomes(runs: Sequence[TrainingOutcome]) -> TrainingOutcome:
    """The outcomes of clients that were trained alone, stacked."""
    return TrainingOutcome(
        stack([run.coords for run in runs]),
        stack([run.buffers for run in runs]),
        torch.cat([run.loss for run in runs]),
        tuple(steps for run in runs for steps in run.steps),
        stack_states([run.opt_state for run in runs]),
    )


def _of_one(step: Step) -> Step:
    """The step of one client, for a batch with a client axis of length one."""

    def call(*args: Any) -> tuple[Tree, State, Tree, Tensor]:
        coords, opt, buffers, start, own, x, y, mask = args
        x = unstack(x, 0) if isinstance(x, dict) else x[0]
        mask = None if mask is None else mask[0]
        coords, opt, buffers, loss = step(coords, opt, buffers, start, own, x, y[0], mask)
        return coords, opt, buffers, loss[None]

    return call
