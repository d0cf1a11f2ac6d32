"""Corrections of client drift: FedProx, SCAFFOLD, FedDyn, FedNova; and the correction that changes nothing."""

from __future__ import annotations

import torch

from thinwire.core.registry import register_part
from thinwire.core.text import BelowOne, NonNegativeFloat, PositiveFloat
from thinwire.core.tree import Tree, scale, sub, tmap, zeros_like
from thinwire.errors import WireError
from thinwire.optimizers.base import Correction


@register_part("correction", "none")
class NoCorrection(Correction):
    """Use gradients and the mean update unchanged.

    >>> NoCorrection().gradient({"w": torch.ones(1)}, {}, {}, {}, {})["w"].tolist()
    [1.0]
    """

    active = False


@register_part("correction", "fedprox", paper="Li et al., MLSys 2020")
class FedProx(Correction):
    """Add a proximal term to the local loss that pulls toward the coordinates at the start of the round.

        g <- g + mu (w - w_start),    the gradient of (mu / 2) |w - w_start|^2

    Args:
        mu: strength of the proximal term; 0 is FedAvg.

    >>> here, start = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    >>> FedProx(mu=0.5).gradient({"w": torch.zeros(1)}, here, start, {}, {})["w"].tolist()
    [1.0]

    Not a penalty (`L1L2`), which pulls toward zero.
    """

    mu: NonNegativeFloat = 0.1

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """Add the gradient of the proximal term."""
        return tmap(lambda g, w, w0: g + self.mu * (w - w0), grads, coords, start)


@register_part("correction", "scaffold", paper="Karimireddy et al., ICML 2020")
class Scaffold(Correction):
    """Replace the client's own mean gradient by that of all clients (SCAFFOLD, option II).

        g <- g - c_i + c;    after K steps  c_i' = c_i - c - (w - w_start) / (K lr)
        server:  c <- c + (m / N) mean(c_i' - c_i)

    The control variate c is shared: its update is a field of uploads and downloads, so both have twice the size. The
    formula for c_i holds for plain SGD; with momentum or weight decay it is biased. With equal weights
    (`client_weight = "uniform"`) c is exactly the mean of all c_i.

    >>> one = {"w": torch.ones(1)}
    >>> Scaffold().gradient(one, {}, {}, {"w": 3 * one["w"]}, {"w": 5 * one["w"]})["w"].tolist()
    [3.0]
    """

    def init_client(self, coords: Tree) -> Tree:
        """Return c_i = 0."""
        return zeros_like(coords)

    def init_shared(self, coords: Tree) -> Tree:
        """Return c = 0."""
        return zeros_like(coords)

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """Return g - c_i + c."""
        return tmap(lambda g, ci, c: g - ci + c, grads, mine, shared)

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Return c_i' and, as the report, c_i' - c_i."""
        new = tmap(lambda ci, c, d: ci - c - d / (steps * lr), mine, shared, moved)
        return new, sub(new, mine)

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """Update c by the mean report times the fraction of participating clients."""
        return delta, scale(report, fraction), state


@register_part("correction", "feddyn", paper="Acar et al., ICLR 2021")
class FedDyn(Correction):
    """Add a linear and a proximal term to the local loss, so that local and global optimum agree (FedDyn).

        g <- g - g_i + alpha (w - w_start);    g_i <- g_i - alpha (w_end - w_start)
        server:  h <- h - alpha (m / N) mean(change),    change <- mean(change) - h / alpha

    With equal weights (`client_weight = "uniform"`) h is exactly the mean of all g_i. Uploads and downloads have the
    size of FedAvg.

    Args:
        alpha: strength of the proximal term.

    >>> zero, one = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> FedDyn(alpha=0.5).gradient(zero, one, zero, {"w": torch.full((1,), 0.25)}, {})["w"].tolist()
    [0.25]
    """

    alpha: PositiveFloat = 0.1

    def init_client(self, coords: Tree) -> Tree:
        """Return g_i = 0."""
        return zeros_like(coords)

    def init_server(self, coords: Tree) -> Tree:
        """Return h = 0."""
        return zeros_like(coords)

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """Return g - g_i + alpha (w - w_start)."""
        return tmap(lambda g, gi, w, w0: g - gi + self.alpha * (w - w0), grads, mine, coords, start)

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Return the next g_i and an empty report."""
        return tmap(lambda gi, d: gi - self.alpha * d, mine, moved), {}

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """Update h and subtract h / alpha from the mean update."""
        h = tmap(lambda d, old: old - self.alpha * fraction * d, delta, state)
        return tmap(lambda d, new: d - new / self.alpha, delta, h), {}, h


@register_part("correction", "fednova", paper="Wang et al., NeurIPS 2020")
class FedNova(Correction):
    """Normalize each client's update by its number of local steps (FedNova).

        change = (sum p_i tau_i) (sum p_i change_i / tau_i),    tau_i = local steps of client i

    Every client reports its number of steps, four bytes of the upload. Where all clients take the same number of steps
    this is FedAvg.

    Args:
        momentum: momentum of the clients' SGD, if any: then tau_i is the sum of the factors on gradients,
            (tau - momentum (1 - momentum^tau) / (1 - momentum)) / (1 - momentum).

    >>> nova = FedNova()
    >>> [nova.factor(nova.finish({}, steps, 0.1, {}, {})[1]) for steps in (1, 4)]
    [1.0, 0.25]

    The formula for tau_i holds for SGD only. If a block accumulates over several rounds before it is synchronized, only
    the steps of the last round count.
    """

    momentum: BelowOne = 0.0

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Report tau_i."""
        rho = self.momentum
        tau = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return mine, {"steps": torch.tensor(tau, dtype=torch.float32)}

    def factor(self, report: Tree) -> float:
        """Return 1 / tau_i."""
        steps = float(report["steps"])
        if not 0.999 <= steps <= 2**32:  # 1, or 1 after rounding
            raise WireError(f"a client reports {steps} local steps; expected from 1 to 2**32")
        return 1 / steps

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """Multiply the mean update by the mean of tau_i."""
        return scale(delta, float(report["steps"])), {}, state
