"""Masks in place of weights: FedPM and FedMRN. Uploads take at most one bit for each weight."""

from __future__ import annotations

from thinwire.aggregators import Uniform
from thinwire.codecs import Binary, Lattice, LatticeSum
from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.optimizers import SGD, Adam, BetaPosterior
from thinwire.protocol.method import Method
from thinwire.spaces import FedMRN, FedPM


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
    return Method(
        space=FedPM(gain=gain),
        up=Binary((0.0, 1.0)),
        down=Lattice(0.5),
        merge_codec=LatticeSum(),
        upload="weights",
        client_weight=Uniform(),
        client_opt=Adam(lr),
        server_opt=BetaPosterior(reset_every=reset_every),
    )


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
    return Method(
        space=FedMRN(noise=noise, signed=signed),
        up=Binary((-1.0 if signed else 0.0, 1.0)),
        down=Lattice(0.5),
        merge_codec=LatticeSum(),
        upload="weights",
        client_weight=Uniform(),
        server_opt=SGD(1.0),
    )
