"""Gradient descent without a backward pass: slopes of the loss along a few coordinates a step.

Papers: Spall, IEEE TAC 1992 (simultaneous perturbation); Malladi et al., NeurIPS 2023 (MeZO); Qin et al., ICML 2024
(FedKSeed); Li et al., ICLR 2025 (DeComFL).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.registry import rare, register_part
from thinwire.core.text import PositiveFloat, PositiveInt
from thinwire.core.tree import ALL_BLOCKS, State, Tree, scale, unflatten, zeros_like
from thinwire.optimizers.adaptive import no_steps
from thinwire.optimizers.base import ClipNorm, Optimizer, clip_by_global_norm

Order = Literal["turn", "random"]


@register_part("optimizer", "forward-sgd", paper="Li et al., ICLR 2025")
class ForwardSGD(Optimizer):
    """Gradient descent with slopes from losses alone: no backward pass, no autograd.

        g_j = (f(c + mu e_j) - f(c)) / (mu directions)     for `directions` coordinates j, other ones in each step
        c_j <- c_j - lr g_j                                all other coordinates do not change

    In a space of random directions (`MAPA`) each coordinate is a random perturbation of the whole model. This is
    DeComFL, where the coordinates of all blocks are used in turn, and FedKSeed, where each client draws them at random.

    Args:
        lr: learning rate.
        directions: coordinates whose slope is measured in a step; a step takes one forward pass more than that.
        mu: length of a perturbation.
        order: the coordinates of a step: the next ones in `turn`, and the first one again after the last; or `random`
            ones, drawn with replacement, other ones for each client.
        clip_norm: the largest L2 norm of the slopes of a step; longer ones are scaled down.

    >>> opt, c = ForwardSGD(lr=0.25, directions=1, mu=1e-3), {"c": torch.tensor([1.0, 2.0])}
    >>> state = opt.init(c)
    >>> for _ in range(2):
    ...     grads, _ = opt.estimate(lambda change: ((c["c"] + change["c"]).square().sum(), {}), c, state)
    ...     change, state = opt.update(grads, state, c)
    ...     c = {"c": c["c"] + change["c"]}
    ...     [round(x, 2) for x in c["c"].tolist()]
    [0.5, 2.0]
    [0.5, 1.0]

    On a server, where there is no loss, it is `SGD`.
    """

    forward_only = True  # `estimate` calls the loss only
    lr: PositiveFloat = 0.01
    directions: PositiveInt = 10
    mu: PositiveFloat = 1e-3
    order: Order = "turn"
    clip_norm: ClipNorm = rare(math.inf)

    def init(self, coords: Tree) -> State:
        """Return a count of zero steps."""
        return {"count": no_steps(coords)}

    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step."""
        count = state["count"][ALL_BLOCKS] + 1
        return scale(clip_by_global_norm(grads, self.clip_norm), -self.lr), {"count": {ALL_BLOCKS: count}}

    def estimate(
        self, loss_after: Callable[[Tree], tuple[Tensor, Tree]], coords: Tree, state: State
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """Return the slopes along some coordinates, zeros for all others, and the loss at the coordinates."""
        count = state["count"][ALL_BLOCKS]
        total = sum(block.numel() for block in coords.values())
        places = unflatten(torch.arange(total, dtype=torch.float64, device=count.device), coords)
        directions = min(self.directions, total)
        if self.order == "random":  # of torch's generator, which training seeds for each client
            chosen = torch.randint(0, total, (directions,), device=count.device)
        else:
            chosen = (count * directions + torch.arange(directions, device=count.device)) % total
        again = _rewinds(count.device)
        with torch.no_grad():
            grads = zeros_like(coords)
            loss, after = loss_after(grads)
            for i in range(directions):
                along = {name: (places[name] == chosen[i]).to(block.dtype) for name, block in coords.items()}
                again()
                moved, _ = loss_after(scale(along, self.mu))
                slope = (moved - loss) / (self.mu * directions)
                grads = {name: block + along[name] * slope.to(block.dtype) for name, block in grads.items()}
        return grads, (loss, after)


def _rewinds(device: torch.device) -> Callable[[], None]:
    """Return a function that makes random layers such as dropout draw the same numbers again.

    Losses of two draws would differ by more than a perturbation changes them.
    """
    if device.type != "cuda":
        return partial(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_current_stream_capturing():  # a recording does not support random layers
        return lambda: None
    return partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
