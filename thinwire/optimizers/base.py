"""Contracts of an optimizer and of a correction of local training.

The same optimizers serve on clients, where they receive gradients, and on the server, where they receive the negated
mean update. Both contracts are pure: state goes in and comes out, and everything works under `torch.func.vmap`.

Gradient clipping by the global norm, as `torch.nn.utils.clip_grad_norm_` does it before a step.

Stochastic gradient descent, for clients and server.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from thinwire.core.registry import rare, register_part
from thinwire.core.text import BelowOne, NonNegativeFloat, PositiveFloat
from thinwire.core.tree import State, Tree, scale, tmap
from thinwire.errors import ConfigError


class Optimizer(ABC):
    """Turns gradients into updates of the coordinates.

    The state is nested by slot and by block, so that a round that synchronizes some blocks changes only their state.
    `update` receives and returns the state of the blocks in `grads`, and values under `ALL_BLOCKS`.
    """

    lr: float
    """The learning rate."""

    clip_norm = math.inf
    """The L2 norm to which `update` scales longer gradients down (`clip_by_global_norm`); inf: none."""

    forward_only = False
    """Whether local training calls `estimate` instead of a backward pass."""

    plain = False
    """Whether `update` is minus `lr` times the gradient, without a state."""

    elementwise = False
    """Whether `update`, apart from clipping, treats each value alone, with a state of one value for each."""

    reads_coords = True
    """Whether `update` reads the coordinates; the server then copies them from the GPU in every round."""

    @abstractmethod
    def init(self, coords: Tree) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Return the update to add to the coordinates, proportional to `lr`, and the next state."""

    def scaled(self, factor: float) -> Self:
        """Return the same optimizer with `factor` times its learning rate; its settings are not checked again."""
        if factor == 1.0:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "lr", self.lr * factor)  # of a frozen dataclass
        return other

    def server_step(self, update: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Return the step of the server for a mean update, whose negation is the gradient, and the next state."""
        return self.update(scale(update, -1.0), state, coords)

    def estimate(
        self, loss_after: Callable[[Tree], tuple[Tensor, Tree]], coords: Tree, state: State
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """Return an estimate of the gradient from losses alone, and the result of `loss_after` without a change.

        Called without autograd, and only where `forward_only`.

        Args:
            loss_after: the loss after a change of the coordinates, and the next buffers of the model.
            coords: the coordinates.
            state: the state before the step; `update` follows.
        """
        raise TypeError(f"{type(self).__name__} needs gradients")


class Correction:
    """Reduces client drift: corrects gradients of local steps or the mean update (FedProx, SCAFFOLD, FedDyn, FedNova).

    The three states are trees by block. All methods have a default that corrects nothing.
    """

    active = True  # False: no method of the correction needs to be called

    def init_client(self, coords: Tree) -> Tree:
        """Return the initial state of a client; it is never sent."""
        return {}

    def init_shared(self, coords: Tree) -> Tree:
        """Return the initial state that server and clients share."""
        return {}

    def init_server(self, coords: Tree) -> Tree:
        """Return the initial state of the server; it is never sent."""
        return {}

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """Return the corrected gradient of one local step.

        Args:
            grads: the gradient of the loss.
            coords: the current coordinates.
            start: the coordinates at the start of the round.
            mine: the state of the client.
            shared: the shared state.
        """
        return grads

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Return the next state of the client and its report, a field of the upload.

        Args:
            moved: the update of local training.
            steps: the number of local steps.
            lr: the learning rate of the client optimizer.
            mine: the state of the client.
            shared: the shared state.
        """
        return mine, {}

    def factor(self, report: Tree) -> float:
        """Return the factor on a client's update before aggregation.

        Raises:
            WireError: for a report that no correct client sends.
        """
        return 1.0

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """Return the corrected mean update, the update of the shared state, and the next state of the server.

        Args:
            delta: the mean update.
            report: the mean of the reports.
            fraction: the size of the cohort over the number of clients.
            state: the state of the server.
        """
        return delta, {}, state


def clip_by_global_norm(grads: Tree, clip_norm: float) -> Tree:
    """Scale a gradient down to an L2 norm over all its blocks, where it is longer.

        g <- g min(1, clip_norm / |g|)

    A gradient that is not finite, or whose norm overflows, becomes NaN, so that divergence is still found. A gradient
    that is not longer keeps its bits; with `clip_norm = inf` nothing is computed. Under `torch.func.vmap` the norm is
    that of each client.

    Args:
        grads: the gradient.
        clip_norm: the largest norm, in the unit of the gradient; above 0.

    >>> g = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    >>> [[round(x, 4) for x in block.tolist()] for block in clip_by_global_norm(g, 1.0).values()]
    [[0.6], [0.8]]
    >>> clip_by_global_norm(g, 10.0)["b"].tolist(), clip_by_global_norm(g, math.inf) is g
    ([4.0], True)
    """
    if clip_norm == math.inf or not grads:
        return grads
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(block) for block in grads.values()]))
    factor = (clip_norm / norm).clamp(max=1.0)  # |g| = 0: the quotient is inf, the factor 1
    factor = torch.where(norm.isinf(), math.nan, factor)  # not 0, which would hide it
    return {name: block * factor.to(block.dtype) for name, block in grads.items()}


DecayOn = Literal["all", "kernels"]
ClipNorm = Annotated[float, "(0, inf]"]


@register_part("optimizer", "sgd")
class SGD(Optimizer):
    """Gradient descent, optionally with momentum and weight decay (equal to `torch.optim.SGD`).

        v <- momentum v + g + weight_decay w
        w <- w - lr v                          (nesterov: w <- w - lr (g + momentum v))

    On the server the gradient is the negated mean update, so `SGD(1.0)` is federated averaging.

    Args:
        lr: learning rate.
        momentum: factor on the previous velocity; 0 means no momentum and no state.
        nesterov: use Nesterov momentum.
        weight_decay: factor of the L2 penalty on the coordinates.
        weight_decay_on: `all` coordinates, or `kernels` only: blocks with two axes or more, so neither biases nor the
            scale and shift of normalizations.
        clip_norm: the largest L2 norm of the gradient g over all values that are trained; a longer one is scaled down
            (`clip_by_global_norm`). In the unit of the gradient; at the server, of the mean update.

    >>> import torch
    >>> opt, w = SGD(0.5, momentum=0.9), {"w": torch.zeros(1)}
    >>> change, state = opt.update({"w": torch.ones(1)}, opt.init(w), w)
    >>> change["w"].tolist(), state["momentum"]["w"].tolist()
    ([-0.5], [1.0])
    """

    lr: PositiveFloat = 0.1
    momentum: BelowOne = 0.0
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: ClipNorm = rare(math.inf)
    weight_decay_on: DecayOn = rare("all")

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs momentum above 0; write for example momentum = 0.9")

    def init(self, coords: Tree) -> State:
        """Return a velocity of zero for each block, or no state without momentum."""
        if not self.momentum:
            return {}
        return {"momentum": {name: block.new_zeros(block.shape) for name, block in coords.items()}}

    @cached_property
    def plain(self) -> bool:  # type: ignore[override]
        """Without momentum, weight decay and clipping; not of subclasses, whose `update` may differ."""
        return type(self) is SGD and not (self.momentum or self.weight_decay) and self.clip_norm == math.inf

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """With weight decay on all coordinates; not of subclasses."""
        return type(self) is SGD and self.weight_decay_on == "all"

    @cached_property
    def reads_coords(self) -> bool:  # type: ignore[override]
        """True with weight decay."""
        return self.weight_decay > 0

    def server_step(self, update: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step of the server; plain SGD scales the mean update once, because two negations are exact."""
        if not self.plain:
            return super().server_step(update, state, coords)
        return update if self.lr == 1.0 else scale(update, self.lr), state

    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step."""
        if self.clip_norm < math.inf:
            grads = clip_by_global_norm(grads, self.clip_norm)
        if self.weight_decay:
            least = 2 if self.weight_decay_on == "kernels" else 0
            grads = tmap(lambda g, w: g + self.weight_decay * w if w.dim() >= least else g, grads, coords)
        if not self.momentum:
            return scale(grads, -self.lr), state
        velocity = {name: self.momentum * state["momentum"][name] + g for name, g in grads.items()}
        direction = tmap(lambda g, v: g + self.momentum * v, grads, velocity) if self.nesterov else velocity
        return scale(direction, -self.lr), {"momentum": velocity}
