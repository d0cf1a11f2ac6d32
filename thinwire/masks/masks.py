"""Which numbers are trained and which are left at all: sparse training, over any space.

A mask is never sent. It is a function of the coordinates that a client received, so both ends know it, and the codec
`masked` sends the numbers under it without their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from thinwire.codecs.sparse import kept, largest
from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree, tmap
from thinwire.core.vectors import cut, join
from thinwire.errors import ConfigError


class Mask(Protocol):
    """Keeps some numbers still on clients, and some at zero on the server. Trees of truth values; empty means all."""

    @property
    def prunes(self) -> bool:
        """Whether the server ever sets numbers to zero."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether it is known before anything is received: then the numbers that it keeps still are never sent."""
        ...

    def trained(self, coords: Tree, version: int) -> Tree:
        """Which numbers a client trains that received these coordinates, on the CPU, in the round from `version`."""
        ...

    def left(self, before: Tree, after: Tree, version: int) -> Tree:
        """Which numbers are not zero at `version`, to which the server's step leads from `before` to `after`."""
        ...


class _PrunesNothing:
    """What most masks have in common: the server keeps all numbers; which are trained is not known beforehand."""

    @property
    def prunes(self) -> bool:
        """No."""
        return False

    @property
    def fixed(self) -> bool:
        """No."""
        return False

    def left(self, before: Tree, after: Tree, version: int) -> Tree:
        """All."""
        return {}


@register("mask", "none")
@dataclass(frozen=True)
class NoMask(_PrunesNothing):
    """Train all numbers."""

    def trained(self, coords: Tree, version: int) -> Tree:
        """All."""
        return {}


@register("mask", "topk", paper="Federated Select (Charles et al., 2022)")
@dataclass(frozen=True)
class TopKMask(_PrunesNothing):
    """Train the largest numbers of what was received; the server keeps all, and the choice is made anew every round.

        M = the k largest of |P|,    k = max(1, floor(density n)),    of all blocks together

    With `down` a `topk` of the same density a client receives P M, and finds M in it: the k largest of P M are the k
    largest of P.

    Args:
        density: share of the numbers that is trained, above 0 and at most 1.

    >>> TopKMask(0.5).trained({"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, 0)["w"].tolist()
    [False, True, True, False]
    """

    density: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"density must be above 0 and at most 1, not {self.density}; write density = 0.25")

    def trained(self, coords: Tree, version: int) -> Tree:
        """The largest."""
        return {} if self.density == 1 else _the_largest(coords, self.density)


@register("mask", "prune", paper="Frankle and Carbin, ICLR 2019; SparseAdapter, 2022; FedSparsify, 2022")
@dataclass(frozen=True)
class PruneMask:
    """Set all but the largest numbers to zero, once or more and more; what is zero stays zero, on clients and server.

        density(v) = 1 before version `at`,  then  density * keep^floor((v - at) / every)
        at a version where it falls:    M = the k largest of |P|,  P <- P M
        in between:                     M = where P is not zero; gradients, steps and the optimiser's memory under M

    A number under the mask that training brings to zero exactly is pruned, too.

    Args:
        density: share of the numbers that is left by the first pruning; 1 prunes nothing at `at`.
        at: the version of the first pruning: after so many rounds. 0, with density 1, only sets where counting begins.
        keep: the factor of all later ones.
        every: rounds between them.

    FLASC's lottery tickets prune before each q-th round, by nothing the first time: round s trains at a density of
    keep^(floor(s / q) - 1). Round s is the one from version s - 1, so that is `at = q - 1` and `every = q`:

    >>> [round(PruneMask(1.0, at=0, keep=0.5, every=1).share(s - 1), 3) for s in (1, 2, 3, 4)]
    [1.0, 0.5, 0.25, 0.125]
    >>> [round(PruneMask(1.0, at=1, keep=0.5, every=2).share(s - 1), 3) for s in (1, 2, 3, 4, 5, 6)]
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    >>> PruneMask(0.5).left({}, {"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, version=1)["w"].tolist()
    [False, True, True, False]
    """

    density: float = 0.25
    at: int = 1
    keep: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        for name, value in (("density", self.density), ("keep", self.keep)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, not {value}; write for example {name} = 0.25")
        if self.every < 1:
            raise ConfigError(f"every must be 1 or more rounds, not {self.every}")
        if self.at < 0 or (self.at == 0 and self.density < 1):
            raise ConfigError(f"at must be 1 or more rounds (or 0 with density = 1), not {self.at}; write at = 1")

    @property
    def prunes(self) -> bool:
        """Yes."""
        return True

    @property
    def fixed(self) -> bool:
        """No: it follows what training makes large."""
        return False

    def share(self, version: int) -> float:
        """Which share of the numbers is left at a version."""
        if version < self.at:
            return 1.0
        return float(self.density * self.keep ** ((version - self.at) // self.every))

    def trained(self, coords: Tree, version: int) -> Tree:
        """What is not zero; everything before the first pruning."""
        return {} if self.share(version) == 1 else tmap(lambda block: block != 0, coords)

    def left(self, before: Tree, after: Tree, version: int) -> Tree:
        """What was left, and of that the largest where the share falls."""
        mask = self.trained(before, version - 1)
        if self.share(version) == self.share(version - 1):
            return mask
        if mask:
            after = tmap(lambda block, stays: torch.where(stays, block, 0), after, mask)
        return _the_largest(after, self.share(version))


@register("mask", "random", paper="SLoRA (Babakniya et al., 2023)")
@dataclass(frozen=True)
class RandomMask(_PrunesNothing):
    """Train some numbers picked at random, the same in every round; the others stay as they are, on clients and server.

        M = the k largest of n random numbers,    k = max(1, floor(density n)),    drawn from `seed` alone

    Both ends draw it before anything is sent, so `masked` works in both directions: neither the numbers that stand
    still nor any position travels.

    Args:
        density: share of the numbers that is trained, above 0 and at most 1.
        seed: another one picks others.

    >>> [int(RandomMask(0.1).trained({"w": torch.zeros(1000)}, version)["w"].sum()) for version in (0, 7)]
    [100, 100]
    """

    density: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"density must be above 0 and at most 1, not {self.density}; write density = 0.1")

    @property
    def fixed(self) -> bool:
        """Yes."""
        return True

    def trained(self, coords: Tree, version: int) -> Tree:
        """Those that were picked."""
        return {} if self.density == 1 else dict(_picked(Spec.of(coords), self.density, self.seed))


def dead_adapters(coords: Tree, trained: Tree) -> tuple[str, ...]:
    """The weights whose low-rank correction B A is zero and cannot change, under the mask of a round.

        rank r is alive    if row r of A and column r of B each hold a number that is trained or not zero
        an adapter is dead if none of its ranks is alive: without B, A has no gradient, and without A, B has none

    A mask of the largest of A and B together leaves no B while B is small, since B begins at zero.

    Args:
        coords: what a client starts from, with zeros where the mask leaves nothing.
        trained: by block, which numbers are trained, from `Mask.trained`; empty means all.

    >>> coords = {"fc.weight/a": torch.ones(2, 3), "fc.weight/b": torch.zeros(4, 2)}
    >>> dead_adapters(coords, TopKMask(0.4).trained(coords, 0)), dead_adapters(coords, {})
    (('fc.weight',), ())
    """
    dead = []
    for name in (key.removesuffix("/b") for key in coords if key.endswith("/b")):
        if f"{name}/a" not in coords:  # A is drawn and stands still: then B alone decides
            if trained and not bool((trained[f"{name}/b"] | (coords[f"{name}/b"] != 0)).any()):
                dead.append(name)
            continue
        live = []
        for part, axis in (("a", 1), ("b", 0)):
            block = coords[f"{name}/{part}"]
            some = (block != 0) | trained.get(f"{name}/{part}", torch.ones_like(block, dtype=torch.bool))
            live.append(some.any(axis))
        if not bool((live[0] & live[1]).any()):
            dead.append(name)
    return tuple(dead)


@lru_cache(maxsize=2)
def _picked(spec: Spec, density: float, seed: int) -> Tree:
    """Drawn once: a model of 22 million weights is asked for it several times a round."""
    key = Key(seed).fold("mask")
    return _the_largest({block.name: key.fold(block.name).uniform(*block.shape) for block in spec}, density)


def _the_largest(coords: Tree, density: float) -> Tree:
    """True at the largest of all numbers together; of equal ones the first."""
    vector, spec = join(coords), Spec.of(coords)
    mask = torch.zeros(len(vector), dtype=torch.bool)
    mask[torch.from_numpy(largest(vector, kept(density, len(vector))))] = True
    return cut(mask, Spec(tuple(Block(block.name, block.shape, torch.bool) for block in spec)))
