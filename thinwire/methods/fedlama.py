"""FedLAMA: layers with a small discrepancy between clients are synchronized less often."""

from __future__ import annotations

from thinwire.aggregators import Uniform
from thinwire.core.registry import register
from thinwire.protocol.method import Method
from thinwire.schedules import FedLAMA


@register("method", "fedlama", paper="Layer-wise Adaptive Model Aggregation, 2021")
def fedlama(phi: int = 4) -> Method:
    """FedLAMA: FedAvg in which layers with a small discrepancy are synchronized once in phi rounds.

        d_l = sum_i p_i |u_l - x_l^i|^2 / (tau_l dim_l)          discrepancy of layer l, per parameter and local step

    At the end of a window of phi rounds all layers are synchronized and sorted by d_l. Layers are then taken in
    ascending order, as long as their share of the discrepancy is below the share of the parameters that are left. These
    layers are synchronized once in the next window, all others in every round.

    Args:
        phi: rounds in a window; 1 is FedAvg.

    Paper: Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, 2021.

    >>> fedlama(phi=2).schedule.phi
    2
    """
    return Method(schedule=FedLAMA(phi=phi))


@register("method", "fedlama-public", paper="Layer-wise Adaptive Model Aggregation, 2021")
def fedlama_public(phi: int = 4) -> Method:
    """FedLAMA as in the authors' code: only kernels wait, the first window starts later, equal client weights.

    As `fedlama`, with p_i = 1 / m for m clients; a layer is one tensor, tensors with fewer than two axes are
    synchronized in every round, and intervals are first adjusted after 7 rounds.

    Args:
        phi: rounds in a window.

    Paper: Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, 2021.

    >>> fedlama_public().schedule.rules
    'public'
    """
    return Method(schedule=FedLAMA(phi=phi, rules="public"), client_weight=Uniform())


@register("method", "fedlama-accelerated", paper="Layer-wise Adaptive Model Aggregation, 2021")
def fedlama_accelerated(phi: int = 2) -> Method:
    """FedAvg over phi rounds, with the layers of largest discrepancy synchronized in every round (FedLAMA).

    The layers are taken in descending order of d_l (see `fedlama`), as long as they hold few of the parameters.

    Args:
        phi: rounds between two synchronizations of the whole model.

    Paper: Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, 2021, end of section 4.

    >>> fedlama_accelerated(phi=3).schedule.accelerate
    True
    """
    return Method(schedule=FedLAMA(phi=phi, accelerate=True, include_crossing=False))
