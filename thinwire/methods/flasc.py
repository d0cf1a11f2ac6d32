"""FLASC, sparse communication of LoRA, and full fine-tuning in the same training setup."""

from __future__ import annotations

from thinwire.aggregators import Uniform
from thinwire.codecs import TopK
from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.methods.lora import LANGUAGE_PEFT, PEFT, Selectors
from thinwire.optimizers import SGD, Adam
from thinwire.protocol.method import Method
from thinwire.spaces import LoRA
from thinwire.spaces.lora import InitA


@register("method", "flasc", paper="FLASC: Federated LoRA with Sparse Communication, 2024")
@on("text-classification", **PEFT, server_lr=0.01, from_start=False)
@on("causal-lm", **LANGUAGE_PEFT)
@on("instructions", **LANGUAGE_PEFT)
def flasc(
    rank: int = 8,
    alpha: float = 16.0,
    density: float = 0.25,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    init_lora_weights: InitA = "isometric",
    lr: float = 0.01,
    server_lr: float = 0.03,
    from_start: bool = True,
) -> Method:
    """FLASC: LoRA with top-k sparse downloads and uploads, and dense local training in between.

        client:  Q = topk(P)          Q -> Q' by local training of all values          upload topk(Q' - Q)
        server:  P <- Adam(P, mean of the uploads)          P stays dense

    The values with the largest magnitude are chosen among all trained parameters P, not layer by layer. The model that
    clients receive, topk(P), is evaluated.

    Args:
        rank: rank of the adapters. The paper adapts attention matrices with rank 16.
        alpha: the adapter is scaled by alpha / rank.
        density: share of the values that are sent, in both directions.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients.
        server_lr: learning rate of the server.
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
    return full(lr, server_lr).replace(space=space, up=TopK(density), down=TopK(density), evaluate="client")


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
