"""Two-stage fine-tuning: weights first, then LoRA that starts from their low-rank approximation.

    at the switch:  W - W0 = U S V^T          B = U_r (S_r / s)^1/2,   A = (S_r / s)^1/2 V_r^T,   s = alpha / rank

The first stage trains only weights that the adapters of the second can represent; others would be reset at the switch.
The switch is after a quarter of the rounds that a task has by default. The training setup is that of `full`.
"""

from __future__ import annotations

from thinwire.codecs import Masked, Raw
from thinwire.core.registry import register
from thinwire.masks import NoMask, RandomMask
from thinwire.methods.base import on
from thinwire.methods.flasc import full
from thinwire.methods.lora import ATTENTION, MODULES, Selectors
from thinwire.optimizers import Adam
from thinwire.protocol.method import Method
from thinwire.protocol.stage import Stage
from thinwire.spaces import Frozen, Full, LoRA, Route
from thinwire.spaces.route import Rule

FIRST_STAGE: Selectors = (*MODULES["target_modules"], *MODULES["modules_to_save"])


def _only(weights: Selectors) -> Route:
    """Train the selected weights directly and freeze the others."""
    return Route((Rule(weights, Full()), Rule(("*",), Frozen())))


@register("method", "flora", paper="compared with in FLASC, 2024")
@on("text-classification", at=25, first_stage=FIRST_STAGE, **ATTENTION)
def flora(
    rank: int = 8,
    alpha: float = 16.0,
    at: int = 15,
    first_stage: Selectors = ("*.weight",),
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
) -> Method:
    """Full fine-tuning for a quarter of the rounds, then LoRA from the low-rank approximation of the update.

        rounds 1 to `at`: W          afterwards: W0 + (alpha / rank) B A

    Not the method that stacks the adapters of clients, which has the same name.

    Args:
        rank: rank of the adapters of the second stage.
        alpha: the adapter is scaled by alpha / rank.
        at: rounds of the first stage.
        first_stage: selectors of the weights that the first stage trains.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly in the second stage.

    Paper: baseline of FLASC: Federated LoRA with Sparse Communication, 2024.

    >>> flora(at=50).next_stage.at
    50
    """
    adapters = LoRA(rank, alpha, target_modules, modules_to_save)
    stage = Stage(at, adapters, server_opt=Adam(0.01))
    return full(server_lr=0.001).replace(space=_only(first_stage), next_stage=stage)


@register("method", "slora", paper="Babakniya et al., 2023, as compared with by FLASC")
@on("text-classification", at=25, first_stage=FIRST_STAGE, **ATTENTION)
def slora(
    rank: int = 8,
    alpha: float = 16.0,
    at: int = 15,
    first_stage: Selectors = ("*.weight",),
    target_modules: Selectors = ("*",),
    modules_to_save: Selectors = (),
) -> Method:
    """SLoRA: a random tenth of the weights for a quarter of the rounds, then LoRA from what they learned.

        rounds 1 to `at`: W0 + M * D, M random and fixed          afterwards: W0 + (alpha / rank) B A

    Both sides can compute M, so no positions are sent.

    Args:
        rank: rank of the adapters of the second stage.
        alpha: the adapter is scaled by alpha / rank.
        at: rounds of the first stage.
        first_stage: selectors of the weights of which the first stage trains a tenth.
        target_modules: selectors of the matrices with an adapter.
        modules_to_save: selectors of the weights that are trained directly in the second stage.

    Paper: SLoRA: Federated Parameter Efficient Fine-Tuning of Language Models (Babakniya et al., 2023), as compared
    with by FLASC.

    >>> slora().mask.density
    0.1
    """
    method = flora(rank, alpha, at, first_stage, target_modules, modules_to_save)
    adapters = LoRA(rank, alpha, target_modules, modules_to_save)
    stage = Stage(at, adapters, mask=NoMask(), up=Raw(), down=Raw(), server_opt=Adam(0.01))
    return method.replace(mask=RandomMask(0.1), up=Masked(), down=Masked(), next_stage=stage)
