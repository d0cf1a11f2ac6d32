"""Gradient clipping by the global norm, as `torch.nn.utils.clip_grad_norm_` does it before a step."""

from __future__ import annotations

import math

import torch

from thinwire.core.tree import Tree, tmap
from thinwire.errors import ConfigError


def clip_by_global_norm(grads: Tree, clip_norm: float) -> Tree:
    """Scale a gradient down to an L2 norm over all its blocks, where it is longer.

        g <- g min(1, clip_norm / |g|)

    A gradient that is not finite, or whose norm overflows, becomes NaN, so that divergence is still found. A gradient
    that is not longer keeps its bits; with `clip_norm = inf` nothing is computed. Under `torch.func.vmap` the norm is
    that of each client.

    Args:
        grads: the gradient.
        clip_norm: the largest norm, in the unit of the gradient; above 0.

    >>> g = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    >>> [[round(x, 4) for x in block.tolist()] for block in clip_by_global_norm(g, 1.0).values()]
    [[0.6], [0.8]]
    >>> clip_by_global_norm(g, 10.0)["b"].tolist(), clip_by_global_norm(g, math.inf) is g
    ([4.0], True)
    """
    if clip_norm == math.inf or not grads:
        return grads
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(block) for block in grads.values()]))
    factor = (clip_norm / norm).clamp(max=1.0)  # |g| = 0: the quotient is inf, the factor 1
    factor = torch.where(norm.isinf(), math.nan, factor)  # not 0, which would hide it
    return tmap(lambda block: block * factor.to(block.dtype), grads)


def check_clip_norm(clip_norm: float) -> None:
    """Raise ConfigError unless the norm is above 0.

    >>> check_clip_norm(0.0)
    Traceback (most recent call last):
    thinwire.errors.ConfigError: clip_norm must be above 0, not 0.0; write clip_norm = 1.0, or inf for no clipping
    """
    if not clip_norm > 0:
        raise ConfigError(f"clip_norm must be above 0, not {clip_norm}; write clip_norm = 1.0, or inf for no clipping")
