"""Pruned adapters and models, and federated select: the sparse baselines of FLASC.

Masks are never sent: they are functions of the parameters that a client receives. The training setup is that of `full`.
"""

from __future__ import annotations

from thinwire.codecs import Masked, Threshold, TopK
from thinwire.core.registry import register
from thinwire.masks import PruneMask, TopKMask
from thinwire.masks.largest import By
from thinwire.methods.base import on
from thinwire.methods.flasc import full
from thinwire.methods.lora import ATTENTION, LANGUAGE, Selectors
from thinwire.protocol.method import Method
from thinwire.spaces import LoRA


def _pruned(mask: PruneMask) -> Method:
    """Send the non-zero values down with their positions, and up without."""
    return full().replace(mask=mask, down=Threshold(0.0), up=Masked())


def _each_round(keep: float, by: By = "tree") -> PruneMask:
    """Prune after every round, and nothing before the first."""
    return PruneMask(1.0, at=0, keep=keep, every=1, by=by)


@register("method", "sparse-adapter", paper="He et al., EMNLP 2022, as compared with by FLASC")
@on("text-classification", **ATTENTION)
@on("causal-lm", **LANGUAGE)
@on("instructions", **LANGUAGE)
def sparse_adapter(
    rank: int = 8,
    alpha: float = 16.0,
    density: float = 0.25,
    at: int = 1,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    by: By = "tree",
) -> Method:
    """SparseAdapter: LoRA pruned once, to the values of largest magnitude, after the first rounds.

        M = the density |P| largest of |P| after round `at`          P <- P M,  gradients <- gradients M

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        density: share of the values that are left.
        at: rounds before pruning. B starts at zero, so pruning too early may leave no value of B.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        by: `tree`, or `block`: A and B then keep the same share, so the adapter stays alive (`PruneMask`).

    Paper: SparseAdapter: An Easy Approach for Improving the Parameter-Efficiency of Adapters (He et al., EMNLP 2022),
    as compared with by FLASC.

    >>> sparse_adapter(at=30).mask.at
    30
    """
    space = LoRA(rank, alpha, target_modules, modules_to_save)
    return _pruned(PruneMask(density, at=at, by=by)).replace(space=space)


@register("method", "adapter-lth", paper="Frankle and Carbin, ICLR 2019, as compared with by FLASC")
@on("text-classification", **ATTENTION)
@on("causal-lm", **LANGUAGE)
@on("instructions", **LANGUAGE)
def adapter_lth(
    rank: int = 8,
    alpha: float = 16.0,
    keep: float = 0.98,
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
    by: By = "tree",
) -> Method:
    """Lottery-ticket pruning of LoRA: after every round a share of the values is pruned, without rewinding.

        round s trains keep^(s - 1) of the values

    Args:
        rank: rank of the adapters.
        alpha: the adapter is scaled by alpha / rank.
        keep: share of the values that each pruning leaves: 0.97, 0.98, 0.99 for 100, 200, 400 rounds.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly.
        by: `tree`, or `block`: A and B then keep the same share (`PruneMask`).

    Paper: The Lottery Ticket Hypothesis (Frankle and Carbin, ICLR 2019), as compared with by FLASC.

    >>> adapter_lth(keep=0.97).mask.keep
    0.97
    """
    space = LoRA(rank, alpha, target_modules, modules_to_save)
    return _pruned(_each_round(keep, by)).replace(space=space)


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
