"""Training in a random subspace of the whole model: MAPA, MAPAX, MAPO, and MAPO with 4-bit messages.

Rows of the random matrix have unit length, so a subspace of k among d dimensions shrinks a gradient step by k / d. The
learning rates are therefore larger than FedAvg's.
"""

from __future__ import annotations

from thinwire.codecs import Quantize
from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.optimizers import SGD
from thinwire.protocol.method import Method
from thinwire.spaces import MAPA, MAPAX, MAPO


@register("method", "mapa", paper="MAPA: Model-agnostic projection adaptation")
@on("cifar10", p=1024, lr=1.0)
def mapa(p: int = 128, lr: float = 3.0) -> Method:
    """MAPA: train p coefficients of shared random directions of the whole model, redrawn every round.

        vec(W) = vec(W0) + A b          A: (d, p), drawn from the shared seed;   b: (p,), trained and sent

    Args:
        p: trained parameters.
        lr: learning rate of the clients.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapa(p=64).space.p
    64
    """
    return Method(space=MAPA(p=p), client_opt=SGD(lr))


@register("method", "mapax", paper="MAPA: Model-agnostic projection adaptation")
@on("cifar10", budget=1024, lr=1.0)
def mapax(segment: int = 1024, budget: int = 128, lr: float = 3.0) -> Method:
    """MAPAX: cut the weights into k segments that share p random directions, and train k p coefficients.

        rows of W, reshaped to (k, e) = rows of W0 + B A          A: (p, e), drawn;   B: (k, p), trained and sent

    with k = ceil(d / segment) and p = max(1, round(budget / k)).

    Args:
        segment: weights in a segment.
        budget: number of trained parameters, approximately.
        lr: learning rate of the clients.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapax(segment=64, budget=1000).space.sizes(11274)
    Sizes(k=177, p=6, e=64)
    """
    return Method(space=MAPAX(segment=segment, budget=budget), client_opt=SGD(lr))


@register("method", "mapo", paper="MAPO: Reshape-then-factorize")
@on("fashion-mnist", redraw_every=10)
@on("cifar10", k=1024, lr=1.0)
def mapo(k: int = 128, lr: float = 3.0, redraw_every: int = 1) -> Method:
    """MAPO: cut the weights into k segments that share one random direction, and train k coefficients.

        W, reshaped to (k, d / k) = W0 + b a          a: (1, d / k), drawn from the shared seed;   b: (k, 1), trained

    Args:
        k: trained parameters.
        lr: learning rate of the clients.
        redraw_every: rounds for which a direction is kept; 0 keeps it for the whole run.

    Paper: MAPO: Reshape-then-factorize.

    >>> mapo(k=64).replace(up=Quantize(4)).space.k
    64
    """
    return Method(space=MAPO(k=k, redraw_every=redraw_every), client_opt=SGD(lr))


@register("method", "thin", paper="composed here: MAPO with stochastic rounding")
def thin(k: int = 128, bits: int = 4, lr: float = 3.0, redraw_every: int = 5) -> Method:
    """MAPO with 4-bit uploads, downloads and merges, also for clients that missed rounds.

        b <- b + Q(mean_i Q(b_i - b))          after `redraw_every` rounds:  W0 <- W0 + Q(b) a

    Q rounds stochastically, so it is unbiased.

    Args:
        k: trained parameters.
        bits: bits of a value in every message.
        lr: learning rate of the clients.
        redraw_every: rounds for which a direction is kept.

    Not from a paper: a composition of MAPO and stochastic rounding.

    >>> thin(bits=2).merge_codec.bits
    2
    """
    codec = Quantize(bits, stochastic=True)
    space = MAPO(k=k, redraw_every=redraw_every)
    return Method(space=space, up=codec, down=codec, merge_codec=codec, client_opt=SGD(lr))
