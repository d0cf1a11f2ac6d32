"""FedAvg with corrected local steps: less client drift on non-IID data."""

from __future__ import annotations

from thinwire.aggregators import Uniform
from thinwire.core.registry import register
from thinwire.optimizers import FedDyn, FedNova, FedProx, Scaffold
from thinwire.protocol.method import Method


@register("method", "fedprox", paper="Li et al., MLSys 2020")
def fedprox(mu: float = 0.1) -> Method:
    """FedProx: FedAvg with a proximal term that keeps local training close to the received weights.

        client:  min_w  f_i(w) + (mu / 2) |w - w_received|^2

    Args:
        mu: strength of the proximal term; 0 is FedAvg.

    Paper: Federated Optimization in Heterogeneous Networks (Li et al., MLSys 2020).

    >>> fedprox(mu=0.01).correction
    FedProx(mu=0.01)
    """
    return Method(correction=FedProx(mu))


@register("method", "scaffold", paper="Karimireddy et al., ICML 2020")
def scaffold() -> Method:
    """SCAFFOLD: FedAvg with control variates that remove client drift; messages are twice as long.

        g <- g - c_i + c          c_i <- c_i - c - (w_i - w) / (K lr)          c <- c + (m / N) mean(c_i' - c_i)

    Clients have equal weights, so that c is exactly the mean of all c_i. K is the number of local steps.

    Paper: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al., ICML 2020).

    >>> scaffold().client_weight
    Uniform()
    """
    return Method(correction=Scaffold(), client_weight=Uniform())


@register("method", "feddyn", paper="Acar et al., ICLR 2021")
def feddyn(alpha: float = 0.1) -> Method:
    """FedDyn: FedAvg with a dynamic regularizer that aligns each client's optimum with the global one.

        client:  g <- g - g_i + alpha (w - w_received)          g_i <- g_i - alpha (w_i - w_received)
        server:  h <- h - alpha (m / N) mean(D_i)               w <- w + mean(D_i) - h / alpha

    Clients have equal weights, so that h is exactly the mean of all g_i.

    Args:
        alpha: strength of the regularizer.

    Paper: Federated Learning Based on Dynamic Regularization (Acar et al., ICLR 2021).

    >>> feddyn(alpha=0.01).correction
    FedDyn(alpha=0.01)
    """
    return Method(correction=FedDyn(alpha), client_weight=Uniform())


@register("method", "fednova", paper="Wang et al., NeurIPS 2020")
def fednova(momentum: float = 0.0) -> Method:
    """FedNova: FedAvg of updates normalized by the number of local steps of each client.

        w <- w + (sum_i p_i tau_i) (sum_i p_i D_i / tau_i)          tau_i: local steps of client i

    Args:
        momentum: momentum of the clients' SGD, which changes tau_i; 0 for plain SGD.

    Paper: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization (Wang et al., NeurIPS
    2020).

    >>> fednova().correction
    FedNova(momentum=0.0)
    """
    return Method(correction=FedNova(momentum))
