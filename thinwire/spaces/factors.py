"""Shared by factorized spaces: which weights are factorized, at which rank, and how factors make a weight.

A weight of two dimensions is a matrix (outputs, inputs), one of three to five dimensions a convolution (outputs,
inputs, kernel). All others (biases, norms, scalars) are dense: trained without factors, from the weights of the base.
Embedding tables are dense too; their shape is that of a matrix, so they are recognized by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import Tensor

from thinwire.core.spec import Block, Spec, matches, select
from thinwire.errors import ConfigError

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
