"""How numbers are moved: the contracts of an optimiser and of a correction.

An optimiser serves at both ends: on a client it sees gradients, on the server the negated mean change. Both are pure:
state goes in and comes out, and everything works under vmap. Names in an optimiser's state end in the name of the block
that they belong to (`momentum/fc.weight`), so that a round which synchronises some blocks moves only their state.
"""

from __future__ import annotations

from typing import Protocol

from thinwire.core.tree import Tree


class Optimizer(Protocol):
    """Turns gradients into changes."""

    @property
    def lr(self) -> float:
        """The step size."""
        ...

    def init(self, coords: Tree) -> Tree:
        """State before the first step."""
        ...

    def update(self, grads: Tree, state: Tree, coords: Tree) -> tuple[Tree, Tree]:
        """The change to add to the coordinates, in proportion to `lr`, and the next state."""
        ...


class Correction(Protocol):
    """Bends local steps by memories of earlier rounds (FedProx, SCAFFOLD, FedDyn)."""

    def init_client(self, coords: Tree) -> Tree:
        """Memory that stays with a client."""
        ...

    def init_shared(self, coords: Tree) -> Tree:
        """Memory that everyone knows."""
        ...

    def init_server(self, coords: Tree) -> Tree:
        """Memory that stays with the server."""
        ...

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """The gradient of one local step, corrected."""
        ...

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """After local training: the client's next memory, and what it reports to the server (its own lane)."""
        ...

    def factor(self, report: Tree) -> float:
        """By what the server multiplies a client's change before it averages; 1 for most.

        Reports are not trusted: raises WireError for one that no client sends.
        """
        ...

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """The corrected mean change, the change of the shared memory, and the server's next memory."""
        ...
