"""What all factorised spaces share: which weights they take apart, how factors make a weight, and how they start.

A weight of two dimensions is a matrix (outputs, inputs), one of three to five a convolution (outputs, inputs, kernel).
Everything else (biases, norms, scalars) is dense: trained as it is, from where the base stands. So are tables that are
looked up rather than multiplied, which no shape gives away: they go by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.spec import Block, Spec, select
from thinwire.errors import ConfigError
from thinwire.kernels.projection import square_sums

# What embeddings are called; a selector other than "*" takes them apart all the same.
TABLES = ("*embed*", "word.*", "*.word.*", "position.*", "*.position.*", "*wte.*", "*wpe.*")

# What the gates of recurrent layers are called in torch.
GATES = ("*weight_ih*", "*weight_hh*")


def sides(shape: Sequence[int]) -> tuple[int, int, int]:
    """Outputs, inputs and kernel positions (1 for a matrix) of a weight.

    >>> sides((64, 3, 5, 5)), sides((10, 64))
    ((64, 3, 25), (10, 64, 1))
    """
    return shape[0], shape[1], math.prod(shape[2:])


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix, not a convolution."""
    return len(shape) == 2


def pick(spec: Spec, layers: tuple[str, ...], dense: tuple[str, ...], who: str) -> tuple[Block, ...]:
    """The weights that are to be taken apart, in the model's order.

    Args:
        spec: the weights of the model.
        layers: selectors of those to take apart; `*` leaves embeddings alone.
        dense: selectors of those to leave alone, after that.
        who: the space, for error messages.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    >>> [block.name for block in pick(Spec.of(dict(model.named_parameters())), ("*",), ("1.*",), "Example")]
    ['0.weight']
    """
    can = tuple(block for block in spec if 2 <= len(block.shape) <= 5 and block.numel)
    if not can:
        raise ConfigError(f"{who} takes apart matrices and convolutions, but the weights are {_listed(spec.blocks)}")
    names = [block.name for block in can]
    chosen = set(select(names, layers, what=f"{who}: layers"))
    meant = [pattern for pattern in layers if pattern != "*"]
    chosen -= {name for name in names if _matches(name, TABLES) and not _matches(name, meant)}
    if dense:
        chosen -= set(select(names, dense, what=f"{who}: dense"))
    if not chosen:
        raise ConfigError(f"{who}: layers = {list(layers)} and dense = {list(dense)} leave no weight to take apart")
    return tuple(block for block in can if block.name in chosen)


def tucker(core: Tensor, x: Tensor, y: Tensor, shape: Sequence[int]) -> Tensor:
    """A kernel from a small core and two matrices.

        W[o, i, k] = sum_ab core[a, b, k] x[o, a] y[i, b]

    The core meets `y` first, which costs little; what is left is one large matrix product whose result already lies
    in memory as the kernel does.

    Args:
        core: (a, b, *kernel).
        x: (outputs, a).
        y: (inputs, b).
        shape: (outputs, inputs, *kernel).
    """
    a, b = core.shape[:2]
    half = (y @ core.reshape(a, b, -1)).reshape(a, -1)  # (a, inputs * kernel)
    return (x @ half).reshape(tuple(shape))


def he(shape: Sequence[int]) -> float:
    """The standard deviation that keeps signals at their size through ReLUs: sqrt(2 / fan_in) (He et al., 2015)."""
    _, i, k = sides(shape)
    return math.sqrt(2 / (i * k))


Start = Literal["auto", "factor_he", "composed_he", "composed"]


def check_start(start: str) -> None:
    """Refuse a start that does not exist."""
    if start not in get_args(Start):
        raise ConfigError(f"start must be one of {', '.join(get_args(Start))}, not {start!r}")


def by_factor(start: Start, spec: Spec, shape: Sequence[int]) -> bool:
    """Whether each factor starts at a size of its own: if asked for, or for convolutions of a model with norms.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
    >>> spec = Spec.of(dict(net.named_parameters()))
    >>> [by_factor(start, spec, (8, 3, 3, 3)) for start in ("auto", "composed")], by_factor("auto", spec, (8, 3))
    ([True, False], False)
    """
    normed = any(len(block.shape) == 1 and block.name.endswith("weight") for block in spec)
    return start == "factor_he" or (start == "auto" and normed and not is_matrix(shape))


def factor_stds(shape: Sequence[int], rank: int) -> dict[str, float]:
    """The standard deviations of core, X and Y, each by He's rule for itself: the weight then is far below its own."""
    o, i, k = sides(shape)
    return {"t": math.sqrt(2 / (rank * k)), "x": math.sqrt(2 / o), "y": math.sqrt(2 / i)}


def first_std(name: str, weight: Tensor, start: Start = "auto") -> float:
    """The standard deviation at which a weight that is made of factors starts.

    `composed`: that of the dense weight. `composed_he`: He's, which is for layers with ReLUs. `auto`: the first for the
    gates of recurrent layers, to which He's rule does not apply, the second for all others. Where the dense weight has
    none, such as zeros, it is He's. Squares are summed as whole numbers, so that both ends find the same bits.

    >>> import torch
    >>> weight = torch.nn.init.normal_(torch.empty(100, 200), std=0.03)
    >>> [round(first_std(name, weight), 2) for name in ("fc.weight", "lstm.weight_ih_l0")], first_std("w", weight * 0)
    ([0.1, 0.03], 0.1)
    """
    own = start == "composed" or (start == "auto" and _matches(name, GATES))
    if not own or weight.is_meta:
        return he(weight.shape)
    flat = weight.detach().reshape(-1).double().cpu()
    largest = float(flat.abs().max())
    if not 0 < largest < math.inf:
        return he(weight.shape)
    unit = 2.0 ** (math.frexp(largest)[1] - 20)  # numbers become whole ones of at most 20 bits
    whole = (flat / unit).round().to(torch.int64)
    mean = int(whole.sum()) / len(whole)
    variance = square_sums(whole[None])[0] / len(whole) - mean**2
    return unit * math.sqrt(variance) if variance > 0.25 else he(weight.shape)


def under_tanh(std: float, rank: int, core: bool) -> float:
    """The standard deviation s of two low-rank weights W1, W2 such that tanh(W1) * tanh(W2) has `std`.

        std = E tanh(w)^2,    w = s sqrt(u) z,    z normal;   u = |x|^2 / rank, for kernels times |y|^2 / rank

    since numbers of X Y^T are normal for given rows of X, whose lengths differ. Solved by halving.

    >>> round(under_tanh(0.01, 16, core=False) ** 2, 3), round(under_tanh(0.3, 16, core=False) ** 2, 2)
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
    """Sizes and shares that stand for |x|^2 / rank of normal x: Gauss's rule, exact for polynomials up to 23."""
    n, alpha = np.arange(nodes), rank / 2 - 1
    beside = np.sqrt(n[1:] * (n[1:] + alpha))
    sizes, vectors = np.linalg.eigh(np.diag(2 * n + alpha + 1) + np.diag(beside, 1) + np.diag(beside, -1))
    return sizes * 2 / rank, vectors[0] ** 2


def share_matrix(std: float, rank: int) -> float:
    """The standard deviation of both factors of X Y^T whose product has `std`.

    >>> round(share_matrix(0.5, 4) ** 4 * 4, 6)
    0.25
    """
    return float((std**2 / rank) ** (1 / 4))


def share_tucker(std: float, rank: int) -> float:
    """The standard deviation of core, X and Y whose product has `std`.

    >>> round(share_tucker(0.5, 4) ** 6 * 16, 6)
    0.25
    """
    return float((std**2 / rank**2) ** (1 / 6))


def draw(key: Key, name: str, part: str, shape: Sequence[int], std: float, like: Tensor) -> Tensor:
    """Normal numbers for one factor of one weight: the same bits wherever the key is known."""
    if like.is_meta:  # only the shapes are asked for
        return like.new_empty(tuple(shape))
    return (key.fold(name, part).normal(*shape, device=like.device) * std).to(like.dtype)


def draw_sized(key: Key, name: str, part: str, shape: Sequence[int], std: float, like: Tensor) -> Tensor:
    """The same numbers scaled so that their root mean square is `std`: small factors would be off by chance.

    >>> import torch
    >>> float(draw_sized(Key(0), "w", "x", (8, 2), 0.5, torch.zeros(())).square().mean())
    0.25
    """
    if like.is_meta:
        return like.new_empty(tuple(shape))
    whole = key.fold(name, part).normal_integers(*shape, device=like.device)
    squares = square_sums(whole.reshape(1, -1))[0]
    return (whole.to(torch.float32) * (std / math.sqrt(squares / whole.numel()))).to(like.dtype)


def check_rank(rank: int) -> None:
    """Refuse a rank that is no whole number from 0 on."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"rank must be a whole number from 1 on, or 0 for the rule, not {rank!r}")


def check_share(least: float = 0.0, **given: float) -> None:
    """Refuse a number outside of `least` to 1."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1:
            raise ConfigError(f"{name} must be a number from {least:g} to 1, not {value!r}")


def check_rank_fits(who: str, rank: int, block: Block) -> None:
    """Refuse a rank above the smaller side of a weight."""
    most = min(block.shape[:2])
    if rank > most:
        raise ConfigError(
            f"{who}: rank = {rank} is above the {most} that {block.name} {list(block.shape)} can have; "
            f'take a smaller rank, or dense = ["{block.name}"]'
        )


def choose_ranks(
    who: str, picked: Sequence[Block], rank: int, rule: Callable[[tuple[int, ...]], int]
) -> dict[str, int]:
    """The rank of every weight that is taken apart, by name; a weight that no rank makes smaller stays dense.

    Args:
        who: the space, for error messages.
        picked: the weights to take apart.
        rank: one rank for all of them; 0 means that the rule decides.
        rule: from a weight's shape to its rank, 0 where any would be larger than the weight.
    """
    if rank:
        for block in picked:
            check_rank_fits(who, rank, block)
        return {block.name: rank for block in picked}
    ranks = {block.name: rule(block.shape) for block in picked}
    if not any(ranks.values()):
        raise none_smaller(who, picked)
    return {name: chosen for name, chosen in ranks.items() if chosen}


def none_smaller(who: str, blocks: Sequence[Block]) -> ConfigError:
    """The error where a space would be larger than the model in every weight."""
    return ConfigError(f"{who} makes none of these weights smaller: {_listed(blocks)}; take the full space")


def _listed(blocks: Sequence[Block]) -> str:
    shown = ", ".join(f"{block.name} {list(block.shape)}" for block in blocks[:6])
    return shown + (", ..." if len(blocks) > 6 else "")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
