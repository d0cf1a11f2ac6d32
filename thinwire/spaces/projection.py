"""The whole model's update as a few numbers, in a subspace that everybody draws from the shared seed.

Papers: MAPA and MAPAX ("Communication-efficient federated learning via model-agnostic projection adaptation"), MAPO
("Reshape-then-factorize"). One implementation: all d trainable weights form one vector, cut into k segments of e or
e - 1 numbers, e = ceil(d / k), each of which moves in the same p random directions.

    U(B) = the rows of B A, the last of them without their last entry, one after another: d entries
    weights = base + U(B)                       A: p x e, drawn, never sent;    B: k x p, trained and sent

Segments are as equal as they can be, so that every number of B moves something. (Segments of e numbers each would use
up the weights before the last segments: for d = 11,274 and k = 8,192 there would be nothing left for 2,555 of them.)

    MAPA(p): k = 1.    MAPO(k): p = 1.    MAPAX(k, p): both.

With `redraw_every=R` the update is merged and A is drawn anew after R rounds; within those rounds B adds up, so a client
that missed some of them downloads one vector of k p numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, unflatten
from thinwire.errors import ConfigError
from thinwire.kernels.projection import key_words, multiply_generated, square_sums, unit_scales
from thinwire.spaces.base import Space

Entries = Literal["gaussian", "sign"]
Normalise = Literal["row", "orthonormal", "none"]
Layout = Literal["contiguous", "strided", "permuted"]

# Frames with at most this many entries (64 MiB) are drawn once a round and kept; larger ones are drawn block by block
# whenever they are multiplied, and never stored.
STORED = 1 << 24

_LAYOUT_KEY = Key(0).fold("thinwire.projection.layout")  # public and the same for everyone: a layout is no secret


class Sizes(NamedTuple):
    """How d weights are cut: k segments of e or e - 1, each moved by p directions."""

    k: int
    p: int
    e: int


@dataclass(frozen=True, kw_only=True)
class _Projection(Space):
    """What MAPA, MAPAX and MAPO share."""

    entries: Entries = "sign"
    normalise: Normalise = "row"
    layout: Layout = "permuted"
    redraw_every: int = 1

    def __post_init__(self) -> None:
        for name, known in (("entries", Entries), ("normalise", Normalise), ("layout", Layout)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(known))}, not {getattr(self, name)!r}")
        if self.redraw_every < 0:
            raise ConfigError(
                f"redraw_every must be 0 (a basis for ever) or a number of rounds, not {self.redraw_every}"
            )

    def sizes(self, d: int) -> Sizes:
        """k, p and e for a model of d weights, or a ConfigError."""
        raise TypeError("use MAPA, MAPAX or MAPO")

    def check(self, spec: Spec) -> None:
        """Refuse what cannot cut a model of this size."""
        _, p, e = self.sizes(spec.size)
        if self.normalise == "orthonormal" and p * e > STORED:
            raise ConfigError(
                f"normalise = 'orthonormal' needs the whole basis of {p * e:,} numbers in memory, the limit is "
                f"{STORED:,}; write normalise = 'row'"
            )

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """A itself where it is small; the key that draws it where it is large; and the fixed permutation, if any."""
        _, p, e = self.sizes(spec.size)
        out: Tree = {}
        if p * e <= STORED:
            out["a"] = _draw(key, p, e, self.entries, self.normalise).to(device or "cpu")
        else:
            out["key"] = key_words(key, device)
            if self.entries == "gaussian" and self.normalise == "row":
                out["scale"] = unit_scales(key, p, e, device)
        if self.layout == "permuted":
            out["place"], out["weight"] = _permutation(spec.size, str(device or "cpu"))
        return out

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """B = 0: the model as it is."""
        k, p, _ = self.sizes(sum(block.numel() for block in base.values()))
        first = next(iter(base.values()))
        return {"model/b": first.new_zeros(k, p, dtype=torch.float32)}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The base plus U(B)."""
        d = sum(block.numel() for block in base.values())
        k, p, e = self.sizes(d)
        b = coords["model/b"]
        if "a" in basis:
            update = b @ basis["a"]
        else:
            signs = self.entries == "sign" and self.normalise == "row"  # their rows all have the same length
            b = b * basis["scale"] if "scale" in basis else b
            update = multiply_generated(b, basis["key"], p, e, self.entries, e**-0.5 if signs else 1.0)
        if self.layout == "strided":  # segment j holds the weights j, j + k, j + 2k, ...
            vector = update.transpose(-1, -2).flatten(-2)[..., :d]
        else:
            vector = _rows(update, d - k * (e - 1))
        if self.layout == "permuted":
            vector = _Permute.apply(vector, basis["place"], basis["weight"])  # type: ignore[no-untyped-call]
        moved = unflatten(vector, base)
        return {name: block + moved[name].to(block.dtype) for name, block in base.items()}


@register("space", "mapo", paper="MAPO: Reshape-then-factorize")
@dataclass(frozen=True, kw_only=True)
class MAPO(_Projection):
    """Move each of k parts of the model along one shared random direction: k numbers say it all.

        segment j of vec(W) = that of vec(W0) + b_j a,    a: e = ceil(d / k) drawn numbers;    b: k trained numbers

    Segments have e weights or, where k does not divide d, some of them e - 1: these leave out the last number of a.

    Args:
        k: how many numbers are trained and sent.
        entries: random signs (exact everywhere and cheap) or nearly Gaussian numbers (the paper).
        normalise: rows of A of length one, orthonormal rows, or as drawn.
        layout: how weights are dealt to segments: neighbours together (the paper), every k-th, or a fixed random order.
        redraw_every: rounds for which a basis is kept; 1 is the paper, 0 means for ever.

    >>> import torch
    >>> space, base = MAPO(k=2), {"w": torch.zeros(5)}
    >>> basis = space.basis(Spec.of(base), Key(1), "cpu")
    >>> basis["a"].shape, space.expand(base, basis, {"model/b": torch.ones(2, 1)})["w"].abs().unique().tolist()
    (torch.Size([1, 3]), [0.5773502588272095])

    Not MAPA, which moves the whole model along many directions and must draw each of them in full length.
    """

    k: int = 128

    def sizes(self, d: int) -> Sizes:
        """K segments, one direction."""
        return _cut(d, self.k, 1)


@register("space", "mapa", paper="MAPA: Model-agnostic projection adaptation")
@dataclass(frozen=True, kw_only=True)
class MAPA(_Projection):
    """Move the whole model along p shared random directions: p numbers say it all.

        vec(W) = vec(W0) + b A,    A: p x d drawn numbers, never stored when large;    b: p trained numbers

    Args:
        p: how many numbers are trained and sent.
        entries: random signs or nearly Gaussian numbers (the paper).
        normalise: rows of A of length one, orthonormal rows, or as drawn.
        layout: has no effect on one segment but a fixed renaming of weights.
        redraw_every: rounds for which a basis is kept; 1 is the paper, 0 means for ever.

    >>> MAPA(p=3).sizes(10)
    Sizes(k=1, p=3, e=10)
    """

    p: int = 128
    layout: Layout = "contiguous"

    def sizes(self, d: int) -> Sizes:
        """One segment, p directions."""
        return _cut(d, 1, self.p)


@register("space", "mapax", paper="MAPA: Model-agnostic projection adaptation")
@dataclass(frozen=True, kw_only=True)
class MAPAX(_Projection):
    """Move each of k parts of the model along p shared random directions.

        U(B) = B A,    A: p x e drawn numbers, e = ceil(d / k);    B: k x p trained numbers

    Give `k` and `p`; or `segment` (e) and `budget` (about how many numbers to train), as the paper's tables do: then
    k = ceil(d / e) and p = max(1, round(budget / k)). What is 0 is not given.

    Args:
        k: how many segments.
        p: how many directions.
        segment: how many weights a segment has, instead of k; 1024 if neither is given.
        budget: about how many numbers to train, instead of p; 128 if neither is given.
        entries: random signs or nearly Gaussian numbers (the paper).
        normalise: rows of A of length one, orthonormal rows, or as drawn.
        layout: how weights are dealt to segments.
        redraw_every: rounds for which a basis is kept; 1 is the paper, 0 means for ever.

    >>> MAPAX(k=4, p=2).sizes(10), MAPAX(segment=64, budget=1000).sizes(11274)
    (Sizes(k=4, p=2, e=3), Sizes(k=177, p=6, e=64))
    """

    k: int = 0
    p: int = 0
    segment: int = 0
    budget: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k and self.segment:
            raise ConfigError(f"give either k or segment, not both (k = {self.k}, segment = {self.segment})")
        if self.p and self.budget:
            raise ConfigError(f"give either p or budget, not both (p = {self.p}, budget = {self.budget})")

    def sizes(self, d: int) -> Sizes:
        """As given, or derived from segment and budget."""
        if self.segment and not 1 <= self.segment <= d:
            raise ConfigError(f"segment must be from 1 to the number of weights, {d:,}, not {self.segment}")
        k = self.k or -(-d // (self.segment or min(d, 1024)))
        return _cut(d, k, self.p or max(1, round((self.budget or 128) / k)))


def _cut(d: int, k: int, p: int) -> Sizes:
    if not 1 <= k <= d:
        raise ConfigError(f"k must be from 1 to the number of weights, {d:,}, not {k}")
    e = -(-d // k)
    if not 1 <= p <= e:
        raise ConfigError(f"p must be from 1 to the length of a segment, {e:,}, not {p}")
    return Sizes(k, p, e)


def _rows(update: Tensor, full: int) -> Tensor:
    """The rows of (..., k, e) one after another; behind the first `full` of them each without its last entry.

    >>> _rows(torch.arange(6).view(3, 2), 1).tolist()
    [0, 1, 2, 4]
    """
    first = update[..., :full, :].flatten(-2)
    if full == update.shape[-2]:
        return first
    return torch.cat((first, update[..., full:, :-1].flatten(-2)), -1)


def _draw(key: Key, p: int, e: int, entries: Entries, normalise: Normalise) -> Tensor:
    """A, on the CPU: the same bits everywhere, but for 'orthonormal', whose last bits are the linear algebra's."""
    if entries == "sign":
        a = key.signs(p, e)
        if normalise == "row":
            return a * float(torch.tensor(e**-0.5, dtype=torch.float32))
    else:
        if normalise == "row":  # the squares are summed as whole numbers, so the length is exact on every machine
            whole = key.normal_integers(p, e)
            lengths = torch.tensor([1 / math.sqrt(row) for row in square_sums(whole)], dtype=torch.float32)
            return whole.to(torch.float32) * lengths[:, None]
        a = key.normal(p, e)
    if normalise == "orthonormal":
        a = torch.linalg.qr(a.double().T).Q.T.to(torch.float32).contiguous()
    return a


@lru_cache(maxsize=8)
def _permutation(d: int, device: str) -> tuple[Tensor, Tensor]:
    """Where in the dealt order each weight lies, and which weight lies at each place."""
    weight = _LAYOUT_KEY.fold(d).permutation(d)
    place = torch.empty_like(weight)
    place[weight] = torch.arange(d)
    return place.to(device), weight.to(device)


class _Permute(torch.autograd.Function):
    """A fixed reordering whose gradient is a gather too: scattering would be slower and, on a GPU, not repeatable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vector: Tensor, place: Tensor, weight: Tensor) -> Tensor:
        return vector.index_select(-1, place)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2], inputs[1])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight, place = ctx.saved_tensors  # type: ignore[attr-defined]
        return _Permute.apply(grad, weight, place), None, None  # type: ignore[no-untyped-call]
