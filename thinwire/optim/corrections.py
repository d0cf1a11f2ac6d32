"""The correction that corrects nothing; FedProx, SCAFFOLD and FedDyn stand beside it."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.registry import register
from thinwire.core.tree import Tree


@register("correction", "none")
@dataclass(frozen=True)
class NoCorrection:
    """Follow the gradient as it is."""

    def init_client(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def init_shared(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def init_server(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """Unchanged."""
        return grads

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Nothing to remember, nothing to report."""
        return mine, {}

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """Unchanged."""
        return delta, {}, state
