"""Federated LoRA: low-rank adapters of a frozen model, and which of their factors are trained and shared.

    W = W0 + (alpha / rank) B A          A: (rank, inputs), random at first;   B: (outputs, rank), zero at first

On a model of any kind every matrix has an adapter, except the head and matrices too small for one, which are trained
directly (`dense = "auto"`), and A is drawn so that the learning rate of the task fits (`isometric`). On a pretrained
transformer (the task `text-classification`) the adapters are on query and value, with rank 16 and peft's
initialization, and the new head is trained directly. On a language model (`causal-lm`, `instructions`) the matrices are
the same, and there is no head to train.

Federated LoRA whose aggregate is the mean of the clients' adapters, not the product of mean factors.

    wanted:  sum_i p_i B_i A_i          `lora` makes  (sum_i p_i B_i) (sum_i p_i A_i)

`ffa-lora` is exact, too: its A is frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from thinwire.codecs import Masked, RankSlice, Raw, Threshold
from thinwire.core.registry import register
from thinwire.masks import TurnsMask
from thinwire.methods.fedavg import Arguments, T, on, passes_on
from thinwire.optimizers import SGD
from thinwire.protocol.method import Budget, Method, Tier
from thinwire.schedules import AllBlocks
from thinwire.spaces import LoRA, LoRAResidual, LoRASB, LoRAStack, LoRASum
from thinwire.spaces.lora import InitA

Selectors = tuple[str, ...]

# Adapters of a pretrained transformer with a new head.
MODULES: dict[str, Any] = {
    "target_modules": ("*query.weight", "*value.weight"),
    "modules_to_save": ("*classifier.*",),
}
ATTENTION: dict[str, Any] = {"rank": 16, "alpha": 16.0, **MODULES}
PEFT: dict[str, Any] = {**ATTENTION, "init_lora_weights": "kaiming"}
# Adapters of a language model: peft's matrices, no new head.
LANGUAGE: dict[str, Any] = {"rank": 16, "alpha": 32.0, "target_modules": ("query-value",)}
LANGUAGE_PEFT: dict[str, Any] = {**LANGUAGE, "init_lora_weights": "kaiming"}


class AdapterOptions(TypedDict, total=False):
    """Arguments of all methods with adapters, as in `LoRA`."""

    rank: int
    alpha: float
    target_modules: Selectors
    modules_to_save: Selectors


class LoRAOptions(AdapterOptions, total=False):
    """Arguments of `lora`, which its variants have, too."""

    init_lora_weights: InitA
    lr: float


def by_rank(ranks: tuple[int, ...]) -> Budget:
    """Tiers of clients, equally many in each, that send the first ranks only; the clients of the last send all."""
    return Budget((*(Tier(up=RankSlice(rank), down=RankSlice(rank)) for rank in ranks), Tier(up=Raw(), down=Raw())))


def on_transformers(encoder: Arguments, language: Arguments) -> Callable[[T], T]:
    """`on` for the tasks with a pretrained transformer: a classifier, and language models."""
    return lambda make: on("text-classification", **encoder)(on("causal-lm", "instructions", **language)(make))


def _at(lr: float, method: Method) -> Method:
    """Set the learning rate, unless it is 0."""
    return method.replace(client_opt=SGD(lr)) if lr else method


_on_tasks = on_transformers({**PEFT, "lr": 0.1}, LANGUAGE_PEFT)


@register("method", "lora", paper="Hu et al., ICLR 2022")
@_on_tasks
def lora(
    rank: int = 8,
    alpha: float = 8.0,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    init_lora_weights: InitA = "isometric",
    lr: float = 0.0,
) -> Method:
    """Federated LoRA: train low-rank adapters of a frozen model and average the factors A and B separately.

        A <- sum_i p_i A_i          B <- sum_i p_i B_i          which is not the mean of B_i A_i

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly, for example the head.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.

    Paper: LoRA: Low-Rank Adaptation of Large Language Models (Hu et al., ICLR 2022).

    >>> lora(rank=4).space.rank
    4
    """
    space = LoRA(rank, alpha, target_modules, modules_to_save, init_lora_weights=init_lora_weights, dense="auto")
    return _at(lr, Method(space=space))


def _variant(options: LoRAOptions, kind: type[LoRA] = LoRA, **settings: Any) -> Method:
    """`lora` with another kind of space, or with further settings of it."""
    method = lora(**options)
    same = ("rank", "alpha", "target_modules", "modules_to_save", "init_lora_weights", "dense")
    return method.replace(space=kind(**{name: getattr(method.space, name) for name in same}, **settings))


@register("method", "ffa-lora", paper="Sun et al., ICLR 2024")
@on_transformers(PEFT, LANGUAGE_PEFT)
@passes_on(lora, "rank", "alpha", "target_modules", "modules_to_save", "init_lora_weights")
def ffa_lora(**options: Unpack[LoRAOptions]) -> Method:
    """FFA-LoRA: LoRA with A frozen at its random values; only B is trained and sent, and its average is exact.

        mean_i(B_i A) = mean_i(B_i) A

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.

    Paper: Improving LoRA in Privacy-preserving Federated Learning (Sun et al., ICLR 2024).

    >>> ffa_lora().space.freeze_a
    True
    """
    return _variant(options, freeze_a=True)


@register("method", "fedsvd", paper="Lee et al., 2025")
@on_transformers(ATTENTION, LANGUAGE)
@passes_on(lora, "rank", "alpha", "target_modules", "modules_to_save")
def fedsvd(**options: Unpack[LoRAOptions]) -> Method:
    """FedSVD: FFA-LoRA with orthonormal rows of A; only B is trained and sent.

        B <- mean_i(B_i)          B A = U S V^T,    A <- V^T,    B <- U S: the same weights

    Differs from the paper: A is orthonormal from the start, and the decomposition is left out. It rotates the rows of A
    among themselves, which changes no weight where clients train by SGD.

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.

    Paper: FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA (Lee et al., 2025).

    >>> fedsvd().space.init_lora_weights
    'orthonormal'
    """
    return _variant({**options, "init_lora_weights": "orthonormal"}, freeze_a=True)


@register("method", "rolora", paper="Chen et al., 2024")
@_on_tasks
@passes_on(lora)
def rolora(**options: Unpack[LoRAOptions]) -> Method:
    """RoLoRA: LoRA that trains and sends B and A in turn, one of them a round, so that every average is exact.

        odd rounds:  B <- mean_i(B_i)          even rounds:  A <- mean_i(A_i)

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly, in every round.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.

    Paper: Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA (Chen et al., 2024).

    >>> rolora().mask.groups
    ('*/b', '*/a')
    """
    return lora(**options).replace(mask=TurnsMask(), up=Masked(), down=Threshold(0.0))


@register("method", "fa-lora", paper="baseline of MAPA; after Sun et al., ICLR 2024")
def fa_lora(rank: int = 4, alpha: float = 4.0) -> Method:
    """FA-LoRA: train a model from scratch through B only, with A frozen: a baseline of MAPA.

        W = W0 + (alpha / rank) B A          W0: the random initial weights;   A: frozen

    Args:
        rank: rank of the adapters. Rank 4 trains 136 parameters of cnn2, the closest to the 128 of MAPA.
        alpha: the adapter is scaled by alpha / rank.

    Paper: baseline of MAPA; the space is that of FFA-LoRA (Sun et al., ICLR 2024).

    >>> fa_lora().space.freeze_a
    True
    """
    return Method(space=LoRA(rank, alpha, freeze_a=True, init_lora_weights="isometric"))


@register("method", "fedsa-lora", paper="Guo et al., ICLR 2025")
@_on_tasks
@passes_on(lora)
def fedsa_lora(**options: Unpack[LoRAOptions]) -> Method:
    """FedSA-LoRA: LoRA with A averaged and B private: personal models (task.validation_fraction tests them).

        W_i = W0 + (alpha / rank) B_i A          A is averaged, B_i stays on client i

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.

    Paper: Selective Aggregation for Low-Rank Adaptation in Federated Learning (Guo et al., ICLR 2025).

    >>> fedsa_lora().schedule.private
    ('*/b',)
    """
    return lora(**options).replace(schedule=AllBlocks(private=("*/b",)))


@register("method", "fedloru", paper="Park and Klabjan, 2024")
@_on_tasks
@passes_on(lora)
def fedloru(freeze_a: bool = False, **options: Unpack[LoRAOptions]) -> Method:
    """FedLoRU: LoRA that is merged into the weights after every round, so that low-rank updates accumulate.

        W0 <- W0 + (alpha / rank) B A          then a new A is drawn and B is zero

    MAPO's table describes its FedLoRU baseline as exact in averaging, which needs `freeze_a=True`; the paper trains
    both factors.

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A is drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.
        freeze_a: train and send B only, with a new random A after every merge.

    Paper: Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit Regularization
    (Park and Klabjan, 2024).

    >>> fedloru().space.redraw_every
    1
    """
    return _variant(options, redraw_every=1, freeze_a=freeze_a)


@register("method", "fedmud", paper="Li et al., ICML 2025")
@_on_tasks
@passes_on(lora)
def fedmud(redraw_every: int = 1, **options: Unpack[LoRAOptions]) -> Method:
    """FedMUD with AAD: low-rank updates that average exactly and are merged into the weights after some rounds.

        W = W0 + (alpha / rank) (B A0 + B0 A)          A0, B0: drawn from the seed;    A, B: zero after every merge

    Differs from the paper: matrices are factorized whole, without its Kronecker products of blocks (BKD).

    Args:
        rank: rank of each of the two products.
        alpha: the update is scaled by alpha / rank.
        target_modules: selectors of the matrices that are factorized.
        modules_to_save: selectors of the weights that are trained directly.
        init_lora_weights: how A0 and B0 are drawn, `isometric` or `kaiming`.
        lr: learning rate of the clients; 0 leaves it to the task.
        redraw_every: rounds between merges.

    Paper: The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated Learning (Li et al.,
    ICML 2025).

    >>> fedmud(redraw_every=4).space.redraw_every
    4
    """
    return _variant(options, LoRASum, redraw_every=redraw_every)


@register("method", "fedex-lora", paper="Singhal et al., ACL 2025")
@_on_tasks
@passes_on(lora)
def fedex_lora(**options: Unpack[LoRAOptions]) -> Method:
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
    return _variant(options, LoRAResidual)


@register("method", "flora-stack", paper="Wang et al., NeurIPS 2024")
@_on_tasks
@passes_on(lora)
def flora_stack(**options: Unpack[LoRAOptions]) -> Method:
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
    return _variant(options, LoRAStack)


@register("method", "fed-sb", paper="Singhal et al., 2025")
@on_transformers({"rank": 64, **MODULES}, {"rank": 64, "target_modules": ("query-value",)})
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
    return _at(lr, Method(space=LoRASB(rank, target_modules, modules_to_save, dense="auto")))
