"""Train the largest coordinates of each download (Federated Select)."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.registry import register
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.masks.base import Mask
from thinwire.masks.largest import mask_of_largest


@register("mask", "topk", paper="Federated Select (Charles et al., 2022)")
@dataclass(frozen=True)
class TopKMask(Mask):
    """Train the largest coordinates of the download; the server keeps all of them, and selects again in every round.

        M = the k largest of |P|,    k = max(1, floor(density n)),    of all blocks together

    With the download codec `topk` at the same density a client receives P M and computes M from it: the k largest of
    P M are the k largest of P.

    Args:
        density: share of the coordinates that is trained, above 0 and at most 1.

    >>> import torch
    >>> TopKMask(0.5).trained({"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, 0)["w"].tolist()
    [False, True, True, False]

    Not the codec `TopK`, which sends the largest values of an update and their positions.
    """

    density: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"density must be above 0 and at most 1, not {self.density}; write density = 0.25")

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return the mask of the largest coordinates."""
        return {} if self.density == 1 else mask_of_largest(coords, self.density)
