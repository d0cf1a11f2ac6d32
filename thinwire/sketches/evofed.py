"""Updates as the fitness of a population of random perturbations (EvoFed).

Paper: EvoFed (Rahimi et al., NeurIPS 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import register_part
from thinwire.core.text import PositiveFloat, PositiveInt
from thinwire.core.tree import Block, Spec, Tree, flatten, unflatten
from thinwire.errors import ConfigError
from thinwire.sketches.base import Sketch

Fitness = Literal["distance", "square"]
Shaping = Literal["rank", "zscore", "none"]

BLOCK = 1 << 22  # values of the population that are drawn at a time: 16 MiB of float32
_CODE = "fitness"


@register_part("sketch", "evofed", paper="Rahimi et al., NeurIPS 2023")
class EvoFed(Sketch):
    """Encode an update as the fitness of n random perturbations, drawn from the shared key.

        z_1 .. z_(n/2) Gaussian from the shared key,  z_(n/2 + j) = -z_j
        client:  F_j = shape(-||sigma z_j - delta||)
        decode:  update = 1 / (n sigma) sum_j mean(F)_j z_j

    The decoded update is the gradient estimate of an evolution strategy; the learning rate of `server_opt` is its step
    size. All weights are divided into `partitions` equal parts, the last padded with zeros, each with its own
    population and fitness values.

    Args:
        population: n, the fitness values of a part; even, because perturbations come in pairs z and -z.
        sigma: scale of the perturbations.
        partitions: number of parts of the weights; n times as many values are sent.
        shaping: transformation of a client's fitness values: their `rank` from -1/2 to 1/2 (ties share a rank), their
            `zscore`, or `none`.
        fitness: the negated `distance` to the trained weights, or half its negated `square`; larger is closer.
        paired: send only F_j - F_(n/2 + j), on which the update depends: half the values, the same update.

    >>> sketch, delta = EvoFed(population=4), {"w": torch.tensor([1.0, -1.0, 2.0])}
    >>> code = sketch.encode(delta, Key(0))
    >>> sorted(round(f, 3) for f in code["fitness"][0].tolist())
    [-0.5, -0.167, 0.167, 0.5]
    >>> torch.dot(sketch.decode(code, Spec.of(delta), Key(0))["w"], delta["w"]) > 0    # same direction
    tensor(True)

    Squares without shaping give the update (2 / n) sum z_j (z_j . delta), whose expectation is delta. Ranks and
    z-scores lose the scale of the update: the learning rate of `server_opt` must provide it.

    Not a space: clients train all weights, only uploads are small. State of `server_opt`, such as momentum, would mix
    perturbations of different rounds.
    """

    population: int = 128
    sigma: PositiveFloat = 0.35
    partitions: PositiveInt = 1
    shaping: Shaping = "rank"
    fitness: Fitness = "distance"
    paired: bool = False

    def __post_init__(self) -> None:
        if self.population < 2 or self.population % 2:
            raise ConfigError(
                f"population must be even and 2 or more (perturbations come in pairs), not {self.population}"
            )

    def spec(self, coords: Spec) -> Spec:
        """Return one value for each perturbation and part, for any blocks; nothing without blocks."""
        if not coords.size:
            return Spec(())
        return Spec((Block(_CODE, (self.partitions, self._pairs if self.paired else self.population)),))

    def encode(self, delta: Tree, key: Key) -> Tree:
        """Return the fitness of each perturbation."""
        vector = flatten(delta).float()
        if not len(vector):
            return {}
        missing = -len(vector) % self.partitions
        parts = torch.nn.functional.pad(vector, (0, missing)).view(self.partitions, -1)
        along = vector.new_zeros(self.partitions, self._pairs)  # z . delta
        square = vector.new_zeros(self.partitions, self._pairs)  # z . z, without the padding
        for tile in self._tiles(len(vector)):
            z = tile.draw(key, vector.device)
            along[tile.at] += torch.bmm(z, parts[tile.on][..., None]).squeeze(-1)
            square[tile.at] += (z * tile.inside(z, len(vector))).square().sum(-1)
        # squared distances of a pair differ by 4 sigma z . delta, small against the rest: float64 keeps the difference
        along, square = along.double() * self.sigma, square.double() * self.sigma**2
        rest = square + parts.double().square().sum(-1, keepdim=True)
        distance = torch.cat((rest - 2 * along, rest + 2 * along), dim=-1)
        value = -distance / 2 if self.fitness == "square" else -distance.clamp(min=0).sqrt()
        shaped = _shape(value, self.shaping)
        if self.paired:
            shaped = shaped[:, : self._pairs] - shaped[:, self._pairs :]
        return {_CODE: shaped.float()}

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """Return the sum of the perturbations, weighted by fitness."""
        if not coords.size:
            return coords.zeros()
        fitness = code[_CODE]
        weight = fitness if self.paired else fitness[:, : self._pairs] - fitness[:, self._pairs :]
        weight = weight / (self.population * self.sigma)
        out = fitness.new_zeros(self.partitions, -(-coords.size // self.partitions))
        for tile in self._tiles(coords.size):
            z = tile.draw(key, fitness.device)
            out[tile.on] += torch.bmm(weight[tile.at][:, None], z).squeeze(1)
        update = unflatten(out.reshape(-1)[: coords.size], coords.shapes())
        return {block.name: update[block.name].to(block.dtype) for block in coords}

    @property
    def _pairs(self) -> int:
        return self.population // 2

    def _tiles(self, size: int) -> Iterator[Tile]:
        """Divide the population (partitions, pairs, values of a part) into tiles of at most BLOCK values."""
        values = -(-size // self.partitions)
        shape = (self._pairs, values)
        parts = max(1, BLOCK // (self._pairs * values))
        pairs = self._pairs if self._pairs * values <= BLOCK else max(1, BLOCK // values)
        for part in range(0, self.partitions, parts):
            for pair in range(0, self._pairs, pairs):
                for first in range(0, values, BLOCK):
                    yield Tile(
                        slice(part, min(part + parts, self.partitions)),
                        slice(pair, min(pair + pairs, self._pairs)),
                        slice(first, min(first + BLOCK, values)),
                        shape,
                    )


class Tile(NamedTuple):
    """A part of the population that is contiguous in the stream of the key."""

    parts: slice
    pairs: slice
    values: slice
    shape: tuple[int, int]  # pairs and values of one partition

    @property
    def at(self) -> tuple[slice, slice]:
        """Index into the fitness values."""
        return self.parts, self.pairs

    @property
    def on(self) -> tuple[slice, slice]:
        """Index into the weights."""
        return self.parts, self.values

    def draw(self, key: Key, device: torch.device) -> Tensor:
        """Return its values; cached, because all clients of a round need the same ones."""
        sides = tuple(side.stop - side.start for side in (self.parts, self.pairs, self.values))
        pairs, values = self.shape
        start = (self.parts.start * pairs + self.pairs.start) * values + self.values.start
        return _drawn(key, sides, start, device)

    def inside(self, z: Tensor, size: int) -> Tensor:
        """Return 1 for weights and 0 for padding after the last weight."""
        first = torch.arange(self.parts.start, self.parts.stop, device=z.device)[:, None] * self.shape[1]
        place = first + torch.arange(self.values.start, self.values.stop, device=z.device)
        return (place < size).to(z.dtype)[:, None]


@lru_cache(maxsize=8)  # 128 MiB at most; the tensors are never changed in place
def _drawn(key: Key, sides: tuple[int, ...], start: int, device: torch.device) -> Tensor:
    return key.normal(*sides, start=start, device=device)


def _shape(value: Tensor, shaping: Shaping) -> Tensor:
    """Return the fitness values of each row as ranks, z-scores, or unchanged; ties stay ties."""
    if shaping == "none":
        return value
    if shaping == "zscore":
        deviation = value.std(-1, correction=0, keepdim=True)
        return (value - value.mean(-1, keepdim=True)) / torch.where(deviation > 0, deviation, 1.0)
    ordered = value.sort(-1).values.contiguous()
    below = torch.searchsorted(ordered, value.contiguous())
    until = torch.searchsorted(ordered, value.contiguous(), right=True)
    return (below + until - 1).to(value.dtype) / (2 * (value.shape[-1] - 1)) - 0.5
