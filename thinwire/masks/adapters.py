"""Find low-rank adapters that a mask prevents from training."""

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
