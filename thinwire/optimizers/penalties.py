"""Penalties added to the local loss: on the weights that the coordinates make, or on coordinates.

A penalty receives `expand`, the function from coordinates to weights, and the gradient of the loss with respect to the
weights. It returns the gradient of its term with respect to the coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vjp

from thinwire.core.names import select
from thinwire.core.registry import register_part
from thinwire.core.text import NonNegativeFloat
from thinwire.core.tree import Spec, Tree, zeros_like
from thinwire.errors import ConfigError

Expand = Callable[[Tree], Tree]


class Penalty(ABC):
    """A term added to the loss of every local step. Not a correction, which has state or refers to the global model."""

    active = True
    """Whether there is a term to add; if not, `gradient` is never called."""

    def check(self, weights: Spec, coords: Spec) -> None:
        """Raise a ConfigError if the model and the space lack the blocks that are penalized."""
        return

    @abstractmethod
    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float | Tensor) -> Tree:
        """Return the gradient of the term with respect to the coordinates.

        Args:
            expand: from coordinates to weights.
            coords: the coordinates.
            pull: the gradient of the loss with respect to the weights, treated as constant.
            lr: the learning rate of the client optimizer; a tensor where it changes within a recorded program.
        """


@register_part("penalty", "none")
class NoPenalty(Penalty):
    """Add nothing to the loss.

    >>> NoPenalty().active
    False
    """

    active = False

    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float | Tensor) -> Tree:
        """Return zeros."""
        return zeros_like(coords)


@register_part("penalty", "l1l2")
class L1L2(Penalty):
    """L1 and L2 penalty on the weights that the coordinates make, or on the coordinates.

        l1 sum |w| + (l2 / 2) sum w^2        over the weights of the model (MAPA, MAPO)
        l1 sum |c| + (l2 / 2) sum c^2        over coordinates (Factorized-FL: the residual `mu`)

    Args:
        l1: strength of the L1 term.
        l2: strength of the L2 term.
        layers: selectors of the penalized weights.
        coords: selectors of penalized coordinates, such as `("*/mu",)`; then weights are not penalized.

    >>> expand = lambda coords: coords
    >>> L1L2(l2=0.5).gradient(expand, {"w": torch.tensor([2.0])}, {}, 0.1)["w"].tolist()
    [1.0]

    The gradient of the L1 term at 0 is 0. Not the weight decay of an optimizer, which applies to all coordinates; in
    the space `Full` that is the same as the L2 term.
    """

    l1: NonNegativeFloat = 0.0
    l2: NonNegativeFloat = 0.0
    layers: tuple[str, ...] = ("*",)
    coords: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.coords and self.layers != ("*",):
            raise ConfigError("a penalty is on weights (layers) or on coordinates (coords), not on both; leave one out")

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether l1 or l2 is above 0."""
        return bool(self.l1 or self.l2)

    def check(self, weights: Spec, coords: Spec) -> None:
        """Raise a ConfigError if a selector matches no block."""
        self._select((coords if self.coords else weights).names)

    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float | Tensor) -> Tree:
        """Differentiate the term, through `expand` if it is on weights."""

        def term(point: Tree) -> Tensor:
            tree = point if self.coords else expand(point)
            chosen = [tree[name] for name in self._select(tuple(tree))]
            total = sum((self.l1 * w.abs().sum() + self.l2 / 2 * w.square().sum() for w in chosen), torch.zeros(()))
            return torch.as_tensor(total)

        return grad(term)(coords)

    def _select(self, names: tuple[str, ...]) -> tuple[str, ...]:
        what = "coords" if self.coords else "layers"
        return select(names, self.coords or self.layers, what=f"penalty: {what}")


@register_part("penalty", "jacobian", paper="Hyeon-Woo et al., ICLR 2022")
class Jacobian(Penalty):
    """Jacobian correction: a step of the coordinates should move the weights as a step of SGD on them (FedPara, eq. 9).

        (strength / 2) || W' - (W - lr J) ||,    W' = expand(coords - lr g),    J = dL/dW,    g = (dW/dcoords)^T J

    J is treated as constant, so no second derivative of the loss is needed. Where weights are linear in the coordinates
    (MAPO, Full) the term does not depend on the coordinates, and its gradient is 0. The paper's table 4 has a gain in
    accuracy and variance together with `tanh`, in variance alone without.

    Args:
        strength: lambda in the paper: 1 for convolutional networks, 10 in its table 4.
        squared: use the square of the norm instead.

    >>> gradient = Jacobian().gradient(lambda coords: coords, {"w": torch.ones(2)}, {"w": torch.ones(2)}, 0.1)
    >>> gradient["w"].tolist()                  # with weights as coordinates, both steps are equal
    [0.0, 0.0]
    """

    strength: NonNegativeFloat = 1.0
    squared: bool = False

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether the strength is above 0."""
        return self.strength > 0

    def gradient(self, expand: Expand, coords: Tree, pull: Tree, lr: float | Tensor) -> Tree:
        """Differentiate the term, through `expand` before and after the step."""

        def term(point: Tree) -> Tensor:
            weights, back = vjp(expand, point)  # type: ignore[misc]
            (g,) = back(pull)
            moved = expand({name: block - lr * g[name] for name, block in point.items()})
            gaps = [moved[name] - weights[name] + lr * pull[name] for name in weights]
            square = torch.stack([gap.square().sum() for gap in gaps]).sum()
            # a norm has no derivative at 0; a tiny summand makes it differentiable
            return self.strength / 2 * (square if self.squared else (square + 1e-20).sqrt())

        return grad(term)(coords)
