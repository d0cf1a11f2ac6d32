"""No single client can be told from the result: differential privacy with a trusted server.

Papers: McMahan et al., ICLR 2018 (clients as the unit); De et al., 2022 (division by the bound).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from thinwire.core.registry import register
from thinwire.core.rng import Key
from thinwire.core.tree import Tree, scale
from thinwire.errors import ConfigError


@register("privacy", "dp", paper="McMahan et al., ICLR 2018; De et al., 2022")
@dataclass(frozen=True)
class DP:
    """Let no client add more than so much, and hide the rest in noise; with Adam at the server, DP-FedAdam.

        D_i <- D_i min(1, clip / |D_i|),    released = (sum_i D_i / clip + N(0, s^2)) / n,    s = sigma n / cohort

    The server clips what it decoded, so messages stay as sparse as their codec makes them; the noise is dense. What is
    released is in units of `clip`: Adam at the server does not care, other optimisers need a rate that does.

    Args:
        clip: the largest norm that a client's change, all blocks together, counts with.
        sigma: the noise on the sum of `cohort` clients, in units of `clip`.
        cohort: plays a larger cohort than the n clients of a round: as much noise as its mean would have; 0 means n,
            and `sigma` is the noise that is added.

    >>> part = DP(clip=5.0, sigma=0.0)
    >>> part.accept({"w": torch.tensor([6.0, 8.0])})["w"].tolist()
    [3.0, 4.0]
    >>> part.release({"w": torch.tensor([3.0, 4.0])}, 10, Key(0))["w"].tolist()
    [0.6000000238418579, 0.800000011920929]

    A simulation: the noise comes from the run's seed, so that runs can be repeated; whoever knows the seed can take it
    away again.
    """

    clip: float = 0.1
    sigma: float = 1.0
    cohort: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be above 0, not {self.clip}; write for example clip = 0.1")
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(f"sigma must be 0 (no noise) or more, not {self.sigma}")
        if self.cohort < 0:
            raise ConfigError(f"cohort must be 0 (as many as there are) or a number of clients, not {self.cohort}")

    @property
    def bounds(self) -> bool:
        """Yes."""
        return True

    def bound(self, code: Tree, key: Key) -> Tree:
        """Unchanged: the server is trusted."""
        return code

    def accept(self, code: Tree) -> Tree:
        """Shortened to `clip` where it is longer."""
        squares = [torch.linalg.vector_norm(block, dtype=torch.float64).square() for block in code.values()]
        norm = math.sqrt(float(sum(squares)))
        return code if norm <= self.clip else scale(code, self.clip / norm)

    def release(self, mean: Tree, clients: int, key: Key) -> Tree:
        """The mean in units of `clip`, and noise."""
        mean = scale(mean, 1 / self.clip)
        spread = self.sigma / (self.cohort or clients)
        if not spread:
            return mean
        return {
            name: block + (spread * key.fold(name).normal(*block.shape, device=block.device)).to(block.dtype)
            for name, block in mean.items()
        }

    def epsilon(self, clients: int, population: int, rounds: int, delta: float) -> float:
        """The epsilon of a whole run, by Renyi accounting, if every client is drawn by itself in every round.

        Args:
            clients: in a round; where `cohort` is given, that counts instead.
            population: all clients there are.
            rounds: rounds of the run.
            delta: the probability with which epsilon may fail; below 1 / population.
        """
        try:
            import dp_accounting
            from dp_accounting.rdp import RdpAccountant
        except ImportError as error:
            raise ConfigError("epsilon needs the package dp-accounting: pip install 'thinwire[dp]'") from error
        asked = self.cohort or clients
        if not 1 <= asked <= population:
            raise ConfigError(f"{asked} clients a round of {population} in all cannot be; give the whole population")
        if not self.sigma:
            return math.inf
        one = dp_accounting.PoissonSampledDpEvent(asked / population, dp_accounting.GaussianDpEvent(self.sigma))
        accountant = RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(one, rounds))
        return float(accountant.get_epsilon(delta))
