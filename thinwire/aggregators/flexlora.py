"""The mean of the products of clients' adapters, cut to their rank by a singular value decomposition (FlexLoRA)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.aggregators.base import Aggregator
from thinwire.core.registry import register_part
from thinwire.core.tree import Tree, weighted_mean


@register_part("aggregator", "flexlora", paper="Bai et al., NeurIPS 2024")
class FlexLoRA(Aggregator):
    """The adapter of the given rank that is closest to the mean of the clients' products B_i A_i.

        sum_i p_i B_i A_i = U S V^T,    A = c V_r^T,    B = U_r S_r / c

    c^2 is the mean of |a|^2 over the rows a of all A_i: A keeps the size that the learning rate of clients suits. The
    product is never computed: with [p_1 B_1, p_2 B_2, ...] = Q_B R_B and [A_1^T, A_2^T, ...] = Q_A R_A, only R_B R_A^T
    is decomposed, whose sides are at most clients times rank. All of it is in float64. Ranks are in the order of the
    singular values, so the first ranks are the best adapter of that lower rank (`RankSlice`). Blocks `x/a` and `x/b`
    are a pair; all others are averaged.

    >>> one = {"w/a": torch.tensor([[1.0, 0.0]]), "w/b": torch.tensor([[2.0], [0.0]])}
    >>> other = {"w/a": torch.tensor([[0.0, 1.0]]), "w/b": torch.tensor([[0.0], [0.5]])}
    >>> mean = FlexLoRA().of([one, other], [1.0, 1.0])
    >>> (mean["w/b"] @ mean["w/a"]).round(decimals=5).tolist()
    [[1.0, 0.0], [0.0, 0.0]]

    Not `WeightedMean`, which averages A and B separately. The sum of weights of low rank has a higher one, so something
    is cut off unless clients agree; `LoRAResidual` and `LoRAStack` lose nothing and send more.
    """

    of_values = True

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the best adapters, and the weighted mean of the other blocks."""
        pairs = [name.removesuffix("/b") for name in trees[0] if name.endswith("/b") and f"{name[:-1]}a" in trees[0]]
        if not pairs:
            return weighted_mean(trees, weights)
        made = weighted_mean([dict(tree) for tree in trees], weights)
        total = math.fsum(weights)
        for name in pairs:
            b, a = ([tree[f"{name}/{side}"] for tree in trees] for side in "ba")
            made[f"{name}/b"], made[f"{name}/a"] = best_adapter(b, a, [weight / total for weight in weights])
        return made


def best_adapter(b: Sequence[Tensor], a: Sequence[Tensor], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return B and A of the best approximation of  sum_i p_i B_i A_i  by a product of the rank of the first client.

    >>> b, a = best_adapter([torch.eye(3, 2)] * 2, [torch.eye(2, 4)] * 2, [0.5, 0.5])
    >>> (b @ a).round(decimals=6).tolist() == (torch.eye(3, 2) @ torch.eye(2, 4)).tolist()
    True
    """
    rank, like = a[0].shape[0], a[0]
    left = torch.cat([share * one.double() for share, one in zip(shares, b, strict=True)], 1)
    right = torch.cat([one.double() for one in a])
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.mT)
    u, s, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    u, v = q_left @ u[:, :rank], v[:rank] @ q_right.mT
    sign = torch.where(v.gather(1, v.abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0)  # one of the two decompositions
    used = right[right.any(1)]  # without ranks that a client does not have
    size = math.sqrt(float(used.square().sum()) / len(used)) if len(used) else 1.0
    return (u * (s[:rank] * sign[:, 0] / size)).to(like.dtype), (v * sign * size).to(like.dtype)
