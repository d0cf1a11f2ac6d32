"""Training in a random subspace of the whole model: MAPA, MAPAX, MAPO, their papers' settings, and MAPO in 4 bits.

The random matrix is scaled so that a step has in expectation FedAvg's size (`scale = "isometric"`), so clients use the
learning rate of the task. The `-paper` presets have entries N(0, 1) as drawn, which lengthen a step by p on average:
their learning rates, a tenth of the printed ones, are smaller than FedAvg's.

MAPO with few bits in every message: the method of this project for the thinnest links.

Training by forward passes alone: clients send a few slopes of the loss, and everyone replays them from the seed.

EvoFed and Ferret: updates are sent as values of a shared random population.
"""

from __future__ import annotations

from typing import Any

from thinwire.codecs import ErrorFeedback, Lattice, LatticeSum, Threshold
from thinwire.core.registry import register
from thinwire.methods.fedavg import on
from thinwire.optimizers import SGD, ForwardSGD
from thinwire.protocol.method import Method
from thinwire.sketches import EvoFed
from thinwire.spaces import MAPA, MAPAX, MAPO

_AS_PRINTED: dict[str, Any] = {"entries": "gaussian", "normalize": "none", "layout": "contiguous", "scale": "unit"}


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
@on("cifar10", p=1024, lr=0.0004)
def mapa_paper(p: int = 128, lr: float = 0.0006) -> Method:
    """MAPA with the paper's basis: Gaussian entries as drawn, anew in every round.

        vec(W) = vec(W0) + A b          A ~ N(0, 1)

    Args:
        p: trained parameters.
        lr: learning rate of the clients.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapa_paper().space.normalize
    'none'
    """
    return Method(space=MAPA(p=p, **_AS_PRINTED), client_opt=SGD(lr))


@register("method", "mapax-paper", paper="MAPA: Model-agnostic projection adaptation")
@on("cifar10", budget=1024, lr=0.0004)
def mapax_paper(segment: int = 1024, budget: int = 128, lr: float = 0.0006) -> Method:
    """MAPAX with the paper's basis: Gaussian entries as drawn, neighboring weights in a segment.

        rows of W, reshaped to (k, e) = rows of W0 + B A          A ~ N(0, 1)

    Args:
        segment: weights in a segment.
        budget: number of trained parameters, approximately.
        lr: learning rate of the clients.

    Paper: MAPA: Model-agnostic projection adaptation.

    >>> mapax_paper().space.layout
    'contiguous'
    """
    return Method(space=MAPAX(segment=segment, budget=budget, **_AS_PRINTED), client_opt=SGD(lr))


@register("method", "mapo-paper", paper="MAPO: Reshape-then-factorize")
@on("cifar10", k=1024, lr=0.003)
def mapo_paper(k: int = 128, lr: float = 0.02) -> Method:
    """MAPO with the paper's basis: Gaussian entries as drawn, for one round; neighboring weights in a segment.

        W, reshaped to (k, d / k) = W0 + b a          a ~ N(0, 1)

    Args:
        k: trained parameters.
        lr: learning rate of the clients.

    Paper: MAPO: Reshape-then-factorize.

    >>> mapo_paper().space.entries, mapo_paper().space.redraw_every
    ('gaussian', 1)
    """
    return Method(space=MAPO(k=k, **_AS_PRINTED), client_opt=SGD(lr))


@register("method", "thin", paper="composed here: MAPO, updates on a lattice, error feedback")
def thin(k: int = 0, up: float = 3.0, down: float = 2.0, redraw_every: int = -1) -> Method:
    """MAPO with about one bit a value in both directions, and exact short sums for clients that missed rounds.

        b <- b + D(mean_i L(b_i - b))          after `redraw_every` rounds:  W0 <- W0 + b a

    L rounds to levels whose distance is a power of two near `up` times the root mean square of the values, shifted by
    a random number of each value that both ends draw (dither): without bias. D rounds to the nearest multiple of a
    power of two near `down` times theirs, with error feedback. Such multiples add up exactly, so what a client missed
    of a basis is one vector of small integers.

    Args:
        k: trained parameters; 0 derives them from the number of weights, floor(2 d^(2/3)).
        up: distance of the levels of uploads, in root mean squares.
        down: distance of the levels of downloads.
        redraw_every: rounds for which a direction is kept; -1 for ten, or fewer in a run of less than 500 rounds.

    Not from a paper: a composition of MAPO, subtractive dither and error feedback.

    >>> thin().space.sizes(11274).k
    1005
    """
    return Method(
        space=MAPO(k=k, redraw_every=redraw_every),
        up=Lattice(up, dither=True),
        down=ErrorFeedback(Lattice(down)),
        merge_codec=LatticeSum(),
    )


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


@register("method", "evofed", paper="Rahimi et al., NeurIPS 2023")
@on("mnist", population=1024)
@on("cifar10", population=32, sigma=0.42, partitions=200, server_lr=0.0467)
# The published rate suits longer runs; of 0.0427, 0.1, 0.3, 1, 2 and 4 this one had the best accuracy in 60 rounds.
@on("digits", server_lr=4.0)
def evofed(population: int = 128, sigma: float = 0.35, partitions: int = 1, server_lr: float = 0.0427) -> Method:
    """EvoFed: clients upload the fitness of shared random perturbations, the distance to their trained weights.

        F_j = rank(-|w + sigma z_j - w_i|)          w <- w + server_lr / (n sigma) sum_j mean(F)_j z_j

    The perturbations z_j are drawn from the shared seed, in pairs z and -z.

    Args:
        population: n, the number of perturbations and of uploaded values per partition; even.
        sigma: standard deviation of the perturbations.
        partitions: parts of the model, each with a population of its own.
        server_lr: learning rate of the server.

    Paper: EvoFed: Leveraging Evolutionary Strategies for Communication-Efficient Federated Learning (Rahimi et al.,
    NeurIPS 2023).

    >>> evofed(population=32).sketch.population
    32
    """
    sketch = EvoFed(population=population, sigma=sigma, partitions=partitions)
    return Method(sketch=sketch, server_opt=SGD(server_lr))


@register("method", "ferret", paper="Shu et al., ICML 2025")
@on("digits", server_lr=0.5)  # of three (docs/results/seeds-digits.md)
def ferret(population: int = 16, partitions: int = 16, server_lr: float = 1.0) -> Method:
    """Ferret: clients train by backward passes and upload their update projected on random directions, by blocks.

        c_j = z_j . delta          w <- w + server_lr * 2 / n sum_j mean(c)_j z_j          j = 1 .. n / 2, in each block

    `evofed` with squared distances and without ranks. The update is unbiased; its error is d / (blocks n / 2) times the
    length of delta squared, so a smaller learning rate of the server is needed where few values are sent.

    Args:
        population: n, twice the number of directions and of uploaded values of a block; even.
        partitions: blocks of the weights, of equal size.
        server_lr: learning rate of the server.

    Paper: Ferret: Federated Full-Parameter Tuning at Scale for Large Language Models (Shu et al., ICML 2025).

    >>> ferret(partitions=4).sketch.paired
    True
    """
    sketch = EvoFed(population, sigma=1.0, partitions=partitions, shaping="none", fitness="square", paired=True)
    return Method(sketch=sketch, server_opt=SGD(server_lr))
