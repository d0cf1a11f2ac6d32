"""No single client can be told from the result: differential privacy, with a trusted server or under masked sums.

Papers: McMahan et al., ICLR 2018 (clients as the unit); De et al., 2022 (division by the bound); Canonne, Kamath and
Steinke, NeurIPS 2020 (discrete Gaussian); Kairouz, Liu and Steinke, ICML 2021 (sums of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.tree import Tree, flatten, scale, unflatten
from thinwire.errors import ConfigError
from thinwire.privacy import accountant
from thinwire.privacy.base import Privacy
from thinwire.privacy.discrete import MOST_VARIANCE, discrete_gaussian
from thinwire.privacy.lattice import LONGEST, length, onto_lattice

_RING = 1 << 31  # sums under masks must be smaller than that in size
_FAR = 12  # standard deviations of noise that they have room for: more come once in 10^32 numbers
_SLACK = 2.0**-40  # by how much, relatively, a sum of discrete Gaussians may be worse than one of them
_NUMBERS = 1 << 40  # more numbers than any model has


class Lattice(NamedTuple):
    """The whole numbers in which changes are added up: a change of length `clip` is 2^bits steps long."""

    bits: int
    variance: int  # V of the noise that one party adds, in steps; 0 for none

    @property
    def most(self) -> int:
        """How long one client's change may be, in steps."""
        return 1 << self.bits


@register("privacy", "dp", paper="McMahan et al., ICLR 2018; De et al., 2022; Kairouz et al., ICML 2021")
@dataclass(frozen=True)
class DP(Privacy):
    """Clip each client's change and add discrete Gaussian noise to the sum; with Adam at the server, DP-FedAdam.

        z_i = round(2^k D_i min(1, clip / |D_i|) / clip)                 whole numbers, |z_i| <= 2^k
        released = (sum_i z_i + N_Z(0, V)) / (2^k n),    V = ceil((2^k s)^2),    s = sigma n / cohort

    The server clips what it decoded, so messages stay as sparse as their codec makes them; the noise is dense. All is
    added in whole numbers, so a released number says nothing but one whole number, to which any other cohort can have
    led as well. 2^k is the largest power of two up to 2^28 / s and 2^30. What is released is in units of `clip`: Adam
    at the server does not care, other optimizers need a rate that does. With sigma = 0 there is no noise and no
    lattice: D_i / clip is averaged as it is.

    Under masked sums (`secure_aggregation = true`) each client clips and rounds the numbers that its codec made and adds
    N_Z(0, ceil((2^k s)^2 / n)), and the server sees the sum only. It has 32 bits: 2^k (n + 12 s) <= 2^31.

    Args:
        clip: the largest norm that a client's change, all blocks together, counts with.
        sigma: the noise on the sum of `cohort` clients, in units of `clip`.
        cohort: plays a larger cohort than the n clients of a round: as much noise as its mean would have; 0 means n,
            and `sigma` is the noise that is added.
        delta: the probability with which the epsilon that is told may fail; below one by the number of clients.
        population: plays so many clients in all, for epsilon; 0 means those of the task that may be asked.

    >>> from functools import partial
    >>> from thinwire.core.tree import weighted_mean
    >>> part = DP(clip=5.0, sigma=0.5)
    >>> one, two = {"w": torch.tensor([6.0, 8.0])}, {"w": torch.tensor([0.0, 2.5])}
    >>> mean = partial(weighted_mean, weights=[1, 1])
    >>> released = part.aggregate([one, two], mean, 2, Key(0))["w"]    # ((0.6, 0.8) + (0, 0.5) + noise) / 2
    >>> [round(x, 3) for x in released.tolist()], part.lattice(2) == Lattice(bits=29, variance=2**56)
    ([-0.148, 1.169], True)

    A simulation draws its noise from the run's seed, so that runs can be repeated: who knows the seed can take it away
    again. A deployment draws it from a key of its own.
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
        """True: each client's update is clipped."""
        return True

    @property
    def masked(self) -> DP:
        """The mechanism itself: clients can add their share of the noise."""
        return self

    def bound(self, code: Tree, key: Key) -> Tree:
        """Unchanged: a trusted server clips, and under masked sums what is added to them is clipped."""
        return code

    def accept(self, code: Tree) -> Tree:
        """One client's change, shortened to `clip` where it is longer."""
        norm = length(flatten(code))
        return code if norm <= self.clip else scale(code, self.clip / norm)

    # -- a trusted server ------------------------------------------------------------------------------------------

    def aggregate(self, codes: Sequence[Tree], mean: Callable[[Sequence[Tree]], Tree], clients: int, key: Key) -> Tree:
        """The sum of clipped changes and noise in whole numbers, and then divided."""
        if not self.sigma:
            return scale(mean([self.accept(code) for code in codes]), 1 / self.clip)
        lattice = self.lattice(clients)
        total = sum((self._rounded(flatten(code), lattice) for code in codes), torch.zeros((), dtype=torch.int64))
        noise = torch.from_numpy(discrete_gaussian(total.numel(), lattice.variance, key))
        released = unflatten((total + noise).double() / (lattice.most * clients), codes[0])
        return {name: block.to(codes[0][name].dtype) for name, block in released.items()}

    def lattice(self, clients: int) -> Lattice:
        """The lattice of a sum of so many clients, as fine as the sampler allows."""
        s = self._spread(clients)
        for bits in range(LONGEST.bit_length() - 1, -1, -1):
            if (variance := math.ceil((s * 2**bits) ** 2)) <= MOST_VARIANCE:
                return Lattice(bits, variance)
        raise ConfigError(f"noise of {float(s):.3g} clips is more than 2^28, the most that can be drawn")

    def _spread(self, clients: int) -> Fraction:
        """s: the standard deviation of the noise on a sum of so many clients, in units of `clip`."""
        return Fraction(self.sigma) * clients / (self.cohort or clients)

    def _rounded(self, x: torch.Tensor, lattice: Lattice) -> torch.Tensor:
        """z of one client."""
        return onto_lattice(x, lattice.most / self.clip, lattice.most)

    # -- masked sums -----------------------------------------------------------------------------------------------

    def check_clients(self, clients: int) -> None:
        """Raise a ConfigError if sums of so many clients do not fit into 32 bits."""
        self.masked_lattice(clients)

    def add_to_sum(self, x: np.ndarray, clients: int, key: Key) -> np.ndarray:
        """One client's z and its share of the noise."""
        lattice = self.masked_lattice(clients)
        z: np.ndarray = self._rounded(torch.from_numpy(np.array(x)), lattice).numpy()
        return z + discrete_gaussian(z.size, lattice.variance, key) if lattice.variance else z

    def of_sum(self, total: np.ndarray, clients: int) -> np.ndarray:
        """The sum in units of `clip`, divided."""
        return total / float(self.masked_lattice(clients).most * clients)

    def masked_lattice(self, clients: int) -> Lattice:
        """The finest lattice whose sums fit into 32 bits, and the noise of one client."""
        s = self._spread(clients)
        room = int(_RING / (clients + _FAR * s))
        lattice = Lattice(bits := max(0, room.bit_length() - 1), math.ceil((s * 2**bits) ** 2 / clients))
        small = s and accountant.gap(clients, lattice.variance, _NUMBERS) * s > _SLACK
        if room < 1 or small or lattice.variance > MOST_VARIANCE:
            raise ConfigError(
                f"sums of {clients} clients under masks have 32 bits, in which noise of sigma = {self.sigma} cannot be "
                f"shared out: each would add {math.sqrt(lattice.variance):.3g} steps. Ask fewer clients in a round, or "
                "write secure_aggregation = false"
            )
        return lattice

    # -- what it promises ------------------------------------------------------------------------------------------

    def epsilon(self, clients: int, population: int, rounds: int, delta: float | None = None) -> float:
        """An upper bound on the epsilon of a whole run, if every client is drawn by itself each round.

        Two runs are told apart that differ in one client, which in one of them adds nothing. See `accountant`.

        Args:
            clients: in a round; where `cohort` is given, that counts instead.
            population: all clients that may be asked; where `population` is given, that counts instead.
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
        c = (1 + _SLACK) / self.sigma
        return accountant.epsilon(c, asked / everybody, rounds, self.delta if delta is None else delta)

    def spent(self, clients: int, population: int, rounds: int) -> tuple[float | None, str]:
        """The epsilon of the rounds so far, or None and why there is none."""
        try:
            epsilon = self.epsilon(clients, population, rounds)
        except ConfigError as error:
            return None, str(error)
        return (epsilon, "") if math.isfinite(epsilon) else (None, "sigma = 0 adds no noise, so nothing is promised")
