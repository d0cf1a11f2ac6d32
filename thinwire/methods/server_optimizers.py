"""FedOpt: FedAvg with an optimizer at the server. The negated mean update is its gradient."""

from __future__ import annotations

from thinwire.core.registry import register
from thinwire.optimizers import SGD, Adagrad, Adam, Yogi
from thinwire.protocol.method import Method


@register("method", "fedavgm", paper="Hsu et al., 2019")
def fedavgm(server_lr: float = 0.2, momentum: float = 0.9) -> Method:
    """FedAvgM: FedAvg with momentum at the server.

        m <- momentum m + mean_i(w_i - w)           w <- w + server_lr m

    Args:
        server_lr: learning rate of the server. A small one keeps the client learning rate of the task usable.
        momentum: momentum of the server.

    Paper: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification (Hsu et al.,
    2019).

    >>> fedavgm(momentum=0.5).server_opt.momentum
    0.5
    """
    return Method(server_opt=SGD(server_lr, momentum=momentum))


@register("method", "fedadam", paper="Reddi et al., ICLR 2021")
def fedadam(server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3) -> Method:
    """FedAdam: FedAvg with Adam at the server, without bias correction.

        m <- beta1 m + (1 - beta1) D       v <- beta2 v + (1 - beta2) D^2       w <- w + server_lr m / (sqrt(v) + eps)

    with D = mean_i(w_i - w).

    Args:
        server_lr: learning rate of the server.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: the paper's tau, the degree of adaptivity.

    Paper: Adaptive Federated Optimization (Reddi et al., ICLR 2021).

    >>> fedadam(server_lr=0.03).server_opt.lr
    0.03
    """
    return Method(server_opt=Adam(server_lr, beta1=beta1, beta2=beta2, eps=eps, bias_correction=False))


@register("method", "fedyogi", paper="Reddi et al., ICLR 2021")
def fedyogi(server_lr: float = 0.01) -> Method:
    """FedYogi: FedAvg with Yogi at the server.

        v <- v - (1 - beta2) D^2 sign(v - D^2)      w <- w + server_lr m / (sqrt(v) + eps)

    Args:
        server_lr: learning rate of the server.

    Paper: Adaptive Federated Optimization (Reddi et al., ICLR 2021).

    >>> fedyogi().server_opt.lr
    0.01
    """
    return Method(server_opt=Yogi(server_lr))


@register("method", "fedadagrad", paper="Reddi et al., ICLR 2021")
def fedadagrad(server_lr: float = 0.1) -> Method:
    """FedAdagrad: FedAvg with Adagrad at the server.

        v <- v + D^2                                w <- w + server_lr D / (sqrt(v) + eps)

    Args:
        server_lr: learning rate of the server.

    Paper: Adaptive Federated Optimization (Reddi et al., ICLR 2021).

    >>> fedadagrad().server_opt.lr
    0.1
    """
    return Method(server_opt=Adagrad(server_lr))
