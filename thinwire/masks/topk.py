"""Train the largest coordinates of each download (Federated Select)."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.core.registry import register, short_repr
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.masks.base import Mask
from thinwire.masks.largest import By, check_by, mask_of_largest


@register("mask", "topk", paper="Federated Select (Charles et al., 2022)")
@dataclass(frozen=True)
class TopKMask(Mask):
    """Train the largest coordinates of the download; the server keeps all of them, and selects again in every round.

        M = the k largest of |P|,    k = max(1, floor(density n)),    of all blocks together or of each block

    With the download codec `topk` at the same density a client receives P M and computes M from it: the k largest of
    P M are the k largest of P.

    Args:
        density: share of the coordinates that is trained, above 0 and at most 1.
        by: `tree` selects among all coordinates together, `block` within each block. The B of an adapter is smaller
            than A for long, so for adapters write `block`, and the same `by` in the download codec.
        at: rounds in which everything is trained before the first selection. With 1 the B of an adapter, which starts
            at zero, has values that can be compared.

    >>> import torch
    >>> TopKMask(0.5).trained({"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, 0)["w"].tolist()
    [False, True, True, False]

    Not the codec `TopK`, which sends the largest values of an update and their positions.
    """

    density: float = 0.25
    by: By = field(default="tree", metadata={"rare": True})
    at: int = field(default=0, metadata={"rare": True})
    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"density must be above 0 and at most 1, not {self.density}; write density = 0.25")
        check_by(self.by)
        if self.at < 0:
            raise ConfigError(f"at must be 0 or more rounds, not {self.at}; write for example at = 1")

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return the mask of the largest coordinates; everything before version `at`."""
        return {} if self.density == 1 or version < self.at else mask_of_largest(coords, self.density, self.by)
