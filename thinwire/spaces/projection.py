"""Random projection of the whole model: the update is a small trained matrix times a random basis (MAPA, MAPAX, MAPO).

Papers: MAPA and MAPAX ("Communication-efficient federated learning via model-agnostic projection adaptation"), MAPO
("Reshape-then-factorize"). One implementation: all d trainable weights form one vector, which is divided into k
segments of e or e - 1 weights, e = ceil(d / k). All segments move in the same p random directions.

    U(B) = the rows of B A, the last of them without their last entry, concatenated: d entries
    weights = base + U(B)                       A: p x e, random, never sent;    B: k x p, trained and sent

Segment lengths differ by at most one, so that every value of B has an effect. (With segments of e weights each, the
last segments would be empty: for d = 11,274 and k = 8,192 that is 2,555 of them.)

    MAPA(p): k = 1.    MAPO(k): p = 1.    MAPAX(k, p): both.

U is linear: vec(U(B)) = P vec(B). A basis of unit rows has E[P P^T] = (p / e) I, so a gradient step in B moves the
weights by p / e, about k p / d, of FedAvg's step. With `scale="isometric"` A is multiplied by sqrt(e / p), which is
sqrt(d / (k p)) where k divides d:

    E[P P^T] = I,    E |dL/dB|^2 = |dL/dW|^2,    E[step of W] = FedAvg's step

FedAvg's learning rate, and a bound on the norm of the gradient, are then of the right size whatever d, k and p. (One
step is longer than FedAvg's, by about sqrt(e / p): the rest of it is random and has mean zero.)

With `redraw_every=R` the update is merged and A is drawn again after R rounds. Within those rounds the updates of B add
up, so a client that missed some of them downloads one vector of k p values. A short run needs new directions sooner, to
reach all weights: `redraw_every=-1` is R = floor(T / 50) in a run of T rounds, from 1 to 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, unflatten
from thinwire.errors import ConfigError
from thinwire.kernels.projection import key_words, multiply_generated, square_sums, unit_scales
from thinwire.spaces.base import Space

Entries = Literal["gaussian", "sign"]
Normalize = Literal["row", "orthonormal", "none"]
Layout = Literal["contiguous", "strided", "permuted"]
Scale = Literal["isometric", "unit"]

# A basis with at most this many entries (64 MiB) is stored; a larger one is drawn in each multiplication, in blocks.
STORED = 1 << 24

_LAYOUT_KEY = Key(0).fold("thinwire.projection.layout")  # public: a layout is no secret


class Sizes(NamedTuple):
    """Sizes of a projection of d weights: k segments of e or e - 1 weights, p directions."""

    k: int
    p: int
    e: int


@dataclass(frozen=True, kw_only=True)
class _Projection(Space):
    """Common part of MAPA, MAPAX and MAPO."""

    additive = True  # U is linear
    entries: Entries = "sign"
    normalize: Normalize = "row"
    layout: Layout = "permuted"
    redraw_every: Annotated[int, "[-1, inf)"] = 1
    scale: Scale = "isometric"

    def over(self, rounds: int) -> Space:
        """Return the space with `redraw_every` for a run of that many rounds, where it is -1."""
        return self if self.redraw_every >= 0 else replace(self, redraw_every=min(10, max(1, rounds // 50)))

    def sizes(self, d: int) -> Sizes:
        """Return k, p and e for a model of d weights, or raise a ConfigError."""
        raise TypeError("use MAPA, MAPAX or MAPO")

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if k and p do not fit a model of this size."""
        _, p, e = self.sizes(spec.size)
        if self.normalize == "orthonormal" and p * e > STORED:
            raise ConfigError(
                f"normalize = 'orthonormal' needs the whole basis of {p * e:,} values in memory, the limit is "
                f"{STORED:,}; write normalize = 'row'"
            )

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return A if it is small, else the key that generates it; and the permutation of the layout, if any."""
        _, p, e = self.sizes(spec.size)
        out: Tree = {}
        if p * e <= STORED:
            out["a"] = _draw(key, p, e, self).to(device or "cpu")
        else:
            out["key"] = key_words(key, device)
            if self.entries == "gaussian" and self.normalize == "row":
                out["scale"] = unit_scales(key, p, e, device)
                if self.scale == "isometric":
                    out["scale"] = out["scale"] * math.sqrt(e / p)
        if self.layout == "permuted":
            out["place"], out["weight"] = _permutation(spec.size, str(device or "cpu"))
        return out

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return B = 0, which leaves the base unchanged."""
        k, p, _ = self.sizes(sum(block.numel() for block in base.values()))
        first = next(iter(base.values()))
        return {"model/b": first.new_zeros(k, p, dtype=torch.float32)}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base plus U(B)."""
        d = sum(block.numel() for block in base.values())
        k, p, e = self.sizes(d)
        b = coords["model/b"]
        if "a" in basis:
            update = b @ basis["a"]
        else:
            b = b * basis["scale"] if "scale" in basis else b
            factor = 1.0 if "scale" in basis else self._entry_scale(p, e)
            update = multiply_generated(b, basis["key"], p, e, self.entries, factor)
        if self.layout == "strided":  # segment j holds the weights j, j + k, j + 2k, ...
            vector = update.transpose(-1, -2).flatten(-2)[..., :d]
        else:
            vector = _rows(update, d - k * (e - 1))
        if self.layout == "permuted":
            vector = _Permute.apply(vector, basis["place"], basis["weight"])  # type: ignore[no-untyped-call]
        moved = unflatten(vector, base)
        return {name: block + moved[name].to(block.dtype) for name, block in base.items()}

    def _entry_scale(self, p: int, e: int) -> float:
        """Return the factor of entries of variance 1 that need no norms of rows: signs, or entries as drawn.

        One correctly rounded square root and one division, so that it is the same on all machines. Isometric signs are
        divided by sqrt(p) alone, since sqrt(e) cancels: MAPO's entries are then exactly 1 and -1.
        """
        if self.scale == "isometric":
            return 1 / math.sqrt(p)
        return e**-0.5 if self.normalize == "row" else 1.0


@register_part("space", "mapo", paper="MAPO: Reshape-then-factorize", kw_only=True)
class MAPO(_Projection):
    """Move each of k segments of the model along one shared random direction, by k trained parameters.

        segment j of vec(W) = that of vec(W0) + b_j a,    a: e = ceil(d / k) random values;    b: k trained parameters

    Segments have e weights or, where k does not divide d, some of them e - 1: these do not use the last value of a.

    Args:
        k: number of trained parameters; 0 derives it from the number of weights, k = floor(2 d^(2/3)).
        entries: distribution of A: random signs (cheap, the same bits on all machines) or nearly Gaussian (the paper).
        normalize: rows of A have norm 1 (`row`), are orthonormal (`orthonormal`), or unscaled (`none`).
        layout: assignment of weights to segments: neighbors together (`contiguous`, the paper), every k-th (`strided`),
            or a fixed random permutation (`permuted`).
        redraw_every: rounds between new bases; 1 in the paper, 0 means one basis for all rounds, -1 a number
            for the length of the run.
        scale: `isometric` multiplies normalized rows by sqrt(e / p), and unscaled entries by 1 / sqrt(p), so that
            FedAvg's learning rate fits; `unit` leaves them (the paper).

    >>> import torch
    >>> space, base = MAPO(k=2), {"w": torch.zeros(5)}
    >>> basis = space.basis(Spec.of(base), Key(1), "cpu")
    >>> basis["a"].shape, space.expand(base, basis, {"model/b": torch.ones(2, 1)})["w"].abs().unique().tolist()
    (torch.Size([1, 3]), [1.0])
    >>> [MAPO(k=0).sizes(d).k for d in (57, 11_274, 1_146_634)]
    [29, 1005, 21910]

    Not `MAPA`, which moves the whole model along p directions of length d.
    """

    k: int = 0

    def sizes(self, d: int) -> Sizes:
        """Return k segments and one direction."""
        return _sizes(d, self.k or _derived_size(d), 1)

    def note(self, spec: Spec) -> str:
        """Return k where it is derived."""
        return "" if self.k else f"MAPO has k = {self.sizes(spec.size).k:,}, floor(2 d^(2/3)) for d = {spec.size:,}."


@register_part("space", "mapa", paper="MAPA: Model-agnostic projection adaptation", kw_only=True)
class MAPA(_Projection):
    """Move the whole model along p shared random directions, by p trained parameters.

        vec(W) = vec(W0) + b A,    A: p x d random values, never stored if large;    b: p trained parameters

    Args:
        p: number of trained parameters.
        entries: distribution of A: random signs or nearly Gaussian (the paper).
        normalize: rows of A have norm 1 (`row`), are orthonormal (`orthonormal`), or unscaled (`none`).
        layout: with one segment, only a permutation of the weights.
        redraw_every: rounds between new bases; 1 in the paper, 0 means one basis for all rounds, -1 a number
            for the length of the run.
        scale: `isometric` multiplies normalized rows by sqrt(e / p), and unscaled entries by 1 / sqrt(p), so that
            FedAvg's learning rate fits; `unit` leaves them (the paper).

    >>> MAPA(p=3).sizes(10)
    Sizes(k=1, p=3, e=10)

    Not `MAPO`, whose one direction is shared by k segments and k times shorter.
    """

    p: int = 128
    layout: Layout = "contiguous"

    def sizes(self, d: int) -> Sizes:
        """Return one segment and p directions."""
        return _sizes(d, 1, self.p)


@register_part("space", "mapax", paper="MAPA: Model-agnostic projection adaptation", kw_only=True)
class MAPAX(_Projection):
    """Move each of k segments of the model along p shared random directions, by k p trained parameters.

        U(B) = B A,    A: p x e random values, e = ceil(d / k);    B: k x p trained parameters

    Give `k` and `p`; or, as in the tables of the paper, `segment` (e) and `budget` (the approximate number of
    parameters): then k = ceil(d / e) and p = max(1, round(budget / k)). 0 means not given.

    Args:
        k: number of segments.
        p: number of directions.
        segment: weights in a segment, instead of k; 1024 if neither is given.
        budget: approximate number of trained parameters, instead of p; 128 if neither is given.
        entries: distribution of A: random signs or nearly Gaussian (the paper).
        normalize: rows of A have norm 1 (`row`), are orthonormal (`orthonormal`), or unscaled (`none`).
        layout: assignment of weights to segments, as for `MAPO`.
        redraw_every: rounds between new bases; 1 in the paper, 0 means one basis for all rounds, -1 a number
            for the length of the run.
        scale: `isometric` multiplies normalized rows by sqrt(e / p), and unscaled entries by 1 / sqrt(p), so that
            FedAvg's learning rate fits; `unit` leaves them (the paper).

    >>> MAPAX(k=4, p=2).sizes(10), MAPAX(segment=64, budget=1000).sizes(11274)
    (Sizes(k=4, p=2, e=3), Sizes(k=177, p=6, e=64))
    """

    k: int = 0
    p: int = 0
    segment: int = 0
    budget: int = 0

    def __post_init__(self) -> None:
        if self.k and self.segment:
            raise ConfigError(f"give either k or segment, not both (k = {self.k}, segment = {self.segment})")
        if self.p and self.budget:
            raise ConfigError(f"give either p or budget, not both (p = {self.p}, budget = {self.budget})")

    def sizes(self, d: int) -> Sizes:
        """Return k and p as given, or derived from segment and budget."""
        if self.segment and not 1 <= self.segment <= d:
            raise ConfigError(f"segment must be from 1 to the number of weights, {d:,}, not {self.segment}")
        k = self.k or -(-d // (self.segment or min(d, 1024)))
        return _sizes(d, k, self.p or max(1, round((self.budget or 128) / k)))


def _derived_size(d: int) -> int:
    """Return min(d, floor(2 d^(2/3))): the largest k with k^3 <= 8 d^2, in integers: the same on all machines.

    >>> [_derived_size(n) for n in (1, 27, 1000, 10**15)]
    [1, 18, 200, 20000000000]
    """
    k = int(2 * d ** (2 / 3))
    while k**3 > 8 * d**2:
        k -= 1
    while (k + 1) ** 3 <= 8 * d**2:
        k += 1
    return min(d, k)


def _sizes(d: int, k: int, p: int) -> Sizes:
    if not 1 <= k <= d:
        raise ConfigError(f"k must be from 1 to the number of weights, {d:,}, not {k}")
    e = -(-d // k)
    if not 1 <= p <= e:
        raise ConfigError(f"p must be from 1 to the length of a segment, {e:,}, not {p}")
    return Sizes(k, p, e)


def _rows(update: Tensor, full: int) -> Tensor:
    """Concatenate the rows of (..., k, e): the first `full` of them whole, the others without their last entry.

    >>> _rows(torch.arange(6).view(3, 2), 1).tolist()
    [0, 1, 2, 4]
    """
    first = update[..., :full, :].flatten(-2)
    if full == update.shape[-2]:
        return first
    return torch.cat((first, update[..., full:, :-1].flatten(-2)), -1)


def _draw(key: Key, p: int, e: int, space: _Projection) -> Tensor:
    """Draw A on the CPU: the same bits on all machines, except 'orthonormal', which depends on the LAPACK library."""
    if space.normalize == "none" or (space.entries == "sign" and space.normalize == "row"):
        a = key.signs(p, e) if space.entries == "sign" else key.normal(p, e)
        return a * float(torch.tensor(space._entry_scale(p, e), dtype=torch.float32))
    if space.normalize == "row":  # squares are summed as integers, so the norm is exact on every machine
        integers = key.normal_integers(p, e)
        scales = torch.tensor([1 / math.sqrt(row) for row in square_sums(integers)], dtype=torch.float32)
        a = integers.to(torch.float32) * scales[:, None]
    else:
        a = key.signs(p, e) if space.entries == "sign" else key.normal(p, e)
        a = torch.linalg.qr(a.double().T).Q.T.to(torch.float32).contiguous()
    return a * math.sqrt(e / p) if space.scale == "isometric" else a


@lru_cache(maxsize=8)
def _permutation(d: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the place of each weight in the permutation, and the weight at each place."""
    weight = _LAYOUT_KEY.fold(d).permutation(d)
    place = torch.empty_like(weight)
    place[weight] = torch.arange(d)
    return place.to(device), weight.to(device)


class _Permute(torch.autograd.Function):
    """A permutation whose gradient is a gather too: a scatter would be slower and, on a GPU, not deterministic."""

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
