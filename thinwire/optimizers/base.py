"""Contracts of an optimizer and of a correction of local training.

The same optimizers serve on clients, where they receive gradients, and on the server, where they receive the negated
mean update. Both contracts are pure: state goes in and comes out, and everything works under `torch.func.vmap`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

from thinwire.core.state import State
from thinwire.core.tree import Tree, scale


class Optimizer(Protocol):
    """Turns gradients into updates of the coordinates.

    The state is nested by slot and by block, so that a round that synchronizes some blocks changes only their state.
    `update` receives and returns the state of the blocks in `grads`, and values under `ALL_BLOCKS`.
    """

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate."""
        ...

    @property
    def clip_norm(self) -> float:
        """The L2 norm to which `update` scales longer gradients down (`clip_by_global_norm`); inf: none."""
        return math.inf

    @property
    def forward_only(self) -> bool:
        """Whether local training calls `estimate` instead of a backward pass."""
        return False

    @abstractmethod
    def init(self, coords: Tree) -> State:
        """Return the state before the first step."""
        ...

    @abstractmethod
    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Return the update to add to the coordinates, proportional to `lr`, and the next state."""
        ...

    @property
    def reads_coords(self) -> bool:
        """Whether `update` reads the coordinates; the server then copies them from the GPU in every round."""
        return True

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


class Correction(Protocol):
    """Reduces client drift: corrects gradients of local steps or the mean update (FedProx, SCAFFOLD, FedDyn, FedNova).

    The three states are trees by block. All methods have a default that corrects nothing.
    """

    active: ClassVar[bool] = True  # False: no method of the correction needs to be called

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
