"""Updates that are masks of random noise (FedMRN).

Paper: Masked Random Noise for Communication-Efficient Federated Learning (Li et al., ACM Multimedia 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.text import check_numbers
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space
from thinwire.spaces.unmerged import Unmerged

_C = "/c"
_LEAST = 2.0**-20  # of the largest noise: no update is divided by less


@register("space", "fedmrn", paper="Li et al., ACM Multimedia 2024")
@dataclass(frozen=True)
class FedMRN(Space):
    """Train updates that become masks of random noise, drawn from the shared seed in every round.

        W = W0 + n * c,    n uniform in (-noise, noise);   c in [0, 1], or with `signed` in [-1, 1]
        trained: u = n * c; in every local step some values are replaced by samples,
            n m,    m ~ Bernoulli(c), or with `signed` 1 with probability (1 + c) / 2, else -1

    To upload masks send the coordinates c themselves through two levels: `upload = "weights"`, `up = { kind = "binary",
    levels = [-1, 1] }` (`[0, 1]` without `signed`).

    Args:
        noise: the largest size of the noise, and so of the change of a weight in one round.
        signed: masks of -1 and 1 instead of 0 and 1.
        progressive: in each step replace a share of the values by samples that is drawn anew; otherwise all of them.
        redraw_every: rounds after which the update is added to the weights and new noise is drawn.

    >>> space, base = FedMRN(noise=0.5), {"w": torch.zeros(2)}
    >>> basis = {"w": torch.tensor([0.25, -0.5])}
    >>> space.expand(base, basis, {"w/c": torch.tensor([1.0, -1.0])})["w"].tolist()
    [0.25, 0.5]

    The paper draws other noise for each client; here it is that of the round, so that masks of clients can be averaged.
    """

    noise: float = 0.01
    signed: bool = True
    progressive: bool = True
    redraw_every: int = 1

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 < self.noise < math.inf:
            raise ConfigError(f"noise must be above 0, not {self.noise}; write for example noise = 0.01")
        if self.redraw_every < 0:
            raise ConfigError(f"redraw_every must be 0 (never) or a number of rounds, not {self.redraw_every}")

    @property
    def reparametrized(self) -> bool:
        """True: clients train updates."""
        return True

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Draw the noise."""
        return {block.name: self._draw(key.fold("noise", block.name), block.shape, device) for block in spec}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return zeros."""
        return {name + _C: torch.zeros_like(w) for name, w in base.items()}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base plus the noise times the coordinates."""
        return {name: w + basis[name].to(w.dtype) * coords[name + _C] for name, w in base.items()}

    def unmerged(self) -> Space:
        """Return the space of updates, which samples masks."""
        return Unmerged(self)  # type: ignore[arg-type]

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base plus updates, some of them replaced by samples, with the gradient of the updates."""
        return {name: w + self._sample(basis[name].to(w.dtype), coords[name + _C]) for name, w in base.items()}

    def to_trained(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the updates of coordinates."""
        return {name: basis[name.removesuffix(_C)].to(c.dtype) * c for name, c in coords.items()}

    def from_trained(self, base: Tree, basis: Tree, trained: Tree) -> Tree:
        """Return the coordinates of updates, within their range."""
        return {name: self._share(basis[name.removesuffix(_C)].to(u.dtype), u) for name, u in trained.items()}

    def _draw(self, key: Key, shape: tuple[int, ...], device: Device) -> Tensor:
        """Uniform noise, none of it too close to 0 to divide by."""
        unit = key.uniform(*shape, device=device) * 2 - 1
        return torch.where(unit < 0, unit.clamp(max=-_LEAST), unit.clamp(min=_LEAST)) * self.noise

    def _share(self, noise: Tensor, update: Tensor) -> Tensor:
        return (update / noise).clamp(-1.0 if self.signed else 0.0, 1.0)

    def _sample(self, noise: Tensor, update: Tensor) -> Tensor:
        """The update, with samples of its masks in place of some values; its gradient is that of the update."""
        share = self._share(noise, update).detach()
        draw = torch.rand_like(share)
        mask = (draw < (1 + share) / 2).to(share.dtype) * 2 - 1 if self.signed else (draw < share).to(share.dtype)
        if self.progressive:
            some = torch.rand_like(share) < torch.rand_like(share.sum())
            mask = torch.where(some, mask, share)
        return update + (noise * mask - update).detach()
