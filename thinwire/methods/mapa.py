"""Training in a random subspace of the whole model: MAPA, MAPAX, MAPO, their papers' settings, and MAPO in 4 bits.

The random matrix is scaled so that a step has in expectation FedAvg's size (`scale = "isometric"`), so clients use the
learning rate of the task. The `-paper` presets have rows of unit length, which shrink a step by k / d: their learning
rates are larger than FedAvg's.
"""

from __future__ import annotations

from thinwire.core.registry import register
from thinwire.methods.base import on
from thinwire.optimizers import SGD
from thinwire.protocol.method import Method
from thinwire.spaces import MAPA, MAPAX, MAPO


@register("method", "mapa", paper="MAPA: Model-agnostic projection adaptation")
@on("cifar10", p=1024)
def mapa(p: int = 128) -> Method:
    """MAPA: train p coefficients of shared random directions of the whole model, redrawn every round.

        vec(W) = vec(W0) + A b          A: (d, p), drawn from the shared seed;   b: (p,), trained and sent

    Args:
        p: trained parameters.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapa(p=64).space.p
    64
    """
    return Method(space=MAPA(p=p))


@register("method", "mapax", paper="MAPA: Model-agnostic projection adaptation")
@on("cifar10", budget=1024)
def mapax(segment: int = 1024, budget: int = 128) -> Method:
    """MAPAX: cut the weights into k segments that share p random directions, and train k p coefficients.

        rows of W, reshaped to (k, e) = rows of W0 + B A          A: (p, e), drawn;   B: (k, p), trained and sent

    with k = ceil(d / segment) and p = max(1, round(budget / k)).

    Args:
        segment: weights in a segment.
        budget: number of trained parameters, approximately.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapax(segment=64, budget=1000).space.sizes(11274)
    Sizes(k=177, p=6, e=64)
    """
    return Method(space=MAPAX(segment=segment, budget=budget))


@register("method", "mapo", paper="MAPO: Reshape-then-factorize")
@on("fashion-mnist", redraw_every=10)
def mapo(k: int = 0, redraw_every: int = 1) -> Method:
    """MAPO: cut the weights into k segments that share one random direction, and train k coefficients.

        W, reshaped to (k, d / k) = W0 + b a          a: (1, d / k), drawn from the shared seed;   b: (k, 1), trained

    Args:
        k: trained parameters; 0 derives them from the number of weights, floor(2 d^(2/3)).
        redraw_every: rounds for which a direction is kept; 0 keeps it for the whole run.

    Paper: MAPO: Reshape-then-factorize.

    >>> mapo(k=64).space.k
    64
    >>> mapo().space.sizes(11274).k
    1005
    """
    return Method(space=MAPO(k=k, redraw_every=redraw_every))


@register("method", "mapa-paper", paper="MAPA: Model-agnostic projection adaptation")
@on("cifar10", p=1024, lr=1.0)
def mapa_paper(p: int = 128, lr: float = 3.0) -> Method:
    """MAPA with the paper's basis: Gaussian directions of unit length.

        vec(W) = vec(W0) + A b          columns of A: Gaussian, of norm 1

    Args:
        p: trained parameters.
        lr: learning rate of the clients. Unit directions shrink a step by p / d.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapa_paper().space.scale
    'unit'
    """
    return Method(space=MAPA(p=p, entries="gaussian", scale="unit"), client_opt=SGD(lr))


@register("method", "mapax-paper", paper="MAPA: Model-agnostic projection adaptation")
@on("cifar10", budget=1024, lr=1.0)
def mapax_paper(segment: int = 1024, budget: int = 128, lr: float = 3.0) -> Method:
    """MAPAX with the paper's basis: Gaussian directions of unit length, neighboring weights in a segment.

        rows of W, reshaped to (k, e) = rows of W0 + B A          rows of A: Gaussian, of norm 1

    Args:
        segment: weights in a segment.
        budget: number of trained parameters, approximately.
        lr: learning rate of the clients. Unit directions shrink a step by k p / d.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapax_paper().space.layout
    'contiguous'
    """
    space = MAPAX(segment=segment, budget=budget, entries="gaussian", layout="contiguous", scale="unit")
    return Method(space=space, client_opt=SGD(lr))


@register("method", "mapo-paper", paper="MAPO: Reshape-then-factorize")
@on("cifar10", k=1024, lr=1.0)
def mapo_paper(k: int = 128, lr: float = 3.0) -> Method:
    """MAPO with the paper's basis: Gaussian, of unit length, for one round; neighboring weights in a segment.

        W, reshaped to (k, d / k) = W0 + b a          a: Gaussian, of norm 1

    Args:
        k: trained parameters.
        lr: learning rate of the clients. A unit direction shrinks a step by k / d.

    Paper: MAPO: Reshape-then-factorize.

    >>> mapo_paper().space.entries, mapo_paper().space.redraw_every
    ('gaussian', 1)
    """
    space = MAPO(k=k, entries="gaussian", layout="contiguous", scale="unit")
    return Method(space=space, client_opt=SGD(lr))
