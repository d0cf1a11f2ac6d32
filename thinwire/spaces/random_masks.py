"""Masks of a random network whose weights are never trained (FedPM).

Paper: Sparse Random Networks for Communication-Efficient Federated Learning (Isik et al., ICLR 2023).

Updates that are masks of random noise (FedMRN).

Paper: Masked Random Noise for Communication-Efficient Federated Learning (Li et al., ACM Multimedia 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register_part
from thinwire.core.text import NonNegativeInt, PositiveFloat
from thinwire.core.tree import Spec, Tree, tmap
from thinwire.errors import ConfigError
from thinwire.spaces.base import Space

Weights = Literal["signed", "base"]
Test = Literal["mean", "sample", "round"]

EPSILON = 0.01  # probabilities closer to 0 or 1 are trained as if they were this far: their scores stay finite
_P = "/p"


@register_part("space", "fedpm", paper="Isik et al., ICLR 2023")
class FedPM(Space):
    """Train the probabilities with which the weights of a frozen random network are kept.

        W = W0 * m,    m ~ Bernoulli(p)    in every local step, with the gradient of p (straight-through)
        trained: scores s,    p = sigmoid(s)

    Coordinates are the probabilities p, one for each weight with two axes or more (`fc.weight/p`); all other weights
    stay those of the base. To upload sampled masks, which take at most a bit each, send the coordinates themselves
    through two levels: `upload = "weights"`, `up = { kind = "binary", levels = [0, 1] }`.

    Args:
        weights: `signed`: W0 has the signs of the initial weights and one size in each layer, sqrt(2 / inputs);
            `base`: W0 are the initial weights, for example of a pretrained model.
        gain: factor on the size of signed weights.
        start: p before the first round.
        test: the weights of the trained model: the `mean`, W0 p; those of one `sample` of the masks, as in the paper,
            which a bit for each weight describes; or those with p above one half (`round`).

    >>> space, base = FedPM(), {"fc.weight": torch.tensor([[0.3, -0.1]]), "fc.bias": torch.ones(1)}
    >>> coords = space.init(base, {}, Key(0))
    >>> coords, space.expand(base, {}, coords)["fc.weight"].tolist()
    ({'fc.weight/p': tensor([[0.5000, 0.5000]])}, [[0.5, -0.5]])

    `expand` returns the mean W0 p, and in training a sample. Not a `Mask`, which decides which weights are trained.
    """

    reparametrized = True  # clients train scores
    weights: Weights = "signed"
    gain: PositiveFloat = 1.0
    start: Annotated[float, f"[{EPSILON}, {1 - EPSILON}]"] = 0.5
    test: Test = "mean"

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if no weight has two axes."""
        if not any(len(block.shape) >= 2 for block in spec):
            raise ConfigError("fedpm masks weights with two axes or more, and this model has none; use another space")

    def note(self, spec: Spec) -> str:
        """Return how many weights are masked."""
        masked = sum(block.numel for block in spec if len(block.shape) >= 2)
        return f"fedpm masks {masked:,} of {spec.size:,} weights; the others are not trained."

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return the thresholds of the sample that is tested; often nothing."""
        if self.test != "sample":
            return {}
        masked = [block for block in spec if len(block.shape) >= 2]
        return {block.name: key.fold("sample", block.name).uniform(*block.shape, device=device) for block in masked}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the initial probabilities."""
        return {name + _P: torch.full_like(w, self.start) for name, w in base.items() if w.dim() >= 2}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the mean of the masked weights."""
        return self._times(base, lambda name: coords[name + _P])

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights of one sample, the mean, or those that are more likely kept than not."""
        if self.test == "mean":
            return self.expand(base, basis, coords)
        limit = dict.fromkeys(base, 0.5) if self.test == "round" else basis
        return self._times(base, lambda name: (coords[name + _P] > limit[name]).to(base[name].dtype))

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights of masks sampled from scores, with the gradient of their probabilities."""

        def sample(name: str) -> Tensor:
            p = torch.sigmoid(coords[name + _P])
            kept = (torch.rand_like(p) < p).to(p.dtype)
            return p + (kept - p).detach()

        return self._times(base, sample)

    def to_trained(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the scores of probabilities."""
        return tmap(lambda p: torch.logit(p, EPSILON), coords)

    def from_trained(self, base: Tree, basis: Tree, trained: Tree) -> Tree:
        """Return the probabilities of scores."""
        return tmap(torch.sigmoid, trained)

    def _times(self, base: Tree, factor: Callable[[str], Tensor]) -> Tree:
        """The frozen weights times a factor for each of them; others as they are."""
        return {name: self._frozen(w) * factor(name) if w.dim() >= 2 else w for name, w in base.items()}

    def _frozen(self, weight: Tensor) -> Tensor:
        if self.weights == "base":
            return weight
        size = self.gain * math.sqrt(2 / max(1, weight[0].numel()))
        return torch.where(weight < 0, -size, size).to(weight.dtype)


_C = "/c"
SMALLEST = 2.0**-20  # of the largest noise: no update is divided by less


@register_part("space", "fedmrn", paper="Li et al., ACM Multimedia 2024")
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
        progressive: in each step replace another random share of the values by samples; otherwise all of them.
        redraw_every: rounds after which the update is added to the weights and new noise is drawn.

    >>> space, base = FedMRN(noise=0.5), {"w": torch.zeros(2)}
    >>> basis = {"w": torch.tensor([0.25, -0.5])}
    >>> space.expand(base, basis, {"w/c": torch.tensor([1.0, -1.0])})["w"].tolist()
    [0.25, 0.5]

    The paper draws other noise for each client; here it is that of the round, so that masks of clients can be averaged.
    """

    reparametrized = True  # clients train updates
    noise: PositiveFloat = 0.01
    signed: bool = True
    progressive: bool = True
    redraw_every: NonNegativeInt = 1

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Draw the noise."""
        drawn: Tree = {}
        for block in spec:
            unit = key.fold("noise", block.name).uniform(*block.shape, device=device) * 2 - 1
            # none of it too close to 0 to divide by
            far = torch.where(unit < 0, unit.clamp(max=-SMALLEST), unit.clamp(min=SMALLEST))
            drawn[block.name] = far * self.noise
        return drawn

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return zeros."""
        return {name + _C: torch.zeros_like(w) for name, w in base.items()}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base plus the noise times the coordinates."""
        return {name: w + basis[name].to(w.dtype) * coords[name + _C] for name, w in base.items()}

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base plus updates, some of them replaced by samples, with the gradient of the updates."""
        return {name: w + self._sample(basis[name].to(w.dtype), coords[name + _C]) for name, w in base.items()}

    def to_trained(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the updates of coordinates."""
        return {name: basis[name.removesuffix(_C)].to(c.dtype) * c for name, c in coords.items()}

    def from_trained(self, base: Tree, basis: Tree, trained: Tree) -> Tree:
        """Return the coordinates of updates, within their range."""
        return {name: self._share(basis[name.removesuffix(_C)].to(u.dtype), u) for name, u in trained.items()}

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
