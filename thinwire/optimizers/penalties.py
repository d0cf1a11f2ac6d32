"""What is added to the loss: penalties on the weights that the coordinates make, or on coordinates by name.

A penalty sees `expand`, the function from coordinates to weights, and the gradient of the loss by the weights; it
gives the gradient of its own term by the coordinates.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.func import grad, vjp

from thinwire.core.registry import register
from thinwire.core.spec import Spec, select
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError

Expand: TypeAlias = Callable[[Tree], Tree]


class Penalty(Protocol):
    """A term added to the loss of every local step."""

    @property
    def active(self) -> bool:
        """Whether there is a term to add; if not, `gradient` is never called."""
        return True

    def check(self, weights: Spec, coords: Spec) -> None:
        """Raise a ConfigError if the model and the space lack the blocks that are penalized."""
        return

    @abstractmethod
    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float) -> Tree:
        """The gradient of the term by the coordinates.

        Args:
            expand: from coordinates to weights.
            coords: the coordinates.
            pull: the gradient of the loss by the weights, taken as constant.
            lr: the step size of the client's optimiser.
        """
        ...


@register("penalty", "none")
@dataclass(frozen=True)
class NoPenalty(Penalty):
    """Add nothing to the loss."""

    @property
    def active(self) -> bool:
        """No."""
        return False

    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float) -> Tree:
        """Nothing."""
        return {name: torch.zeros_like(block) for name, block in coords.items()}


@register("penalty", "l1l2")
@dataclass(frozen=True)
class L1L2(Penalty):
    """Keep the weights that the coordinates make small, or sparse; or some of the coordinates themselves.

        l1 sum |w| + (l2 / 2) sum w^2        over the weights of the model, as MAPA and MAPO have it
        l1 sum |c| + (l2 / 2) sum c^2        over coordinates, as Factorized-FL has it for its rest `mu`

    Args:
        l1: strength of the first term.
        l2: strength of the second.
        layers: selectors of the weights that count.
        coords: selectors of the coordinates that count, such as `("*/mu",)`, instead of any weights.

    >>> space = lambda coords: coords
    >>> L1L2(l2=0.5).gradient(space, {"w": torch.tensor([2.0])}, {}, 0.1)["w"].tolist()
    [1.0]

    Where a number is 0 its L1 term pulls neither way. Not the weight decay of an optimiser, which shrinks all
    coordinates: in the whole space the two are the same.
    """

    l1: float = 0.0
    l2: float = 0.0
    layers: tuple[str, ...] = ("*",)
    coords: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("l1", self.l1), ("l2", self.l2)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be 0 or more, not {value}")
        if self.coords and self.layers != ("*",):
            raise ConfigError("a penalty is on weights (layers) or on coordinates (coords), not on both; leave one out")

    @property
    def active(self) -> bool:
        """Unless both are 0."""
        return bool(self.l1 or self.l2)

    def check(self, weights: Spec, coords: Spec) -> None:
        """Every selector must match something."""
        self._select((coords if self.coords else weights).names)

    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float) -> Tree:
        """By automatic differentiation, through `expand` unless the term is of coordinates."""

        def term(point: Tree) -> Tensor:
            tree = point if self.coords else expand(point)
            chosen = [tree[name] for name in self._select(tuple(tree))]
            total = sum((self.l1 * w.abs().sum() + self.l2 / 2 * w.square().sum() for w in chosen), torch.zeros(()))
            return torch.as_tensor(total)

        out: Tree = grad(term)(coords)
        return out

    def _select(self, names: tuple[str, ...]) -> tuple[str, ...]:
        what = "coords" if self.coords else "layers"
        return select(names, self.coords or self.layers, what=f"penalty: {what}")


@register("penalty", "jacobian", paper="Hyeon-Woo et al., ICLR 2022")
@dataclass(frozen=True)
class Jacobian(Penalty):
    """Let a step of the coordinates move the weights as a step of the weights themselves would (FedPara, equation 9).

        (strength / 2) || W' - (W - lr J) ||,    W' = expand(coords - lr g),    J = dL/dW,    g = (dW/dcoords)^T J

    J is taken as constant, so that no second derivative of the loss is needed. Where weights are linear in coordinates
    (MAPO, the whole space) the gap does not depend on them, and there is nothing to correct. The paper
    found a gain of 0.07 points, within its own noise.

    Args:
        strength: lambda of the paper: 1 for convolutional networks, 10 in its table 4.
        squared: take the square of the norm instead.

    >>> same = Jacobian().gradient(lambda coords: coords, {"w": torch.ones(2)}, {"w": torch.ones(2)}, 0.1)
    >>> same["w"].tolist()                  # in the whole space the two steps are one
    [0.0, 0.0]
    """

    strength: float = 1.0
    squared: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ConfigError(f"strength must be 0 or more, not {self.strength}")

    @property
    def active(self) -> bool:
        """Unless the strength is 0."""
        return self.strength > 0

    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float) -> Tree:
        """By automatic differentiation through two steps of `expand`."""

        def term(point: Tree) -> Tensor:
            weights, back = vjp(expand, point)  # type: ignore[misc]
            (g,) = back(pull)
            moved = expand({name: block - lr * g[name] for name, block in point.items()})
            gaps = [moved[name] - weights[name] + lr * pull[name] for name in weights]
            square = torch.stack([gap.square().sum() for gap in gaps]).sum()
            # a norm has no derivative at 0; a number far below any gap that matters gives it one
            return self.strength / 2 * (square if self.squared else (square + 1e-20).sqrt())

        out: Tree = grad(term)(coords)
        return out
