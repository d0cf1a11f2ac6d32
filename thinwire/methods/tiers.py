"""LoRA for clients with different bandwidth: HetLoRA and the two baselines of FLASC.

The training setup is that of `full`.
"""

from __future__ import annotations

from thinwire.codecs import RankSlice, Raw
from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.methods.flasc import full
from thinwire.methods.lora import ATTENTION, LANGUAGE, MODULES, Selectors
from thinwire.protocol.budget import Budget, Tier
from thinwire.protocol.method import Method
from thinwire.spaces import LoRA


@register("method", "hetlora", paper="Cho et al., EMNLP 2024, as compared with by FLASC")
@on("text-classification", **ATTENTION)
@on("causal-lm", **LANGUAGE)
@on("instructions", **LANGUAGE)
def hetlora(
    rank: int = 8,
    alpha: float = 16.0,
    ranks: tuple[int, ...] = (1, 2, 4),
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
) -> Method:
    """HetLoRA: clients with less bandwidth train and send fewer ranks; missing ranks count as zero.

        a client of tier b trains the first r_b rows of A and columns of B          mean of the zero-padded updates

    The self-pruning of ranks is not implemented.

    Args:
        rank: rank of the server's adapters, and of the clients of the last tier.
        alpha: the adapter is scaled by alpha / rank.
        ranks: ranks of the other tiers. All tiers have equally many clients.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.

    Paper: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models (Cho et al., EMNLP 2024), as
    compared with by FLASC.

    >>> len(hetlora(ranks=(1, 4)).budget.tiers)
    3
    """
    smaller = tuple(Tier(up=RankSlice(r), down=RankSlice(r)) for r in ranks)
    budget = Budget((*smaller, Tier(up=Raw(), down=Raw())))
    return full().replace(space=LoRA(rank, alpha, target_modules, modules_to_save), budget=budget)


@register("method", "lowest-tier", paper="compared with in FLASC, 2024")
@on("text-classification", rank=1, alpha=1.0, **MODULES)
@on("causal-lm", **{**LANGUAGE, "rank": 1, "alpha": 2.0})
@on("instructions", **{**LANGUAGE, "rank": 1, "alpha": 2.0})
def lowest_tier(
    rank: int = 1,
    alpha: float = 2.0,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
) -> Method:
    """LoRA of rank 1 on all clients, the rank of the clients with the least bandwidth.

        W = W0 + (alpha / rank) B A          alpha / rank is that of the other methods

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.

    Paper: baseline of FLASC: Federated LoRA with Sparse Communication, 2024.

    >>> lowest_tier().space.rank
    1
    """
    return full().replace(space=LoRA(rank, alpha, target_modules, modules_to_save))


@register("method", "highest-tier", paper="compared with in FLASC, 2024")
@on("text-classification", **ATTENTION)
@on("causal-lm", **LANGUAGE)
@on("instructions", **LANGUAGE)
def highest_tier(
    rank: int = 8,
    alpha: float = 16.0,
    share: float = 0.25,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
) -> Method:
    """LoRA trained only by the clients with the most bandwidth, one in four; the others never take part.

        cohorts are drawn from one tier of the clients

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        share: share of the clients in that tier.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.

    Paper: baseline of FLASC: Federated LoRA with Sparse Communication, 2024.

    >>> [tier.share for tier in highest_tier().budget.tiers]
    [3.0, 1.0]
    """
    tiers = (Tier(share=(1 - share) / share, sampled=False), Tier(share=1.0))
    return full().replace(space=LoRA(rank, alpha, target_modules, modules_to_save), budget=Budget(tiers))
