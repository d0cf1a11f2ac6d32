"""Find low-rank adapters that a mask prevents from training, and count what is left of them."""

from __future__ import annotations

import torch

from thinwire.core.tree import Tree


def dead_adapters(coords: Tree, trained: Tree) -> tuple[str, ...]:
    """Return the weights whose adapter B A is zero and cannot change under the mask of a round.

        rank r is alive    if row r of A and column r of B each hold a value that is trained or not zero
        an adapter is dead if none of its ranks is alive: without B, A has no gradient, and without A, B has none

    A mask of the largest values of A and B together selects nothing of B while B is small, since B starts at zero.

    Args:
        coords: the coordinates that a client starts from, with zeros outside the mask.
        trained: the mask, from `Mask.trained`; an empty tree selects everything.

    >>> from thinwire.masks.topk import TopKMask
    >>> coords = {"fc.weight/a": torch.ones(2, 3), "fc.weight/b": torch.zeros(4, 2)}
    >>> dead_adapters(coords, TopKMask(0.4).trained(coords, 0)), dead_adapters(coords, {})
    (('fc.weight',), ())
    """
    dead = []
    for name in (key.removesuffix("/b") for key in coords if key.endswith("/b")):
        if f"{name}/a" not in coords:  # A is part of the basis and constant: then B alone decides
            if trained and not bool((trained[f"{name}/b"] | (coords[f"{name}/b"] != 0)).any()):
                dead.append(name)
            continue
        alive = []
        for part, axis in (("a", 1), ("b", 0)):
            block = coords[f"{name}/{part}"]
            useful = (block != 0) | trained.get(f"{name}/{part}", torch.ones_like(block, dtype=torch.bool))
            alive.append(useful.any(axis))
        if not bool((alive[0] & alive[1]).any()):
            dead.append(name)
    return tuple(dead)


def nonzero_b(coords: Tree) -> float | None:
    """Return the share of the values of all B that are not zero; None without adapters.

    Masks and sparse downloads that compare A and B with each other keep little of B, which is smaller: an accuracy then
    says more about the weights that are trained without an adapter.

    Args:
        coords: the coordinates as clients receive them.

    >>> nonzero_b({"fc.weight/a": torch.ones(2, 3), "fc.weight/b": torch.tensor([[0.5, 0.0], [0.0, 0.0]])})
    0.25
    >>> nonzero_b({"fc.weight": torch.ones(3)}) is None
    True
    """
    found = [block for name, block in coords.items() if name.endswith("/b") and not name.startswith("model/")]
    values = sum(block.numel() for block in found)
    return sum(int((block != 0).sum()) for block in found) / values if values else None
