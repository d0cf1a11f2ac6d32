"""FLASC, sparse communication of LoRA, and full fine-tuning in the same training setup.

Pruned adapters and models, and federated select: the sparse baselines of FLASC.

Masks are never sent: they are functions of the parameters that a client receives. The training setup is that of `full`.

LoRA for clients with different bandwidth: HetLoRA and the two baselines of FLASC.

The training setup is that of `full`.

Two-stage fine-tuning: weights first, then LoRA that starts from their low-rank approximation.

    at the switch:  W - W0 = U S V^T          B = U_r (S_r / s)^1/2,   A = (S_r / s)^1/2 V_r^T,   s = alpha / rank

The first stage trains only weights that the adapters of the second can represent; others would be reset at the switch.
The switch is after a quarter of the rounds that a task has by default. The training setup is that of `full`.
"""

from __future__ import annotations

from typing import Unpack

from thinwire.aggregators import Uniform
from thinwire.codecs import Masked, Raw, Threshold, TopK
from thinwire.core.registry import register
from thinwire.masks import NoMask, PruneMask, RandomMask, TopKMask
from thinwire.masks.topk import By
from thinwire.methods.fedavg import on, passes_on
from thinwire.methods.lora import (
    ATTENTION,
    LANGUAGE,
    LANGUAGE_PEFT,
    MODULES,
    PEFT,
    AdapterOptions,
    Selectors,
    by_rank,
    on_transformers,
)
from thinwire.optimizers import SGD, Adam
from thinwire.protocol.method import Budget, Method, Stage, Tier
from thinwire.spaces import Frozen, Full, LoRA, Route
from thinwire.spaces.lora import InitA
from thinwire.spaces.route import Rule

_with_adapters = passes_on(LoRA, "rank", "alpha", "target_modules", "modules_to_save")
_on_tasks = on_transformers(ATTENTION, LANGUAGE)
_PRETRAINED = {"download_density": 0.25, "lr": 0.01, "momentum": 0.9, "server_lr": 0.03}


@register("method", "flasc", paper="FLASC: Federated LoRA with Sparse Communication, 2024")
@on_transformers({**PEFT, **_PRETRAINED, "server_lr": 0.01, "from_start": False}, {**LANGUAGE_PEFT, **_PRETRAINED})
def flasc(
    rank: int = 8,
    alpha: float = 16.0,
    density: float = 0.25,
    download_density: float = 1.0,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    init_lora_weights: InitA = "isometric",
    lr: float = 0.5,
    momentum: float = 0.0,
    server_lr: float = 0.0,
    from_start: bool = True,
) -> Method:
    """FLASC: LoRA with top-k sparse downloads and uploads, and dense local training in between.

        client:  Q = topk(P)          Q -> Q' by local training of all values          upload topk(Q' - Q)
        server:  P <- Adam(P, mean of the uploads)          P stays dense

    The values with the largest magnitude are chosen among all trained parameters P, not layer by layer. The model that
    clients receive, topk(P), is evaluated.

    So it is for a pretrained transformer (`text-classification`, `causal-lm`, `instructions`). Any other model is
    trained from scratch, which sparse downloads, Adam and momentum would hold back: clients receive all of P and have
    no momentum, and the server adds the mean.

    Args:
        rank: rank of the adapters. The paper adapts attention matrices with rank 16.
        alpha: the adapter is scaled by alpha / rank.
        density: share of the values that clients send.
        download_density: share of the values that the server sends.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients.
        momentum: momentum of the clients.
        server_lr: learning rate of Adam at the server; 0 adds the mean of the uploads.
        from_start: P is the change from the initial values (`LoRA`), so that a value that is not sent stays there. If
            false, as in the paper, it is 0: too much for a model that is trained from scratch.

    Paper: FLASC: Federated LoRA with Sparse Communication, 2024.

    >>> flasc(rank=8, density=0.25).up.density
    0.25
    """
    space = LoRA(
        *(rank, alpha, target_modules, modules_to_save),
        init_lora_weights=init_lora_weights,
        dense="auto",
        from_start=from_start,
    )
    server = Adam(server_lr) if server_lr else SGD(1.0)
    method = full(lr, momentum=momentum).replace(space=space, up=TopK(density), server_opt=server)
    return method if download_density == 1 else method.replace(down=TopK(download_density), evaluate="client")


@register("method", "full", paper="compared with in FLASC, 2024")
def full(lr: float = 0.01, server_lr: float = 0.01, momentum: float = 0.9) -> Method:
    """Full fine-tuning with momentum SGD on clients and Adam at the server: the dense baseline of FLASC.

        w <- Adam(w, mean_i(w_i - w))          clients have equal weights and keep no state between rounds

    The other methods of this comparison use the same setup, with an adapter or a mask.

    Args:
        lr: learning rate of the clients.
        server_lr: learning rate of the server.
        momentum: momentum of the clients.

    Paper: baseline of FLASC: Federated LoRA with Sparse Communication, 2024.

    >>> full().download
    'full'
    """
    return Method(
        download="full",
        client_weight=Uniform(),
        client_opt=SGD(lr, momentum=momentum),
        server_opt=Adam(server_lr),
    )


def _pruned(mask: PruneMask) -> Method:
    """Send the non-zero values down with their positions, and up without."""
    return full().replace(mask=mask, down=Threshold(0.0), up=Masked())


def _each_round(keep: float, by: By = "tree") -> PruneMask:
    """Prune after every round, and nothing before the first."""
    return PruneMask(1.0, at=0, keep=keep, every=1, by=by)


@register("method", "sparse-adapter", paper="He et al., EMNLP 2022, as compared with by FLASC")
@_on_tasks
@_with_adapters
def sparse_adapter(density: float = 0.25, at: int = 1, by: By = "tree", **adapters: Unpack[AdapterOptions]) -> Method:
    """SparseAdapter: LoRA pruned once, to the values of largest magnitude, after the first rounds.

        M = the density |P| largest of |P| after round `at`          P <- P M,  gradients <- gradients M

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        density: share of the values that are left.
        at: rounds before pruning. B starts at zero, so pruning too early may leave no value of B.
        by: `tree`, or `block`: A and B then keep the same share, so the adapter stays alive (`PruneMask`).

    Paper: SparseAdapter: An Easy Approach for Improving the Parameter-Efficiency of Adapters (He et al., EMNLP 2022),
    as compared with by FLASC.

    >>> sparse_adapter(at=30).mask.at
    30
    """
    return _pruned(PruneMask(density, at=at, by=by)).replace(space=LoRA(**adapters))


@register("method", "adapter-lth", paper="Frankle and Carbin, ICLR 2019, as compared with by FLASC")
@_on_tasks
@_with_adapters
def adapter_lth(keep: float = 0.98, by: By = "tree", **adapters: Unpack[AdapterOptions]) -> Method:
    """Lottery-ticket pruning of LoRA: after every round a share of the values is pruned, without rewinding.

        round s trains keep^(s - 1) of the values

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        keep: share of the values that each pruning leaves: 0.97, 0.98, 0.99 for 100, 200, 400 rounds.
        by: `tree`, or `block`: A and B then keep the same share (`PruneMask`).

    Paper: The Lottery Ticket Hypothesis (Frankle and Carbin, ICLR 2019), as compared with by FLASC.

    >>> adapter_lth(keep=0.97).mask.keep
    0.97
    """
    return _pruned(_each_round(keep, by)).replace(space=LoRA(**adapters))


@register("method", "spdst", paper="as compared with by FLASC (modified)")
def spdst(density: float = 0.25, at: int = 1) -> Method:
    """SPDST: the whole model pruned once, to the weights of largest magnitude, after the first rounds.

        M = the density |w| largest of |w| after round `at`          w <- w M,  gradients <- gradients M

    Args:
        density: share of the weights that are left.
        at: rounds before pruning.

    Paper: baseline of FLASC: Federated LoRA with Sparse Communication, 2024 (a modified method).

    >>> spdst(density=0.5).mask.density
    0.5
    """
    return _pruned(PruneMask(density, at=at))


@register("method", "fedsparsify", paper="Stripelis et al., 2022, as compared with by FLASC")
def fedsparsify(keep: float = 0.98) -> Method:
    """FedSparsify-Global: the whole model, of which a share is pruned after every round.

        round s trains keep^(s - 1) of the weights

    Args:
        keep: share of the weights that each pruning leaves.

    Paper: Federated Progressive Sparsification (Stripelis et al., 2022), as compared with by FLASC.

    >>> fedsparsify(keep=0.99).mask.keep
    0.99
    """
    return _pruned(_each_round(keep))


@register("method", "federated-select", paper="Charles et al., 2022, as compared with by FLASC")
def federated_select(density: float = 0.25, by: By = "tree", at: int = 0) -> Method:
    """Federated Select: clients receive, train and send the largest weights; the server keeps a dense model.

        M = the density |w| largest of |w|, chosen in every round          clients train w M under M

    The B of an adapter starts at zero: among all values a small density selects none of it, and A then has no gradient.
    With `by = "block"` and `at = 1` adapters are trained.

    Args:
        density: share of the weights that are received, trained and sent.
        by: whether values are compared in the whole `tree` or within each `block`.
        at: rounds in which all values are trained before the first selection.

    Paper: Federated Select: A Primitive for Communication- and Memory-Efficient Federated Learning (Charles et al.,
    2022), as compared with by FLASC.

    >>> federated_select(density=0.5).mask.density
    0.5
    """
    return full().replace(mask=TopKMask(density, by, at), down=TopK(density, by), up=Masked())


@register("method", "hetlora", paper="Cho et al., EMNLP 2024, as compared with by FLASC")
@_on_tasks
@_with_adapters
def hetlora(ranks: tuple[int, ...] = (1, 2, 4), **adapters: Unpack[AdapterOptions]) -> Method:
    """HetLoRA: clients with less bandwidth train and send fewer ranks; missing ranks count as zero.

        a client of tier b trains the first r_b rows of A and columns of B          mean of the zero-padded updates

    The self-pruning of ranks is not implemented.

    Args:
        rank: rank of the server's adapters, and of the clients of the last tier.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        ranks: ranks of the other tiers. All tiers have equally many clients.

    Paper: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models (Cho et al., EMNLP 2024), as
    compared with by FLASC.

    >>> len(hetlora(ranks=(1, 4)).budget.tiers)
    3
    """
    return full().replace(space=LoRA(**adapters), budget=by_rank(ranks))


@register("method", "lowest-tier", paper="compared with in FLASC, 2024")
@on_transformers({"rank": 1, "alpha": 1.0, **MODULES}, {**LANGUAGE, "rank": 1, "alpha": 2.0})
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
@_on_tasks
@_with_adapters
def highest_tier(share: float = 0.25, **adapters: Unpack[AdapterOptions]) -> Method:
    """LoRA trained only by the clients with the most bandwidth, one in four; the others never take part.

        cohorts are drawn from one tier of the clients

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        share: share of the clients in that tier.

    Paper: baseline of FLASC: Federated LoRA with Sparse Communication, 2024.

    >>> [tier.share for tier in highest_tier().budget.tiers]
    [3.0, 1.0]
    """
    tiers = (Tier(share=(1 - share) / share, sampled=False), Tier(share=1.0))
    return full().replace(space=LoRA(**adapters), budget=Budget(tiers))


_FIRST_STAGE: Selectors = (*MODULES["target_modules"], *MODULES["modules_to_save"])
_in_two_stages = on("text-classification", at=25, first_stage=_FIRST_STAGE, **ATTENTION)


def _only(weights: Selectors) -> Route:
    """Train the selected weights directly and freeze the others."""
    return Route((Rule(weights, Full()), Rule(("*",), Frozen())))


@register("method", "flora", paper="compared with in FLASC, 2024")
@_in_two_stages
@_with_adapters
def flora(at: int = 15, first_stage: Selectors = ("*.weight",), **adapters: Unpack[AdapterOptions]) -> Method:
    """Full fine-tuning for a quarter of the rounds, then LoRA from the low-rank approximation of the update.

        rounds 1 to `at`: W          afterwards: W0 + (alpha / rank) B A

    Not the method that stacks the adapters of clients, which has the same name.

    Args:
        rank: rank of the adapters of the second stage.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly in the second stage.
        at: rounds of the first stage.
        first_stage: selectors of the weights that the first stage trains.

    Paper: baseline of FLASC: Federated LoRA with Sparse Communication, 2024.

    >>> flora(at=50).next_stage.at
    50
    """
    stage = Stage(at, LoRA(**adapters), server_opt=Adam(0.01))
    return full(server_lr=0.001).replace(space=_only(first_stage), next_stage=stage)


@register("method", "slora", paper="Babakniya et al., 2023, as compared with by FLASC")
@_in_two_stages
@_with_adapters
def slora(at: int = 15, first_stage: Selectors = ("*.weight",), **adapters: Unpack[AdapterOptions]) -> Method:
    """SLoRA: a random tenth of the weights for a quarter of the rounds, then LoRA from what they learned.

        rounds 1 to `at`: W0 + M * D, M random and fixed          afterwards: W0 + (alpha / rank) B A

    Both sides can compute M, so no positions are sent.

    Args:
        rank: rank of the adapters of the second stage.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly in the second stage.
        at: rounds of the first stage.
        first_stage: selectors of the weights of which the first stage trains a tenth.

    Paper: SLoRA: Federated Parameter Efficient Fine-Tuning of Language Models (Babakniya et al., 2023), as compared
    with by FLASC.

    >>> slora().mask.density
    0.1
    """
    method = flora(at, first_stage, **adapters)
    stage = Stage(at, LoRA(**adapters), mask=NoMask(), up=Raw(), down=Raw(), server_opt=Adam(0.01))
    return method.replace(mask=RandomMask(0.1), up=Masked(), down=Masked(), next_stage=stage)
