"""Training by forward passes alone: clients send a few slopes of the loss, and everyone replays them from the seed."""

from __future__ import annotations

from thinwire.codecs import Threshold
from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.optimizers import ForwardSGD
from thinwire.protocol.method import Method
from thinwire.spaces import MAPA


@register(
    "method",
    "decomfl",
    paper="Li et al., ICLR 2025",
    preset={"local": {"epochs": 1, "steps": 5}},
)
# The rates on digits were chosen from three (docs/results/seeds-digits.md).
@on("digits", lr=0.05)
def decomfl(p: int = 50, directions: int = 10, mu: float = 1e-3, lr: float = 1e-3) -> Method:
    """DeComFL: slopes of the loss along random directions of the seed go up and down; no backward pass.

        g_kj = (f(w_k + mu z_kj) - f(w_k)) / mu          w_(k+1) = w_k - lr / P sum_j g_kj z_kj

    in local step k, with P = `directions` perturbations z ~ N(0, I) that everyone draws from the shared seed. Clients
    send their slopes, the server their mean, and everyone moves the weights of the round's start by it. The preset has
    five local steps: p = 50 values in either direction, whatever the size of the model.

    Args:
        p: perturbations of a round, local steps times `directions`; fewer are used again in later steps.
        directions: perturbations of a step.
        mu: length of a perturbation.
        lr: learning rate; smaller than that of SGD, by up to P / d for a model of d weights.

    Paper: Achieving Dimension-Free Communication in Federated Learning via Zeroth-Order Optimization (Li et al., ICLR
    2025).

    >>> decomfl(p=20).space.p, decomfl().client_opt.forward_only
    (20, True)
    """
    space = MAPA(p=p, entries="gaussian", normalize="none", scale="unit")
    return Method(space=space, client_opt=ForwardSGD(lr, directions, mu))


@register(
    "method",
    "fedkseed",
    paper="Qin et al., ICML 2024",
    preset={"local": {"epochs": 1, "steps": 20}},
)
@on("digits", pool=1024, lr=0.01)
def fedkseed(pool: int = 4096, directions: int = 1, mu: float = 1e-3, lr: float = 1e-3) -> Method:
    """FedKSeed: as `decomfl`, along directions of one pool for all rounds; the state is one scalar for each of them.

        g = (f(w + mu z_j) - f(w)) / mu,    w <- w - lr g z_j,    j at random from 1 to K, z_1 .. z_K from the seed
        W = W0 + sum_j b_j z_j,             b_j: the sum of all steps along z_j

    A client sends the numbers of its directions and how far it went; one that returns receives at most the K values of
    b, whatever it missed. The preset has twenty local steps.

    Args:
        pool: K, the number of directions; at most the number of weights.
        directions: directions of a local step.
        mu: length of a perturbation.
        lr: learning rate; smaller than that of SGD, as for `decomfl`.

    Paper: Federated Full-Parameter Tuning of Billion-Sized Language Models with Communication Cost under 18 Kilobytes
    (Qin et al., ICML 2024).

    >>> fedkseed(pool=100).space.p, fedkseed().space.redraw_every
    (100, 0)
    """
    space = MAPA(p=pool, entries="gaussian", normalize="none", scale="unit", redraw_every=0)
    forward = ForwardSGD(lr, directions, mu, order="random")
    return Method(space=space, up=Threshold(0.0), down=Threshold(0.0), client_opt=forward)
