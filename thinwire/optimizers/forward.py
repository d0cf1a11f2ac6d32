"""Gradient descent without a backward pass: slopes of the loss along a few coordinates a step.

Papers: Spall, IEEE TAC 1992 (simultaneous perturbation); Malladi et al., NeurIPS 2023 (MeZO); Qin et al., ICML 2024
(FedKSeed); Li et al., ICLR 2025 (DeComFL).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.registry import rare, register, short_repr
from thinwire.core.state import ALL_BLOCKS, State
from thinwire.core.text import check_settings
from thinwire.core.tree import Tree, scale, zeros_like
from thinwire.optimizers.base import Optimizer, clip_by_global_norm

Order = Literal["turn", "random"]


@register("optimizer", "forward-sgd", paper="Li et al., ICLR 2025")
@dataclass(frozen=True)
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
    lr: float = 0.01
    directions: int = 10
    mu: float = 1e-3
    order: Order = "turn"
    clip_norm: float = rare(math.inf)
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_settings(self, lr="(0, inf]", directions="[1, inf)", mu="(0, inf]", clip_norm="(0, inf]")

    def init(self, coords: Tree) -> State:
        """Return a count of zero steps."""
        first = next(iter(coords.values()), torch.zeros(()))
        return {"count": {ALL_BLOCKS: torch.zeros((), dtype=torch.float64, device=first.device)}}

    def update(self, grads: Tree, state: State, coords: Tree) -> tuple[Tree, State]:
        """Take one step."""
        count = state["count"][ALL_BLOCKS] + 1
        return scale(clip_by_global_norm(grads, self.clip_norm), -self.lr), {"count": {ALL_BLOCKS: count}}

    def estimate(
        self, loss_after: Callable[[Tree], tuple[Tensor, Tree]], coords: Tree, state: State
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """Return the slopes along some coordinates, zeros for all others, and the loss at the coordinates."""
        places, total = _places(coords)
        directions = min(self.directions, total)
        count = state["count"][ALL_BLOCKS]
        if self.order == "random":  # of torch's generator, which training seeds for each client
            chosen = torch.randint(0, total, (directions,), device=count.device)
        else:
            chosen = (count * directions + torch.arange(directions, device=count.device)) % total
        with torch.no_grad(), _same_draws(next(iter(coords.values())).device) as again:
            grads = zeros_like(coords)
            loss, after = loss_after(grads)
            for i in range(directions):
                along = {name: (places[name] == chosen[i]).to(block.dtype) for name, block in coords.items()}
                again()
                moved, _ = loss_after(scale(along, self.mu))
                slope = (moved - loss) / (self.mu * directions)
                grads = {name: block + along[name] * slope.to(block.dtype) for name, block in grads.items()}
        return grads, (loss, after)


def _places(coords: Tree) -> tuple[Tree, int]:
    """The number of each coordinate, and how many there are."""
    out: Tree = {}
    total = 0
    for name, block in coords.items():
        place = torch.arange(total, total + block.numel(), dtype=torch.float64, device=block.device)
        out[name], total = place.view(block.shape), total + block.numel()
    return out, total


@contextmanager
def _same_draws(device: torch.device) -> Iterator[Callable[[], None]]:
    """A function that makes random layers such as dropout draw the same numbers again.

    Losses of two draws would differ by more than a perturbation changes them.
    """
    cuda = device.type == "cuda"
    if cuda and torch.cuda.is_current_stream_capturing():  # a recording does not support random layers
        yield lambda: None
        return
    before = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()

    def again() -> None:
        if cuda:
            torch.cuda.set_rng_state(before, device)
        else:
            torch.set_rng_state(before)

    yield again
