"""Shared by factorized spaces: which weights are factorized, at which rank, and how factors make a weight.

A weight of two dimensions is a matrix (outputs, inputs), one of three to five dimensions a convolution (outputs,
inputs, kernel). All others (biases, norms, scalars) are dense: trained without factors, from the weights of the base.
Embedding tables are dense too; their shape is that of a matrix, so they are recognized by name.

Initialization of factors: the standard deviation of each factor, and its random values.

All values are functions of the key, of the shapes and of exact sums, so server and clients compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.spec import Block, Spec, matches, select
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.kernels.projection import square_sums

# Names of embedding tables; only a selector other than "*" factorizes them.
EMBEDDINGS = ("*embed*", "word.*", "*.word.*", "position.*", "*.position.*", "*wte.*", "*wpe.*")


@dataclass(frozen=True)
class GammaRule:
    """Selectors of weights, and the gamma of the weights that they match."""

    on: tuple[str, ...]
    gamma: float


GammaRules: TypeAlias = tuple[GammaRule | tuple[str | tuple[str, ...], float], ...]


def gamma_rules(given: GammaRules, name: str) -> tuple[GammaRule, ...]:
    """Return rules with pairs `(selectors, gamma)` converted, so that equal spaces compare equal.

    Args:
        given: rules or pairs.
        name: name of the setting, for error messages.

    >>> gamma_rules((("conv1.*", 1.0),), "gammas")
    (GammaRule(on=('conv1.*',), gamma=1.0),)
    """
    rules = []
    for rule in given:
        if not isinstance(rule, GammaRule):
            if not isinstance(rule, tuple) or len(rule) != 2:
                raise ConfigError(f"{name} must hold pairs of selectors and a gamma, not {rule!r}")
            rule = GammaRule((rule[0],) if isinstance(rule[0], str) else tuple(rule[0]), rule[1])
        if not rule.on:
            raise ConfigError(f'{name}: a rule selects nothing; write for example on = ["conv1.*"]')
        check_fraction(**{f"{name}: gamma": rule.gamma})
        rules.append(rule)
    return tuple(rules)


def gamma_of(weight: str, rules: GammaRules, default: float) -> float:
    """Return the gamma of the first rule that matches a weight, or the default.

    >>> gamma_of("conv1.weight", gamma_rules((("conv1.*", 1.0),), "gammas"), 0.1)
    1.0
    """
    found = (rule for rule in rules if isinstance(rule, GammaRule) and matches(weight, rule.on))
    return next((rule.gamma for rule in found), default)


def check_gamma_rules(rules: GammaRules, chosen: Sequence[Block], name: str) -> None:
    """Raise a ConfigError if a selector of a rule matches none of the weights to factorize."""
    for rule in rules:
        if isinstance(rule, GammaRule):
            select([block.name for block in chosen], rule.on, what=f"{name}: selector")


def out_in_kernel(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the outputs, inputs and kernel positions (1 for a matrix) of a weight.

    >>> out_in_kernel((64, 3, 5, 5)), out_in_kernel((10, 64))
    ((64, 3, 25), (10, 64, 1))
    """
    return shape[0], shape[1], math.prod(shape[2:])


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a weight is a matrix, not a convolution."""
    return len(shape) == 2


def select_weights(spec: Spec, target: tuple[str, ...], dense: tuple[str, ...], space: str) -> tuple[Block, ...]:
    """Return the weights to factorize, in the order of the model.

    Args:
        spec: the weights of the model.
        target: selectors of the weights to factorize (`target_modules`); `*` leaves embeddings dense.
        dense: selectors of weights to leave dense (`modules_to_save`); they take precedence.
        space: name of the space, for error messages.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    >>> [block.name for block in select_weights(Spec.of(dict(model.named_parameters())), ("*",), ("1.*",), "Example")]
    ['0.weight']
    """
    candidates = tuple(block for block in spec if 2 <= len(block.shape) <= 5 and block.numel)
    if not candidates:
        raise ConfigError(f"{space} factorizes matrices and convolutions, but the weights are {_listed(spec.blocks)}")
    names = [block.name for block in candidates]
    chosen = set(select(names, target, what=f"{space}: target_modules"))
    explicit = [pattern for pattern in target if pattern != "*"]
    chosen -= {name for name in names if any_match(name, EMBEDDINGS) and not any_match(name, explicit)}
    if dense:
        chosen -= set(select(names, dense, what=f"{space}: modules_to_save"))
    if not chosen:
        raise ConfigError(
            f"{space}: target_modules = {list(target)} and modules_to_save = {list(dense)} leave no weight to factorize"
        )
    return tuple(block for block in candidates if block.name in chosen)


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


def check_rank(rank: int) -> None:
    """Raise a ConfigError unless the rank is an integer of 0 or more."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"rank must be an integer of 1 or more, or 0 for the rank by gamma, not {rank!r}")


def check_fraction(**given: float) -> None:
    """Raise a ConfigError unless each value is from 0 to 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(f"{name} must be a number from 0 to 1, not {value!r}")


def check_rank_fits(space: str, rank: int, block: Block) -> None:
    """Raise a ConfigError if the rank is above the smaller dimension of a weight."""
    most = min(block.shape[:2])
    if rank > most:
        raise ConfigError(
            f"{space}: rank = {rank} is above {most}, the largest rank of {block.name} {list(block.shape)}; "
            f'write a smaller rank, or modules_to_save = ["{block.name}"]'
        )


def choose_ranks(space: str, chosen: Sequence[Block], rank: int, rule: Callable[[Block], int]) -> dict[str, int]:
    """Return the rank of every factorized weight, by name; a weight that no rank makes smaller stays dense.

    Args:
        space: name of the space, for error messages.
        chosen: the weights to factorize.
        rank: one rank for all of them; 0 means by `rule`.
        rule: from a weight to its rank; 0 if every rank has more parameters than the weight.
    """
    if rank:
        for block in chosen:
            check_rank_fits(space, rank, block)
        return {block.name: rank for block in chosen}
    ranks = {block.name: rule(block) for block in chosen}
    if not any(ranks.values()):
        raise none_smaller(space, chosen)
    return {name: rank for name, rank in ranks.items() if rank}


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


def check_start(start: str) -> None:
    """Raise a ConfigError for an unknown initialization."""
    if start not in get_args(Start):
        raise ConfigError(f"start must be one of {', '.join(get_args(Start))}, not {start!r}")


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


def by_factor(start: Start, spec: Spec, shape: Sequence[int]) -> bool:
    """Return whether He's rule applies to each factor: if given, or for convolutions of a model with norms.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
    >>> spec = Spec.of(dict(net.named_parameters()))
    >>> [by_factor(start, spec, (8, 3, 3, 3)) for start in ("auto", "composed")], by_factor("auto", spec, (8, 3))
    ([True, False], False)
    """
    has_norms = any(len(block.shape) == 1 and block.name.endswith("weight") for block in spec)
    return start == "factor_he" or (start == "auto" and has_norms and not is_matrix(shape))


def factor_stds(shape: Sequence[int], rank: int) -> dict[str, float]:
    """Return the standard deviations of core, X and Y, each by He's rule; that of the weight is then far below He's."""
    o, i, k = out_in_kernel(shape)
    return {"t": math.sqrt(2 / (rank * k)), "x": math.sqrt(2 / o), "y": math.sqrt(2 / i)}


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


def matrix_factor_std(std: float, rank: int) -> float:
    """Return the standard deviation of both factors of X Y^T such that the product has `std`.

    >>> round(matrix_factor_std(0.5, 4) ** 4 * 4, 6)
    0.25
    """
    return float((std**2 / rank) ** (1 / 4))


def tucker_factor_std(std: float, rank: int) -> float:
    """Return the standard deviation of core, X and Y such that their product has `std`.

    >>> round(tucker_factor_std(0.5, 4) ** 6 * 16, 6)
    0.25
    """
    return float((std**2 / rank**2) ** (1 / 6))


def draw(key: Key, name: str, part: str, shape: Sequence[int], std: float, like: Tensor) -> Tensor:
    """Draw normal values for one factor of one weight; the same bits from the same key."""
    if like.is_meta:  # only the shapes are needed
        return like.new_empty(tuple(shape))
    return (key.fold(name, part).normal(*shape, device=like.device) * std).to(like.dtype)


def draw_exact(key: Key, name: str, part: str, shape: Sequence[int], std: float, like: Tensor) -> Tensor:
    """Draw normal values scaled to a root mean square of exactly `std`; that of a small factor would vary by chance.

    >>> import torch
    >>> float(draw_exact(Key(0), "w", "x", (8, 2), 0.5, torch.zeros(())).square().mean())
    0.25
    """
    if like.is_meta:
        return like.new_empty(tuple(shape))
    integers = key.fold(name, part).normal_integers(*shape, device=like.device)
    squares = square_sums(integers.reshape(1, -1))[0]
    return (integers.to(torch.float32) * (std / math.sqrt(squares / integers.numel()))).to(like.dtype)
