"""Factorized weights: FedPara, its personal variant, and the low-rank baselines of the paper.

`fedpara` starts from the standard deviation of the dense weights and is scaled for FedAvg's learning rate; products of
factors otherwise need another one.

Factorized-FL: each weight is a rank-one product plus a sparse residual.

    W = v u^T + mu          L1 penalty on mu; values of mu below `prune` are zero in the model

Products of factors need a smaller learning rate than weights.

Masks in place of weights: FedPM and FedMRN. Uploads take at most one bit for each weight.
"""

from __future__ import annotations

from thinwire.aggregators import Uniform
from thinwire.codecs import Binary, ByBlock, Lattice, LatticeSum, Raw, Threshold
from thinwire.codecs.by_block import CodecRule
from thinwire.core.registry import register
from thinwire.methods.fedavg import on
from thinwire.optimizers import L1L2, SGD, Adam, BetaPosterior
from thinwire.protocol.method import Method
from thinwire.schedules import AllBlocks
from thinwire.spaces import FactorizedFL, FedMRN, FedPara, FedPM, LowRank, Pufferfish, Space
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


@register("method", "factorized-fl", paper="Jeong and Hwang, NeurIPS 2022")
def factorized_fl(prune: float = 5e-4, l1: float = 5e-4, lr: float = 0.1) -> Method:
    """Factorized-FL with u, v and mu averaged over clients: the variant that MAPO compares with.

        W = v u^T + mu          loss + l1 |mu|_1

    Args:
        prune: values of mu below this are zero in the model.
        l1: strength of the L1 penalty on mu.
        lr: learning rate of the clients.

    Paper: Factorized-FL: Personalized Federated Learning with Parameter Factorization & Similarity Matching (Jeong and
    Hwang, NeurIPS 2022).

    >>> factorized_fl(l1=1e-3).penalty.l1
    0.001
    """
    return Method(space=FactorizedFL(prune=prune), penalty=L1L2(l1=l1, coords=("*/mu",)), client_opt=SGD(lr))


@register("method", "factorized-fl-u", paper="Jeong and Hwang, NeurIPS 2022")
def factorized_fl_u(prune: float = 5e-4, l1: float = 5e-4, lr: float = 0.1) -> Method:
    """Factorized-FL with only u shared: personal models (task.validation_fraction tests them).

        W_i = v_i u^T + mu_i          u is averaged; v_i and mu_i stay on client i

    Args:
        prune: values of mu below this are zero in the model.
        l1: strength of the L1 penalty on mu.
        lr: learning rate of the clients.

    Paper: Factorized-FL: Personalized Federated Learning with Parameter Factorization & Similarity Matching (Jeong and
    Hwang, NeurIPS 2022).

    >>> factorized_fl_u().schedule.private
    ('*/v', '*/mu')
    """
    return factorized_fl(prune, l1, lr).replace(schedule=AllBlocks(private=("*/v", "*/mu")))


@register("method", "factorized-fl-sparse", paper="Jeong and Hwang, NeurIPS 2022")
def factorized_fl_sparse(prune: float = 5e-4, l1: float = 5e-4, lr: float = 0.1) -> Method:
    """Factorized-FL that sends mu without the values below the threshold, in both directions.

        send { mu_j : |mu_j| > prune }, and u and v as float32

    The threshold is on mu, not on its change: clients upload weights, and the server sends full downloads.

    Args:
        prune: the threshold; it is also used for the model.
        l1: strength of the L1 penalty on mu.
        lr: learning rate of the clients.

    Paper: Factorized-FL: Personalized Federated Learning with Parameter Factorization & Similarity Matching (Jeong and
    Hwang, NeurIPS 2022).

    >>> factorized_fl_sparse().upload, factorized_fl_sparse().download
    ('weights', 'full')
    """
    codec = ByBlock((CodecRule(("*/mu",), Threshold(prune)), CodecRule(("*",), Raw())))
    return factorized_fl(prune, l1, lr).replace(upload="weights", download="full", up=codec, down=codec)


def _sends_masks(space: Space, levels: tuple[float, float]) -> Method:
    """Upload one of two levels for each coordinate; everyone receives changes that are multiples of a power of two."""
    return Method(
        space=space,
        up=Binary(levels),
        down=Lattice(0.5),
        merge_codec=LatticeSum(),
        upload="weights",
        client_weight=Uniform(),
    )


@register("method", "fedpm", paper="Isik et al., ICLR 2023")
# Chosen on digits and one seed by the highest test accuracy within 40 rounds, of 0.03, 0.1, 0.3 and 1; as was the gain.
@on("digits", lr=0.3, reset_every=2, gain=1.4)
def fedpm(lr: float = 0.1, reset_every: int = 10, gain: float = 1.0) -> Method:
    """FedPM: weights stay random; clients train the probability that each is kept, and upload sampled masks.

        W = W0 * m,   m ~ Bernoulli(p),   p = sigmoid(s)          server: p <- mode of a Beta posterior given the masks

    Downloads are changes of p, rounded to multiples of a power of two. The tested model is the mean, W0 p.

    Args:
        lr: learning rate of Adam for the scores s.
        reset_every: rounds after which the posterior is reset: number of clients over the size of the cohort.
        gain: factor on the size of the random weights.

    Paper: Sparse Random Networks for Communication-Efficient Federated Learning (Isik et al., ICLR 2023).

    >>> fedpm(reset_every=5).server_opt.reset_every
    5
    """
    method = _sends_masks(FedPM(gain=gain), (0.0, 1.0))
    return method.replace(client_opt=Adam(lr), server_opt=BetaPosterior(reset_every=reset_every))


@register("method", "fedmrn", paper="Li et al., ACM Multimedia 2024")
@on("digits", noise=0.1)  # of 0.01, 0.03, 0.1; one seed, by the highest accuracy within 60 rounds
def fedmrn(noise: float = 0.01, signed: bool = True) -> Method:
    """FedMRN: clients train updates that are masks of shared random noise, and upload the masks.

        W = W0 + n * m,    n ~ U(-noise, noise) from the shared seed in every round;    m in {-1, 1}, or {0, 1}

    Clients keep the learning rate of the task.

    Args:
        noise: the largest change of a weight in one round.
        signed: masks of -1 and 1 instead of 0 and 1.

    Paper: Masked Random Noise for Communication-Efficient Federated Learning (Li et al., ACM Multimedia 2024).

    >>> fedmrn(signed=False).up.levels
    (0.0, 1.0)
    """
    return _sends_masks(FedMRN(noise=noise, signed=signed), (-1.0 if signed else 0.0, 1.0))
