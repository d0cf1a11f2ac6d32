"""Training on clients: one pure step for one client, run for many at once (vmap) or for one after another (loop).

    g = gradient of loss(expand(base, basis, coords));   g <- correction;   coords <- coords + optimiser(g)

Both ways call the same step with the same batches, so they differ by rounding only. Two more build on them: `graphed`
replays a recording of the first, `threaded` goes the second way with several clients side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap

from thinwire.core.key import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, add, repeat, stack, tmap, unstack
from thinwire.errors import ConfigError
from thinwire.protocol.method import Method
from thinwire.protocol.state import Public

Backend = Literal["graph", "threads", "vmap", "loop"]
Mask: TypeAlias = "Tensor | None"
Step: TypeAlias = Callable[..., tuple[Tree, Tree, Tree, Tensor]]


RECOMPUTES = "the model runs layers again in the backward pass (gradient checkpointing), which torch.func cannot follow"
OLD_FUNCTION = "the model has an autograd.Function that torch.func cannot follow, such as reentrant checkpointing"


class UnsupportedModel(ConfigError):
    """This way of training would not do what the others do; says why."""


class Learner(Protocol):
    """A model and its loss as a pure function."""

    def loss(self, weights: Tree, buffers: Tree, inputs: Any, targets: Tensor, mask: Mask) -> tuple[Tensor, Tree]:
        """Mean loss over the examples that `mask` (1 or 0 each; None means all) counts, and the next buffers."""
        ...

    def gradient(
        self, weights: Tree, buffers: Tree, inputs: Any, targets: Tensor, mask: Mask
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """Its gradient by the weights that require one, and what `loss` returns; never called under vmap."""
        ...


@dataclass(frozen=True, eq=False)
class Workload:
    """The local work of some clients in one round.

    Args:
        index: (clients, steps, batch) int64, on the device: which examples, by the numbers that `gather` knows.
        rows: (clients, steps) how many of each batch count; 0 where a client is done.
        samples: how many examples each client has.
        keys: one a client, for random layers of the model such as dropout.
        gather: fetches inputs and targets.
    """

    index: Tensor
    rows: np.ndarray
    samples: tuple[int, ...]
    keys: tuple[Key, ...]
    gather: Callable[[Tensor], tuple[Any, Tensor]]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def steps(self) -> tuple[int, ...]:
        """How many steps each client takes."""
        return tuple((self.rows > 0).sum(1).tolist())

    def client(self, i: int) -> Workload:
        """The work of one client alone, without the steps in which it only waits for others."""
        steps = int((self.rows[i] > 0).sum())
        part = slice(i, i + 1)
        return Workload(
            self.index[part, :steps], self.rows[part, :steps], self.samples[part], self.keys[part], self.gather
        )

    def first(self, clients: int, steps: int) -> Workload:
        """The first steps of the first clients."""
        part = slice(clients)
        return Workload(
            self.index[part, :steps], self.rows[part, :steps], self.samples[part], self.keys[part], self.gather
        )


class TrainingOutcome(NamedTuple):
    """What local training leaves, stacked by client."""

    coords: Tree
    buffers: Tree
    loss: Tensor  # (clients,) mean over all examples seen
    steps: tuple[int, ...]
    opt: Tree  # the optimisers after the last step


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """All that the training of some clients in a round depends on.

    Args:
        method: the space, the optimiser and the correction to use.
        learner: the model.
        public: what everybody knows; not changed.
        basis: the basis of this round.
        start: stacked coordinates to start from.
        mine: stacked memory of the correction.
        work: which examples in which order.
        opt: stacked states of the optimisers to go on with; fresh ones if not given.
        only: by block, which numbers may move; a block that is not in it moves everywhere.
    """

    method: Method
    learner: Learner
    public: Public
    basis: Tree
    start: Tree
    mine: Tree
    work: Workload
    opt: Tree | None = None
    only: Tree = field(default_factory=dict)

    def step(self, *, alone: bool = False) -> Step:
        """One step of one client."""
        private = self.method.schedule.never(Spec.of(self.public.coords))
        return make_step(self.method, self.learner, self.public, self.basis, private, only=self.only, alone=alone)

    def first_opt(self) -> Tree:
        """The stacked optimisers that training begins with."""
        if self.opt is not None:
            return self.opt
        fresh = self.method.client_opt_at(self.public.version).init(unstack(self.start, 0))
        return repeat(fresh, len(self.work))


def local_train(lesson: TrainingInputs, how: Literal["vmap", "loop"]) -> TrainingOutcome:
    """Train some clients, all in one program or one after another."""
    work, buffers = lesson.work, lesson.public.buffers
    step, opt = lesson.step(alone=how == "loop"), lesson.first_opt()
    if how == "vmap":
        with chance(work):
            return _train(together(step), lesson.start, opt, repeat(buffers, len(work)), lesson.mine, work)
    runs = []
    for i in range(len(work)):
        with chance(work.client(i)):
            runs.append(train_one(lesson, step, opt, i))
    return gathered(runs)


def train_one(lesson: TrainingInputs, step: Step, opt: Tree, i: int) -> TrainingOutcome:
    """Train client i alone."""
    start, opt, mine = (unstack(tree, i) for tree in (lesson.start, opt, lesson.mine))
    return _train(_alone(step), start, opt, lesson.public.buffers, mine, lesson.work.client(i))


def gathered(runs: Sequence[TrainingOutcome]) -> TrainingOutcome:
    """What clients that were trained alone leave, stacked."""
    return TrainingOutcome(
        stack([run.coords for run in runs]),
        stack([run.buffers for run in runs]),
        torch.cat([run.loss for run in runs]),
        tuple(steps for run in runs for steps in run.steps),
        stack([run.opt for run in runs]),
    )


@contextmanager
def chance(work: Workload) -> Iterator[None]:
    """Random layers draw from torch's generator: it is seeded here, and the caller's is left as it was."""
    device = work.index.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(work.keys[0].value)
        yield


@contextmanager
def no_chance(device: torch.device) -> Iterator[None]:
    """Raise UnsupportedModel if random numbers were drawn inside: there they would come in an order of nobody's choice."""
    cuda = device.type == "cuda"

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    with torch.random.fork_rng(devices=[device] if cuda else []):
        before = states()
        yield
        if any(not torch.equal(a, b) for a, b in zip(before, states(), strict=True)):
            raise UnsupportedModel("the model draws random numbers while it trains")


def make_step(
    method: Method,
    learner: Learner,
    public: Public,
    basis: Tree,
    private: frozenset[str],
    factor: Tensor | None = None,
    only: Tree | None = None,
    alone: bool = False,
) -> Step:
    """One step of one client, without a client axis. Private blocks have nothing to be corrected towards.

    `factor` is multiplied onto every step, for what the method's rate would do. `only` says which numbers may move.
    A step that is never vmapped (`alone`) takes its gradient without torch.func, which costs less time and lets layers
    run again for it (gradient checkpointing).
    """
    optimiser = method.client_opt_at(public.version)

    def expand(point: Tree) -> Tree:
        return method.space.expand(public.base, basis, point)

    def spoken(tree: Tree) -> Tree:
        return {name: block for name, block in tree.items() if name not in private}

    def step(
        coords: Tree, opt: Tree, buffers: Tree, start: Tree, mine: Tree, inputs: Any, targets: Tensor, mask: Mask
    ) -> tuple[Tree, Tree, Tree, Tensor]:
        batch = (buffers, inputs, targets, mask)

        def loss_of(weights: Tree) -> tuple[Tensor, Tree]:
            with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTES):
                return learner.loss(weights, *batch)

        if alone:
            grads, pull, (loss, after) = slope(learner, expand, coords, batch, method.penalty.active)
        elif method.penalty.active:  # a penalty wants to see the gradient by the weights: it is taken in two steps
            weights, back = vjp(expand, coords)  # type: ignore[misc]
            with _followed():
                pull, (loss, after) = grad_and_value(loss_of, has_aux=True)(weights)
            grads = back(pull)[0]
        else:
            with _followed():
                grads, (loss, after) = grad_and_value(lambda point: loss_of(expand(point)), has_aux=True)(coords)
        if method.penalty.active:
            grads = add(grads, method.penalty.gradient(expand, coords, pull, optimiser.lr))
        bent = method.correction.gradient(spoken(grads), spoken(coords), spoken(start), mine, public.shared)
        grads = {**grads, **bent}
        change, opt = optimiser.update(grads, opt, coords)
        if factor is not None:
            change = tmap(lambda block: block * factor, change)
        for name, mask_of in (only or {}).items():
            change[name] = torch.where(mask_of, change[name], 0)
        return add(coords, change), opt, after, loss

    return step


@contextmanager
def _followed() -> Iterator[None]:
    """Raise UnsupportedModel, with a reason, for a model whose backward pass torch.func cannot follow."""
    try:
        yield
    except RuntimeError as error:
        signs = {RECOMPUTES: RECOMPUTES, "_NoopSaveInputs": RECOMPUTES}  # the second with torch 2.11
        signs |= {"setup_context staticmethod": OLD_FUNCTION, "does not have vmap support": OLD_FUNCTION}
        for sign, reason in signs.items():
            if sign in str(error):
                raise UnsupportedModel(reason) from error
        raise


def slope(
    learner: Learner, expand: Callable[[Tree], Tree], coords: Tree, batch: tuple, every: bool = False
) -> tuple[Tree, Tree, tuple[Tensor, Tree]]:
    """The gradients by coordinates and by weights, without torch.func; then the loss and the next buffers.

    Args:
        learner: the model.
        expand: from coordinates to weights.
        coords: the coordinates.
        batch: buffers, inputs, targets and mask.
        every: whether weights that do not depend on coordinates need a gradient too.
    """
    leaves = {name: block.detach().requires_grad_() for name, block in coords.items()}
    with torch.enable_grad():
        weights = expand(leaves)
    asked = {n: w.detach().requires_grad_() if every and not w.requires_grad else w for n, w in weights.items()}
    pull, out = learner.gradient(asked, *batch)
    made = {name: grad for name, grad in pull.items() if weights[name].requires_grad}
    found = torch.autograd.grad(
        *([weights[name] for name in made], list(leaves.values()), list(made.values())),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True)), pull, out


def together(step: Step) -> Step:
    """The step of all clients at once; batch and mask carry the client axis."""

    def call(*args: Any) -> tuple[Tree, Tree, Tree, Tensor]:
        dims = (*(0,) * 7, None if args[-1] is None else 0)
        out: tuple[Tree, Tree, Tree, Tensor] = vmap(step, in_dims=dims, randomness="different")(*args)
        return out

    return call


def _alone(step: Step) -> Step:
    """The step of one client, on a batch that still carries a client axis of one."""

    def call(*args: Any) -> tuple[Tree, Tree, Tree, Tensor]:
        coords, opt, buffers, start, mine, inputs, targets, mask = args
        inputs = unstack(inputs, 0) if isinstance(inputs, dict) else inputs[0]
        coords, opt, buffers, loss = step(
            coords, opt, buffers, start, mine, inputs, targets[0], None if mask is None else mask[0]
        )
        return coords, opt, buffers, loss[None]

    return call


def _train(step: Step, start: Tree, opt: Tree, buffers: Tree, mine: Tree, work: Workload) -> TrainingOutcome:
    """All steps of a workload; clients that are done before others stand still."""
    device = work.index.device
    width = work.index.shape[-1]
    rows = torch.from_numpy(work.rows).to(device)
    loss_sum = torch.zeros(len(work), device=device)
    coords = start
    for s in range(work.rows.shape[1]):
        inputs, targets = work.gather(work.index[:, s])
        mask = None
        if (work.rows[:, s] < width).any():
            mask = (torch.arange(width, device=device) < rows[:, s, None]).to(torch.float32)
        new = step(coords, opt, buffers, start, mine, inputs, targets, mask)
        if (work.rows[:, s] == 0).any():
            alive = rows[:, s] > 0
            coords, opt, buffers = (
                where(alive, now, old) for now, old in zip(new[:3], (coords, opt, buffers), strict=True)
            )
        else:
            coords, opt, buffers = new[:3]
        loss_sum = loss_sum + new[3].detach() * rows[:, s]
    return TrainingOutcome(coords, buffers, loss_sum / rows.sum(1), work.steps, opt)


def where(alive: Tensor, new: Tree, old: Tree) -> Tree:
    """The new blocks of clients that are alive, the old ones of those that are done."""
    return tmap(lambda n, o: torch.where(alive.view(-1, *(1,) * (n.dim() - 1)), n, o), new, old)
