"""Shared by factorized spaces: which weights are factorized, at which rank, and how factors make a weight.

A weight of two dimensions is a matrix (outputs, inputs), one of three to five dimensions a convolution (outputs,
inputs, kernel). All others (biases, norms, scalars) are dense: trained without factors, from the weights of the base.
Embedding tables are dense too; their shape is that of a matrix, so they are recognized by name.

Initialization of factors: the standard deviation of each factor, and its random values.

All values are functions of the key, of the shapes and of exact sums, so server and clients compute the same bits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.names import as_rules, matches, select
from thinwire.core.text import Probability, check_settings
from thinwire.core.tree import Block, Spec, Tree
from thinwire.errors import ConfigError
from thinwire.kernels.projection import square_sums
from thinwire.spaces.base import Space

# Names of embedding tables; only a selector other than "*" factorizes them.
EMBEDDINGS = ("*embed*", "word.*", "*.word.*", "position.*", "*.position.*", "*wte.*", "*wpe.*")


@dataclass(frozen=True)
class GammaRule:
    """Selectors of weights, and the gamma of the weights that they match."""

    on: tuple[str, ...]
    gamma: Probability

    def __post_init__(self) -> None:
        check_settings(self)


GammaRules = tuple[GammaRule | tuple[str | tuple[str, ...], float], ...]


class FactorizedSpace(Space):
    """A space whose weights are products of factors, `weight/part`; all other weights are dense coordinates.

    Subclasses have the fields `target_modules`, selectors of weights to factorize, and `modules_to_save`, selectors of
    weights to leave dense.
    """

    target_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...]

    @abstractmethod
    def ranks(self, spec: Spec) -> dict[str, int]:
        """Return the rank of every factorized weight, by name."""

    @abstractmethod
    def factors(self, name: str, base: Tree, rank: int, key: Key) -> Tree:
        """Return random factors of a weight."""

    @abstractmethod
    def product(self, name: str, base: Tree, coords: Tree) -> Tensor:
        """Return a weight from its factors."""

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError unless at least one weight becomes smaller."""
        self.ranks(spec)

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return random factors, zeros for the biases of their layers, and other dense weights from the base.

        The biases of a layer whose weights start small, as by `factor_he`, would drown what it computes of its inputs.
        """
        ranks = self.ranks(Spec.of(base))
        zeros = {"bias".join(name.rsplit("weight", 1)) for name in ranks}
        coords: Tree = {}
        for name, weight in base.items():
            dense = torch.zeros_like(weight) if name in zeros else weight
            coords |= self.factors(name, base, ranks[name], key) if name in ranks else {name: dense}
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return products of factors, and dense weights."""
        return {name: coords[name] if name in coords else self.product(name, base, coords) for name in base}

    def selected(self, spec: Spec) -> tuple[Block, ...]:
        """Return the weights to factorize, in the order of the model.

        >>> from thinwire.spaces import LowRank
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
        >>> space = LowRank(modules_to_save=("1.*",))
        >>> [block.name for block in space.selected(Spec.of(dict(model.named_parameters())))]
        ['0.weight']
        """
        space, target, dense = type(self).__name__, self.target_modules, self.modules_to_save
        candidates = tuple(block for block in spec if 2 <= len(block.shape) <= 5 and block.numel)
        if not candidates:
            raise ConfigError(
                f"{space} factorizes matrices and convolutions, but the weights are {_listed(spec.blocks)}"
            )
        names = [block.name for block in candidates]
        chosen = set(select(names, target, what=f"{space}: target_modules"))
        explicit = [pattern for pattern in target if pattern != "*"]
        chosen -= {name for name in names if any_match(name, EMBEDDINGS) and not any_match(name, explicit)}
        if dense:
            chosen -= set(select(names, dense, what=f"{space}: modules_to_save"))
        if not chosen:
            raise ConfigError(
                f"{space}: target_modules = {list(target)} and modules_to_save = {list(dense)} leave no weight to "
                "factorize"
            )
        return tuple(block for block in candidates if block.name in chosen)

    def _normalize_rules(self, field: str) -> None:
        """Convert the pairs of a field of gamma rules to rules, so that equal spaces compare equal."""
        object.__setattr__(self, field, as_rules(GammaRule, getattr(self, field), field))


def gammas_of(blocks: Sequence[Block], rules: GammaRules, default: float, what: str) -> dict[str, float]:
    """Return the gamma of each weight: that of the first rule that matches it, or the default.

    >>> gammas_of((Block("conv1.weight", (2, 2)), Block("fc", (2, 2))), (GammaRule(("conv1.*",), 1.0),), 0.1, "gammas")
    {'conv1.weight': 1.0, 'fc': 0.1}
    """
    known = cast("tuple[GammaRule, ...]", rules)
    names = [block.name for block in blocks]
    for rule in known:
        select(names, rule.on, what=f"{what}: selector")
    return {name: next((rule.gamma for rule in known if matches(name, rule.on)), default) for name in names}


def out_in_kernel(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the outputs, inputs and kernel positions (1 for a matrix) of a weight.

    >>> out_in_kernel((64, 3, 5, 5)), out_in_kernel((10, 64))
    ((64, 3, 25), (10, 64, 1))
    """
    return shape[0], shape[1], math.prod(shape[2:])


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a weight is a matrix, not a convolution."""
    return len(shape) == 2


def tucker(core: Tensor, x: Tensor, y: Tensor, shape: Sequence[int]) -> Tensor:
    """Compute a kernel from a small core and two matrices (Tucker-2).

        W[o, i, k] = sum_ab core[a, b, k] x[o, a] y[i, b]

    The core is multiplied by `y` first, which is cheap; the rest is one large matrix product whose result already has
    the memory layout of the kernel.

    Args:
        core: (a, b, *kernel).
        x: (outputs, a).
        y: (inputs, b).
        shape: (outputs, inputs, *kernel).
    """
    a, b = core.shape[:2]
    half = (y @ core.reshape(a, b, -1)).reshape(a, -1)  # (a, inputs * kernel)
    return (x @ half).reshape(tuple(shape))


def choose_ranks(space: str, chosen: Sequence[Block], rank: int, derived: dict[str, int]) -> dict[str, int]:
    """Return the rank of every factorized weight, by name; a weight that no rank makes smaller stays dense.

    Args:
        space: name of the space, for error messages.
        chosen: the weights to factorize.
        rank: one rank for all of them; 0 means `derived`.
        derived: the rank of each weight by its gamma; 0 if every rank has more parameters than the weight.
    """
    if rank:
        for block in chosen:
            if rank > (most := min(block.shape[:2])):
                raise ConfigError(
                    f"{space}: rank = {rank} is above {most}, the largest rank of {block.name} {list(block.shape)}; "
                    f'write a smaller rank, or modules_to_save = ["{block.name}"]'
                )
        return {block.name: rank for block in chosen}
    ranks = {block.name: derived[block.name] for block in chosen if derived[block.name]}
    if not ranks:
        raise none_smaller(space, chosen)
    return ranks


def none_smaller(space: str, blocks: Sequence[Block]) -> ConfigError:
    """Return the error for a space with more parameters than the model in every weight."""
    return ConfigError(f"{space} makes none of these weights smaller: {_listed(blocks)}; take the space 'full'")


def any_match(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of some shell-style patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(blocks: Sequence[Block]) -> str:
    shown = ", ".join(f"{block.name} {list(block.shape)}" for block in blocks[:6])
    return shown + (", ..." if len(blocks) > 6 else "")


# Names of the gates of recurrent layers in torch.
GATES = ("*weight_ih*", "*weight_hh*")

Start = Literal["auto", "factor_he", "composed_he", "composed"]


def he_std(shape: Sequence[int]) -> float:
    """Return the standard deviation that preserves the scale of signals through ReLUs (He et al., 2015).

        sqrt(2 / fan_in)

    >>> he_std((10, 50))
    0.2
    """
    _, i, k = out_in_kernel(shape)
    return math.sqrt(2 / (i * k))


def dense_std(name: str, base: Tree) -> float:
    """Return the standard deviation with which torch initializes a layer, from shapes alone.

        1 / sqrt(3 fan_in),    for gates of recurrent layers  1 / sqrt(3 units)

    >>> import torch
    >>> layer = torch.nn.GRU(12, 3)
    >>> dense_std("weight_ih_l0", dict(layer.named_parameters()))
    0.3333333333333333
    """
    states = base.get(name.replace("weight_ih", "weight_hh")) if any_match(name, GATES) else None
    inputs = math.prod((base[name] if states is None else states).shape[1:])
    return 1 / math.sqrt(3 * inputs)


def by_factor(start: Start, name: str, base: Tree) -> bool:
    """Return whether He's rule applies to each factor of a weight: if given, or for convolutions of a model with norms.

    >>> import torch
    >>> base = dict(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8)).named_parameters())
    >>> [by_factor(start, "0.weight", base) for start in ("auto", "composed")]
    [True, False]
    """
    if start != "auto" or is_matrix(base[name].shape):
        return start == "factor_he"
    return any(block.dim() == 1 and other.endswith("weight") for other, block in base.items())


def initial_std(name: str, weight: Tensor, start: Start = "auto") -> float:
    """Return the initial standard deviation of a factorized weight.

    `composed`: that of the dense weight. `composed_he`: He's, for layers with ReLUs. `auto`: the first for the gates of
    recurrent layers, to which He's rule does not apply, the second for all others. If the dense weight is constant,
    such as zeros, it is He's. Squares are summed as integers, so server and clients get the same bits.

    >>> import torch
    >>> weight = torch.nn.init.normal_(torch.empty(100, 200), std=0.03)
    >>> [round(initial_std(name, weight), 2) for name in ("fc.weight", "lstm.weight_ih_l0")]
    [0.1, 0.03]
    >>> initial_std("w", weight * 0)
    0.1
    """
    of_dense = start == "composed" or (start == "auto" and any_match(name, GATES))
    if not of_dense or weight.is_meta:
        return he_std(weight.shape)
    flat = weight.detach().reshape(-1).double().cpu()
    largest = float(flat.abs().max())
    if not 0 < largest < math.inf:
        return he_std(weight.shape)
    unit = 2.0 ** (math.frexp(largest)[1] - 20)  # values become integers of at most 20 bits
    integers = (flat / unit).round().to(torch.int64)
    mean = int(integers.sum()) / len(integers)
    variance = square_sums(integers[None])[0] / len(integers) - mean**2
    return unit * math.sqrt(variance) if variance > 0.25 else he_std(weight.shape)


def std_before_tanh(std: float, rank: int, core: bool) -> float:
    """Return the standard deviation s of two low-rank weights W1, W2 such that tanh(W1) * tanh(W2) has `std`.

        std = E tanh(w)^2,    w = s sqrt(u) z,    z normal;   u = |x|^2 / rank, for kernels times |y|^2 / rank

    because entries of X Y^T are normal given the rows of X, whose lengths vary. Solved by bisection.

    >>> round(std_before_tanh(0.01, 16, core=False) ** 2, 3), round(std_before_tanh(0.3, 16, core=False) ** 2, 2)
    (0.01, 0.62)
    """
    std = min(std, 0.9)  # tanh stays below 1
    sizes, shares = _chi_squares(rank)
    if core:
        sizes, shares = np.outer(sizes, sizes).reshape(-1), np.outer(shares, shares).reshape(-1)
    z = np.linspace(-8, 8, 257)
    density = np.exp(-(z**2) / 2)
    roots, density = np.sqrt(sizes)[:, None] * z, density / density.sum()
    low, high = 0.0, 64.0
    for _ in range(48):
        s = (low + high) / 2
        found = float(shares @ (np.tanh(s * roots) ** 2 @ density))
        low, high = (s, high) if found < std else (low, s)
    return float(f"{low:.7g}")  # the same bits on machines whose tanh differs in the last one


def _chi_squares(rank: int, nodes: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of Gauss quadrature for |x|^2 / rank of normal x, exact up to degree 23."""
    n, alpha = np.arange(nodes), rank / 2 - 1
    off_diagonal = np.sqrt(n[1:] * (n[1:] + alpha))
    sizes, vectors = np.linalg.eigh(np.diag(2 * n + alpha + 1) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return sizes * 2 / rank, vectors[0] ** 2


def factor_std(std: float, rank: int, core: bool) -> float:
    """Return the standard deviation of both factors of X Y^T, or with a core of all three, whose product has `std`.

    >>> round(factor_std(0.5, 4, core=False) ** 4 * 4, 6), round(factor_std(0.5, 4, core=True) ** 6 * 16, 6)
    (0.25, 0.25)
    """
    return float((std**2 / rank**2) ** (1 / 6) if core else (std**2 / rank) ** (1 / 4))


def draw_factors(key: Key, name: str, weight: Tensor, rank: int, std: float | None, number: str = "") -> Tree:
    """Draw X and Y of a weight, and the core T of a convolution, as coordinates `name/x`, `name/y` and `name/t`.

    Args:
        key: the source of randomness.
        name: the name of the weight.
        weight: the weight.
        rank: the rank.
        std: the standard deviation of their product; None for He's rule for each, with which it is far below He's.
        number: is appended to the names of the factors.
    """
    o, i, k = out_in_kernel(weight.shape)
    shapes: dict[str, tuple[int, ...]] = {"x": (o, rank), "y": (i, rank)}
    if core := not is_matrix(weight.shape):
        shapes = {"t": (rank, rank, *weight.shape[2:]), **shapes}
    stds = {"t": math.sqrt(2 / (rank * k)), "x": math.sqrt(2 / o), "y": math.sqrt(2 / i)}
    if std is not None:
        stds = dict.fromkeys("txy", factor_std(std, rank, core))
    return {
        f"{name}/{part}{number}": draw(key, name, f"{part}{number}", shape, stds[part], weight, exact=std is not None)
        for part, shape in shapes.items()
    }


def product_of(name: str, weight: Tensor, coords: Tree, number: str = "") -> Tensor:
    """Return X Y^T, or T x1 X x2 Y, from the coordinates of `draw_factors`."""
    x, y = coords[f"{name}/x{number}"], coords[f"{name}/y{number}"]
    return x @ y.T if is_matrix(weight.shape) else tucker(coords[f"{name}/t{number}"], x, y, weight.shape)


def draw(key: Key, name: str, part: str, shape: Sequence[int], std: float, like: Tensor, exact: bool = False) -> Tensor:
    """Draw normal values for one factor of one weight; the same bits from the same key.

    With `exact` they are scaled to a root mean square of exactly `std`; that of a small factor would vary by chance.

    >>> import torch
    >>> float(draw(Key(0), "w", "x", (8, 2), 0.5, torch.zeros(()), exact=True).square().mean())
    0.25
    """
    if like.is_meta:  # only the shapes are needed
        return like.new_empty(tuple(shape))
    own = key.fold(name, part)
    if not exact:
        return (own.normal(*shape, device=like.device) * std).to(like.dtype)
    integers = own.normal_integers(*shape, device=like.device)
    squares = square_sums(integers.reshape(1, -1))[0]
    return (integers.to(torch.float32) * (std / math.sqrt(squares / integers.numel()))).to(like.dtype)
