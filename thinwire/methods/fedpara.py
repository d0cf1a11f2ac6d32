"""Factorized weights: FedPara, its personal variant, and the low-rank baselines of the paper.

`fedpara` starts from the standard deviation of the dense weights and is scaled for FedAvg's learning rate; products of
factors otherwise need another one.
"""

from __future__ import annotations

from thinwire.core.registry import register
from thinwire.optimizers import SGD
from thinwire.protocol.method import Method
from thinwire.schedules import AllBlocks
from thinwire.spaces import FedPara, LowRank, Pufferfish
from thinwire.spaces.fedpara import Activation


@register("method", "fedpara", paper="Hyeon-Woo et al., ICLR 2022")
def fedpara(gamma: float = 0.1, activation: Activation = "tanh") -> Method:
    """FedPara: each weight is the Hadamard product of two low-rank matrices, which can have full rank.

        W = c f(X1 Y1^T) * f(X2 Y2^T)          rank(W) <= R^2 with 2 R (outputs + inputs) parameters

    c is a constant of the shape, with which FedAvg's learning rate fits. The head and very small weights are dense.

    Args:
        gamma: size of the factors, from 0 (the smallest that can have full rank) to 1 (the size of the weight).
        activation: f, `none` or `tanh`.

    Paper: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning (Hyeon-Woo et al., ICLR
    2022).

    >>> fedpara(gamma=0.3).space.gamma
    0.3
    """
    space = FedPara(gamma=gamma, activation=activation, start="composed", scale="isometric", dense="auto")
    return Method(space=space)


@register("method", "fedpara-paper", paper="Hyeon-Woo et al., ICLR 2022")
def fedpara_paper(gamma: float = 0.1, activation: Activation = "tanh") -> Method:
    """FedPara without the factor c: all weights factorized, He's rule for factors or composed weights.

        W = f(X1 Y1^T) * f(X2 Y2^T)

    Args:
        gamma: size of the factors, from 0 (the smallest that can have full rank) to 1 (the size of the weight).
        activation: f, `none` or `tanh`.

    Paper: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning (Hyeon-Woo et al., ICLR
    2022).

    >>> fedpara_paper().space.scale
    'unit'
    """
    return Method(space=FedPara(gamma=gamma, activation=activation))


@register("method", "pfedpara", paper="Hyeon-Woo et al., ICLR 2022")
def pfedpara(gamma: float = 0.5, lr: float = 0.1) -> Method:
    """pFedPara: FedPara with one shared and one private factor pair, for personal models at half the traffic.

        W_i = W1 * (W2_i + 1)          W1 = X1 Y1^T is averaged, W2_i stays on client i

    Args:
        gamma: size of the factors, from 0 to 1.
        lr: learning rate of the clients.

    Paper: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning (Hyeon-Woo et al., ICLR
    2022).

    >>> pfedpara().schedule.private
    ('*/[txy]2',)
    """
    space = FedPara(gamma=gamma, personal=True)
    return Method(space=space, schedule=AllBlocks(private=("*/[txy]2",)), client_opt=SGD(lr))


@register("method", "lowrank", paper="compared with in Hyeon-Woo et al., ICLR 2022")
def lowrank(gamma: float = 0.1, lr: float = 0.1) -> Method:
    """Low-rank weights with as many parameters as FedPara: its baseline (Tucker-2 for convolutions).

        W = X Y^T          X: (outputs, r)   Y: (inputs, r)

    Args:
        gamma: r is the smallest rank with at least as many parameters as FedPara has at this gamma.
        lr: learning rate of the clients.

    Paper: baseline of FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning (Hyeon-Woo et
    al., ICLR 2022).

    >>> lowrank(gamma=0.4).space.like_gamma
    0.4
    """
    return Method(space=LowRank(like_gamma=gamma), client_opt=SGD(lr))


@register("method", "pufferfish", paper="Wang et al., MLSys 2021")
def pufferfish(ratio: float = 0.25, first_dense: int = 0, lr: float = 0.1) -> Method:
    """Pufferfish: convolutions as a thin convolution and a 1x1 one; for VGG16 use first_dense = 5 or 8.

        W[o, i, k] = sum_r U[o, r] V[r, i, k]          r = ratio * outputs

    Args:
        ratio: rank as a share of the outputs.
        first_dense: number of convolutions, from the input, that are not factorized.
        lr: learning rate of the clients.

    Paper: Pufferfish: Communication-efficient Models At No Extra Cost (Wang et al., MLSys 2021).

    >>> pufferfish(first_dense=5).space.first_dense
    5
    """
    return Method(space=Pufferfish(ratio=ratio, first_dense=first_dense), client_opt=SGD(lr))
