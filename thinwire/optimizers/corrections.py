"""Local steps that do not drift apart: FedProx, SCAFFOLD, FedDyn, FedNova; and the correction that corrects nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.core.registry import register
from thinwire.core.tree import Tree, scale, sub, tmap, zeros_like
from thinwire.errors import ConfigError, WireError


@register("correction", "none")
@dataclass(frozen=True)
class NoCorrection:
    """Follow the gradient as it is."""

    def init_client(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def init_shared(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def init_server(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """Unchanged."""
        return grads

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Nothing to remember, nothing to report."""
        return mine, {}

    def factor(self, report: Tree) -> float:
        """Changes count as they are."""
        return 1.0

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """Unchanged."""
        return delta, {}, state


@register("correction", "fedprox", paper="Li et al., MLSys 2020")
@dataclass(frozen=True)
class FedProx(NoCorrection):
    """Pull every local step back towards where the round began.

        g <- g + mu (w - w_start),    the gradient of (mu / 2) |w - w_start|^2

    >>> import torch
    >>> here, start = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    >>> FedProx(mu=0.5).gradient({"w": torch.zeros(1)}, here, start, {}, {})["w"].tolist()
    [1.0]
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ConfigError(f"mu must be 0 or more, not {self.mu}; write for example mu = 0.1")

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """With the pull added."""
        return tmap(lambda g, w, w0: g + self.mu * (w - w0), grads, coords, start)


@register("correction", "scaffold", paper="Karimireddy et al., ICML 2020")
@dataclass(frozen=True)
class Scaffold:
    """Take out of every local step what is peculiar to the client (SCAFFOLD, option II).

        g <- g - c_i + c;    after K steps  c_i' = c_i - c - (w - w_start) / (K lr)
        server:  c <- c + (m / N) mean(c_i' - c_i)

    c, the mean direction, is known to everyone and travels both ways beside the change: bytes double, visibly. The
    formula for c_i holds for plain SGD; with momentum or weight decay it is biased. With equal weights
    (`client_weight = "uniform"`) c is the mean of all c_i, exactly.
    """

    def init_client(self, coords: Tree) -> Tree:
        """The client's own direction, 0 at first."""
        return zeros_like(coords)

    def init_shared(self, coords: Tree) -> Tree:
        """The mean direction, 0 at first."""
        return zeros_like(coords)

    def init_server(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """The client's direction out, the mean direction in."""
        return tmap(lambda g, ci, c: g - ci + c, grads, mine, shared)

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """The new direction, and by how much it differs from the old one."""
        new = tmap(lambda ci, c, d: ci - c - d / (steps * lr), mine, shared, moved)
        return new, sub(new, mine)

    def factor(self, report: Tree) -> float:
        """Changes count as they are."""
        return 1.0

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """The mean direction moves by the share of clients that took part."""
        return delta, scale(report, fraction), state


@register("correction", "feddyn", paper="Acar et al., ICLR 2021")
@dataclass(frozen=True)
class FedDyn:
    """Give every client a linear term that makes its own optimum the common one (FedDyn).

        g <- g - g_i + alpha (w - w_start);    g_i <- g_i - alpha (w_end - w_start)
        server:  h <- h - alpha (m / N) mean(change),    change <- mean(change) - h / alpha

    With equal weights (`client_weight = "uniform"`) h is the mean of all g_i, exactly. Nothing is sent beside the change.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ConfigError(f"alpha must be above 0, not {self.alpha}; write for example alpha = 0.1")

    def init_client(self, coords: Tree) -> Tree:
        """g_i, 0 at first."""
        return zeros_like(coords)

    def init_shared(self, coords: Tree) -> Tree:
        """No memory."""
        return {}

    def init_server(self, coords: Tree) -> Tree:
        """h, 0 at first."""
        return zeros_like(coords)

    def gradient(self, grads: Tree, coords: Tree, start: Tree, mine: Tree, shared: Tree) -> Tree:
        """With the linear term and the pull towards the start."""
        return tmap(lambda g, gi, w, w0: g - gi + self.alpha * (w - w0), grads, mine, coords, start)

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """The next linear term; nothing to report."""
        return tmap(lambda gi, d: gi - self.alpha * d, mine, moved), {}

    def factor(self, report: Tree) -> float:
        """Changes count as they are."""
        return 1.0

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """The mean change, less the server's own memory."""
        h = tmap(lambda d, old: old - self.alpha * fraction * d, delta, state)
        return tmap(lambda d, new: d - new / self.alpha, delta, h), {}, h


@register("correction", "fednova", paper="Wang et al., NeurIPS 2020")
@dataclass(frozen=True)
class FedNova(NoCorrection):
    """Let clients that take more local steps than others not pull the mean towards themselves (FedNova).

        change = (sum p_i tau_i) (sum p_i change_i / tau_i),    tau_i = local steps of client i

    Every client reports its number of steps, four bytes beside the change. Where all take the same number this is plain
    averaging.

    Args:
        momentum: that of the clients' SGD, if any: then tau_i is the sum of the weights that steps gave to gradients,
            (tau - momentum (1 - momentum^tau) / (1 - momentum)) / (1 - momentum).

    >>> nova = FedNova()
    >>> [nova.factor(nova.finish({}, steps, 0.1, {}, {})[1]) for steps in (1, 4)]
    [1.0, 0.25]

    The formula for tau_i is for SGD. Where blocks are held back for several rounds, the steps of the last one count.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be from 0 up to, not including, 1, not {self.momentum}")

    def finish(self, moved: Tree, steps: int, lr: float, mine: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Nothing to remember; how many steps it was."""
        rho = self.momentum
        tau = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return mine, {"steps": torch.tensor(tau, dtype=torch.float32)}

    def factor(self, report: Tree) -> float:
        """The change of one step."""
        steps = float(report["steps"])
        if not 0.999 <= steps <= 2**32:  # one, or a rounding below
            raise WireError(f"a client says that it took {steps} steps; expected from 1 to 2**32")
        return 1 / steps

    def server(self, delta: Tree, report: Tree, fraction: float, state: Tree) -> tuple[Tree, Tree, Tree]:
        """As many steps as clients took on average."""
        tau = float(report["steps"])
        return scale(delta, tau), {}, state
