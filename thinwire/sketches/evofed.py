"""A change as how well a population of random guesses fits it (EvoFed).

Paper: EvoFed (Rahimi et al., NeurIPS 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree, flatten, unflatten
from thinwire.errors import ConfigError
from thinwire.sketches.base import Sketch

Fitness = Literal["distance", "square"]
Shaping = Literal["rank", "zscore", "none"]

BLOCK = 1 << 22  # numbers of the population drawn at a time: 16 MiB of float32
_CODE = "fitness"


@register("sketch", "evofed", paper="Rahimi et al., NeurIPS 2023")
@dataclass(frozen=True)
class EvoFed(Sketch):
    """Say how close each of n random changes, which everybody can draw, comes to the change that was trained.

        z_1 .. z_(n/2) Gaussian from the shared key,  z_(n/2 + j) = -z_j
        client:  F_j = shape(-||sigma z_j - delta||)        everybody:  change = 1 / (n sigma) sum_j mean(F)_j z_j

    The change is the gradient estimate of an evolution strategy; the rate of `server_opt` is its step. All weights are
    cut into `partitions` equal parts, the last one padded with zeros, each with a population and a fitness of its own.

    Args:
        population: n, the numbers that a part is told in; even, because guesses come in pairs z and -z.
        sigma: the size of the guesses.
        partitions: parts that the weights are cut into; n times as many numbers are sent.
        shaping: what is sent of a client's fitnesses: their `rank` from -1/2 to 1/2 (equal ones share theirs), their
            `zscore` (less their mean, by their deviation), or themselves (`none`).
        fitness: the `distance` to the trained weights, or half its `square`, both negated: larger is closer.
        paired: send F_j - F_(n/2 + j) only, all that the change depends on: half the numbers, the same change.

    >>> sketch, delta = EvoFed(population=4), {"w": torch.tensor([1.0, -1.0, 2.0])}
    >>> code = sketch.encode(delta, Key(0))
    >>> sorted(round(f, 3) for f in code["fitness"][0].tolist())
    [-0.5, -0.167, 0.167, 0.5]
    >>> torch.dot(sketch.decode(code, Spec.of(delta), Key(0))["w"], delta["w"]) > 0    # on average, that way
    tensor(True)

    Squares that are not shaped make the change (2 / n) sum z_j (z_j . delta), which is delta on average. Ranks and
    z-scores forget how large a change was: `server_opt` must know how far to go.

    Not a space: clients train all weights, only what they say is small. Memory of `server_opt` (momentum) would mix
    guesses of different rounds.
    """

    population: int = 128
    sigma: float = 0.35
    partitions: int = 1
    shaping: Shaping = "rank"
    fitness: Fitness = "distance"
    paired: bool = False

    def __post_init__(self) -> None:
        if self.population < 2 or self.population % 2:
            raise ConfigError(f"population must be even and 2 or more (guesses come in pairs), not {self.population}")
        if not 0 < self.sigma < math.inf:
            raise ConfigError(f"sigma must be above 0, not {self.sigma}")
        if self.partitions < 1:
            raise ConfigError(f"partitions must be 1 or more, not {self.partitions}")
        if self.shaping not in get_args(Shaping):
            raise ConfigError(f"shaping must be one of {', '.join(get_args(Shaping))}, not {self.shaping!r}")
        if self.fitness not in get_args(Fitness):
            raise ConfigError(f"fitness must be one of {', '.join(get_args(Fitness))}, not {self.fitness!r}")

    def spec(self, coords: Spec) -> Spec:
        """One number for each guess and part, whatever the blocks; none if no block speaks."""
        if not coords.size:
            return Spec(())
        return Spec((Block(_CODE, (self.partitions, self._pairs if self.paired else self.population)),))

    def encode(self, delta: Tree, key: Key) -> Tree:
        """How close each guess comes to the change."""
        vector = flatten(delta).float()
        if not len(vector):
            return {}
        parts = self._cut(vector)
        along = vector.new_zeros(self.partitions, self._pairs)  # z . delta
        square = vector.new_zeros(self.partitions, self._pairs)  # z . z, without the padding
        for tile in self._tiles(len(vector)):
            z = tile.draw(key, vector.device)
            along[tile.at] += torch.bmm(z, parts[tile.on][..., None]).squeeze(-1)
            square[tile.at] += (z * tile.inside(z, len(vector))).square().sum(-1)
        # the two ends of a pair differ by 4 sigma z . delta, little beside the rest: float64 keeps it
        along, square = along.double() * self.sigma, square.double() * self.sigma**2
        rest = square + parts.double().square().sum(-1, keepdim=True)
        away = torch.cat((rest - 2 * along, rest + 2 * along), dim=-1)
        value = -away / 2 if self.fitness == "square" else -away.clamp(min=0).sqrt()
        shaped = _shape(value, self.shaping)
        if self.paired:
            shaped = shaped[:, : self._pairs] - shaped[:, self._pairs :]
        return {_CODE: shaped.float()}

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """The guesses, each as much as it is fit."""
        if not coords.size:
            return {block.name: torch.zeros(block.shape, dtype=block.dtype) for block in coords}
        fit = code[_CODE]
        pull = fit if self.paired else fit[:, : self._pairs] - fit[:, self._pairs :]
        pull = pull / (self.population * self.sigma)
        out = fit.new_zeros(self.partitions, -(-coords.size // self.partitions))
        for tile in self._tiles(coords.size):
            z = tile.draw(key, fit.device)
            out[tile.on] += torch.bmm(pull[tile.at][:, None], z).squeeze(1)
        change = unflatten(out.reshape(-1)[: coords.size], coords.shapes())
        return {block.name: change[block.name].to(block.dtype) for block in coords}

    @property
    def _pairs(self) -> int:
        return self.population // 2

    def _cut(self, vector: Tensor) -> Tensor:
        """(partitions, numbers of a part), filled up with zeros."""
        short = -len(vector) % self.partitions
        return torch.nn.functional.pad(vector, (0, short)).view(self.partitions, -1)

    def _tiles(self, size: int) -> Iterator[Tile]:
        """All of the population (partitions, pairs, numbers of a part), at most BLOCK numbers at a time."""
        numbers = -(-size // self.partitions)
        shape = (self._pairs, numbers)
        parts = max(1, BLOCK // (self._pairs * numbers))
        pairs = self._pairs if self._pairs * numbers <= BLOCK else max(1, BLOCK // numbers)
        for part in range(0, self.partitions, parts):
            for pair in range(0, self._pairs, pairs):
                for first in range(0, numbers, BLOCK):
                    yield Tile(
                        slice(part, min(part + parts, self.partitions)),
                        slice(pair, min(pair + pairs, self._pairs)),
                        slice(first, min(first + BLOCK, numbers)),
                        shape,
                    )


class Tile(NamedTuple):
    """A stretch of the population that is one stretch of the key's stream, too."""

    parts: slice
    pairs: slice
    numbers: slice
    shape: tuple[int, int]  # pairs and numbers of a whole part

    @property
    def at(self) -> tuple[slice, slice]:
        """Its place among the fitnesses."""
        return self.parts, self.pairs

    @property
    def on(self) -> tuple[slice, slice]:
        """Its place among the weights."""
        return self.parts, self.numbers

    def draw(self, key: Key, device: torch.device) -> Tensor:
        """Its numbers; whoever asks for the same ones again soon, as clients of one round do, need not draw."""
        sides = tuple(side.stop - side.start for side in (self.parts, self.pairs, self.numbers))
        pairs, numbers = self.shape
        start = (self.parts.start * pairs + self.pairs.start) * numbers + self.numbers.start
        return _drawn(key, sides, start, device)

    def inside(self, z: Tensor, size: int) -> Tensor:
        """1 for numbers that stand for weights, 0 for the padding after the last one."""
        first = torch.arange(self.parts.start, self.parts.stop, device=z.device)[:, None] * self.shape[1]
        place = first + torch.arange(self.numbers.start, self.numbers.stop, device=z.device)
        return (place < size).to(z.dtype)[:, None]


@lru_cache(maxsize=8)  # 128 MiB at most; nobody changes what was drawn
def _drawn(key: Key, sides: tuple[int, ...], start: int, device: torch.device) -> Tensor:
    return key.normal(*sides, start=start, device=device)


def _shape(value: Tensor, shaping: Shaping) -> Tensor:
    """Fitnesses of each row as ranks, as z-scores, or as they are; equal ones stay equal."""
    if shaping == "none":
        return value
    if shaping == "zscore":
        deviation = value.std(-1, correction=0, keepdim=True)
        return (value - value.mean(-1, keepdim=True)) / torch.where(deviation > 0, deviation, 1.0)
    ordered = value.sort(-1).values.contiguous()
    below = torch.searchsorted(ordered, value.contiguous())
    until = torch.searchsorted(ordered, value.contiguous(), right=True)
    return (below + until - 1).to(value.dtype) / (2 * (value.shape[-1] - 1)) - 0.5
