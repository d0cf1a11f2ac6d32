"""Federated LoRA whose aggregate is the mean of the clients' adapters, not the product of mean factors.

    wanted:  sum_i p_i B_i A_i          `lora` makes  (sum_i p_i B_i) (sum_i p_i A_i)

`ffa-lora` is exact, too: its A is frozen.
"""

from __future__ import annotations

from thinwire.aggregators import FlexLoRA
from thinwire.codecs import RankSlice, Raw
from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.methods.lora import LANGUAGE_PEFT, MODULES, PEFT, Selectors, lora
from thinwire.optimizers import SGD
from thinwire.protocol.budget import Budget, Tier
from thinwire.protocol.method import Method
from thinwire.spaces import LoRAResidual, LoRASB, LoRAStack
from thinwire.spaces.lora import InitA


@register("method", "flexlora", paper="Bai et al., NeurIPS 2024")
@on("text-classification", **PEFT, lr=0.1)
@on("causal-lm", **LANGUAGE_PEFT)
@on("instructions", **LANGUAGE_PEFT)
def flexlora(
    rank: int = 8,
    alpha: float = 8.0,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    init_lora_weights: InitA = "isometric",
    lr: float = 0.0,
    ranks: tuple[int, ...] = (),
) -> Method:
    """FlexLoRA: LoRA whose server averages the products B_i A_i and cuts the mean to the rank of the adapters.

        B A = the best approximation of  sum_i p_i B_i A_i  by a product of that rank

    Differs from the paper: A keeps the size that it has on clients, and the singular values go to B.

    Args:
        rank: rank of the adapters, and of the clients of the last tier.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.
        ranks: ranks of further tiers of clients, which receive, train and send the first ranks only. All tiers have
            equally many clients. Empty: all clients have `rank`.

    Paper: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources (Bai et al.,
    NeurIPS 2024).

    >>> flexlora(ranks=(2, 4)).upload
    'weights'
    """
    method = lora(rank, alpha, target_modules, modules_to_save, init_lora_weights, lr).replace(aggregator=FlexLoRA())
    if not ranks:
        return method
    tiers = (*(Tier(up=RankSlice(r), down=RankSlice(r)) for r in ranks), Tier(up=Raw(), down=Raw()))
    return method.replace(budget=Budget(tiers), download="full", upload="weights")


@register("method", "fedex-lora", paper="Singhal et al., ACL 2025")
@on("text-classification", **PEFT, lr=0.1)
@on("causal-lm", **LANGUAGE_PEFT)
@on("instructions", **LANGUAGE_PEFT)
def fedex_lora(
    rank: int = 8,
    alpha: float = 8.0,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    init_lora_weights: InitA = "isometric",
    lr: float = 0.0,
) -> Method:
    """FedEx-LoRA: LoRA with averaged factors; the base takes what their product misses, sent as stacked factors.

        B, A: mean factors          W0 <- W0 + (alpha / rank) (sum_i p_i B_i A_i - B A)

    Differs from the paper: weights of clients by examples, and the residual of m clients is sent as m - 1 stacked
    adapters, or as the matrix where that is smaller.

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.

    Paper: FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language Models (Singhal et
    al., ACL 2025).

    >>> fedex_lora(rank=4).space.rank
    4
    """
    where = (target_modules, modules_to_save)
    space = LoRAResidual(rank, alpha, *where, init_lora_weights=init_lora_weights, dense="auto")
    return lora(lr=lr).replace(space=space)


@register("method", "flora-stack", paper="Wang et al., NeurIPS 2024")
@on("text-classification", **PEFT, lr=0.1)
@on("causal-lm", **LANGUAGE_PEFT)
@on("instructions", **LANGUAGE_PEFT)
def flora_stack(
    rank: int = 8,
    alpha: float = 8.0,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    init_lora_weights: InitA = "isometric",
    lr: float = 0.0,
) -> Method:
    """FLoRA by stacking: the server broadcasts all clients' adapters, everyone merges them, and new ones start.

        W0 <- W0 + (alpha / rank) [p_1 B_1, p_2 B_2, ...] [A_1; A_2; ...]          then a new A is drawn and B is zero

    Differs from the paper: all clients start a round from the same A, drawn from the seed, and have the same rank. Not
    `flora`, a baseline of FLASC with the same name.

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.

    Paper: FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations (Wang et al.,
    NeurIPS 2024).

    >>> flora_stack().space.redraw_every
    1
    """
    where = (target_modules, modules_to_save)
    space = LoRAStack(rank, alpha, *where, init_lora_weights=init_lora_weights, dense="auto")
    return lora(lr=lr).replace(space=space)


@register("method", "fed-sb", paper="Singhal et al., 2025")
@on("text-classification", rank=64, **MODULES)
@on("causal-lm", rank=64, target_modules=("query-value",))
@on("instructions", rank=64, target_modules=("query-value",))
def fed_sb(
    rank: int = 32,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    lr: float = 0.0,
) -> Method:
    """Fed-SB: only a square matrix R between singular directions of the weights is trained; its mean is exact.

        W = W0 + B R A          B, A: the first singular vectors of W0          R: rank x rank, zero at first

    Differs from the paper: B and A are those of W0, not of the first averaged gradient, and R starts at 0; so nothing
    but R is ever sent.

    Args:
        rank: singular directions of each matrix.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        lr: learning rate of the clients; 0 leaves it to the task.

    Paper: Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in (Private) Federated LoRA
    Fine-Tuning (Singhal et al., 2025).

    >>> fed_sb(rank=16).space.rank
    16
    """
    method = Method(space=LoRASB(rank, target_modules, modules_to_save, dense="auto"))
    return method.replace(client_opt=SGD(lr)) if lr else method
