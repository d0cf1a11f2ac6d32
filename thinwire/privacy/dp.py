"""No single client can be told from the result: differential privacy with a trusted server.

Papers: McMahan et al., ICLR 2018 (clients as the unit); De et al., 2022 (division by the bound).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

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
        delta: the probability with which the epsilon that is told may fail; below one by the number of clients.
        population: plays so many clients in all, for epsilon; 0 means those of the task.

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
    delta: float = field(default=1e-5, repr=False)  # no message depends on these
    population: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be above 0, not {self.clip}; write for example clip = 0.1")
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(f"sigma must be 0 (no noise) or more, not {self.sigma}")
        if self.cohort < 0:
            raise ConfigError(f"cohort must be 0 (as many as there are) or a number of clients, not {self.cohort}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must be between 0 and 1, not {self.delta}; write for example delta = 1e-5")
        if self.population < 0:
            raise ConfigError(f"population must be 0 (the task's) or a number of clients, not {self.population}")

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

    def epsilon(self, clients: int, population: int, rounds: int, delta: float | None = None) -> float:
        """The epsilon of a whole run, by its privacy loss distribution, if every client is drawn by itself each round.

        Args:
            clients: in a round; where `cohort` is given, that counts instead.
            population: all clients there are; where `population` is given, that counts instead.
            rounds: rounds of the run.
            delta: the probability with which epsilon may fail; None takes the part's own.
        """
        asked, everybody = self.cohort or clients, self.population or population
        if not 1 <= asked <= everybody:
            raise ConfigError(
                f"{asked} clients a round of {everybody} in all cannot be; write for example "
                f"privacy.population = {10 * asked}"
            )
        if not self.sigma:
            return math.inf
        losses = _one_round(self.sigma, asked / everybody).self_compose(rounds)
        return float(losses.get_epsilon_for_delta(self.delta if delta is None else delta))

    def spent(self, clients: int, population: int, rounds: int) -> tuple[float | None, str]:
        """The epsilon of the rounds so far, or None and why there is none."""
        try:
            epsilon = self.epsilon(clients, population, rounds)
        except ConfigError as error:
            return None, str(error)
        return (epsilon, "") if math.isfinite(epsilon) else (None, "sigma = 0 adds no noise, so nothing is promised")


@lru_cache(maxsize=4)
def _one_round(sigma: float, share: float) -> Any:
    """The loss of one round in which each client is drawn with this probability.

    Losses are rounded to thousandths, such that epsilon comes out larger if anything: by less than 0.1 % in what was
    tried, and ten times as fast as with the accountant's own step.
    """
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise ConfigError("epsilon needs the package dp-accounting: pip install 'thinwire[dp]'") from error
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=share, value_discretization_interval=1e-3
    )
