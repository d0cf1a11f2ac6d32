"""Client-level differential privacy, with a trusted server or with secure aggregation.

Papers: McMahan et al., ICLR 2018 (client-level DP); De et al., 2022 (normalization by the clipping norm); Canonne,
Kamath and Steinke, NeurIPS 2020 (discrete Gaussian); Kairouz, Liu and Steinke, ICML 2021 (distributed discrete
Gaussian).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from thinwire.core.key import Key
from thinwire.core.registry import register_part
from thinwire.core.text import NonNegativeFloat, NonNegativeInt, PositiveFloat, ProperShare
from thinwire.core.tree import Tree, flatten, scale, unflatten
from thinwire.errors import ConfigError
from thinwire.privacy import accountant
from thinwire.privacy.base import MaskedPrivacy, Privacy
from thinwire.privacy.discrete import MOST_VARIANCE, discrete_gaussian
from thinwire.privacy.lattice import LONGEST, length, onto_lattice

_RING = 1 << 31  # masked sums must be smaller than this in magnitude
_FAR = 12  # standard deviations of noise that the ring must hold: exceeded once in 10^32 values
_SLACK = 2.0**-40  # relative loss of a sum of discrete Gaussians compared to a single one
_VALUES = 1 << 40  # more values than any model has


class SumLattice(NamedTuple):
    """The integer grid of the sum: an update of norm `clip` is 2^bits steps long."""

    bits: int
    variance: int  # V of the noise of one party, in steps; 0 without noise

    @property
    def most(self) -> int:
        """The largest norm of the update of one client, in steps."""
        return 1 << self.bits


@register_part("privacy", "dp", paper="McMahan et al., ICLR 2018; De et al., 2022; Kairouz et al., ICML 2021")
class DP(Privacy, MaskedPrivacy):
    """Clip each client's update and add discrete Gaussian noise to the sum; with Adam on the server, DP-FedAdam.

        z_i = round(2^k D_i min(1, clip / |D_i|) / clip)                 integers, |z_i| <= 2^k
        released = (sum_i z_i + N_Z(0, V)) / (2^k n),    V = ceil((2^k s)^2),    s = sigma n / cohort

    The server clips decoded updates, so messages stay as sparse as their codec makes them; the noise is dense. Sums are
    integers, so released values have no floating-point artifacts that could identify the cohort. 2^k is the largest
    power of two up to 2^28 / s and 2^30. The released mean is in units of `clip`: Adam on the server is invariant to
    the scale, other optimizers need a suitable learning rate. With sigma = 0 there is neither noise nor rounding: the
    mean of D_i min(1, clip / |D_i|) / clip is released.

    With secure aggregation (`secure_aggregation = true`) each client clips and rounds the payload of its codec and adds
    N_Z(0, ceil((2^k s)^2 / n)), and the server sees the sum only, of 32 bits: 2^k (n + 12 s) <= 2^31. In a deployment
    clients may drop out, and only t of n are certain to remain: each adds N_Z(0, ceil((2^k s)^2 / t)).

    Args:
        clip: the clipping norm of an update, over all blocks together.
        sigma: the noise multiplier: the standard deviation of the noise on the sum of `cohort` clients, in units of
            `clip`.
        cohort: simulate a larger cohort than the n clients of a round: the noise of the mean is that of this cohort; 0
            means n.
        delta: the delta of (epsilon, delta)-differential privacy; below one divided by the number of clients.
        population: the total number of clients assumed for epsilon; 0 means the participating clients of the task.

    >>> from functools import partial
    >>> from thinwire.core.tree import weighted_mean
    >>> part = DP(clip=5.0, sigma=0.5)
    >>> one, two = {"w": torch.tensor([6.0, 8.0])}, {"w": torch.tensor([0.0, 2.5])}
    >>> mean = partial(weighted_mean, weights=[1, 1])
    >>> released = part.aggregate([one, two], mean, 2, Key(0))["w"]    # ((0.6, 0.8) + (0, 0.5) + noise) / 2
    >>> [round(x, 3) for x in released.tolist()], part.lattice(2) == SumLattice(bits=29, variance=2**56)
    ([-0.148, 1.169], True)

    A simulation draws its noise from the seed of the run, so that it is reproducible; with the seed, the noise can be
    removed. A deployment draws it from a secret key.
    """

    bounds = True
    clip: PositiveFloat = 0.1
    sigma: NonNegativeFloat = 1.0
    cohort: NonNegativeInt = 0
    delta: ProperShare = field(default=1e-5, repr=False)  # messages do not depend on these
    population: NonNegativeInt = field(default=0, repr=False)

    @property
    def masked(self) -> DP:  # type: ignore[override]
        """The mechanism itself: clients can add their share of the noise."""
        return self

    def accept(self, code: Tree) -> Tree:
        """The update of one client, clipped to norm `clip` by a trusted server; in masked sums, `add_to_sum` clips."""
        norm = length(flatten(code))
        return code if norm <= self.clip else scale(code, self.clip / norm)

    # -- trusted server --------------------------------------------------------------------------------------------

    def aggregate(self, codes: Sequence[Tree], mean: Callable[[Sequence[Tree]], Tree], clients: int, key: Key) -> Tree:
        """The mean of clipped updates plus noise, from an integer sum."""
        if not self.sigma:
            return scale(mean([self.accept(code) for code in codes]), 1 / self.clip)
        lattice = self.lattice(clients)
        total = sum((self._rounded(flatten(code), lattice) for code in codes), torch.zeros((), dtype=torch.int64))
        noise = torch.from_numpy(discrete_gaussian(total.numel(), lattice.variance, key))
        released = unflatten((total + noise).double() / (lattice.most * clients), codes[0])
        return {name: block.to(codes[0][name].dtype) for name, block in released.items()}

    def lattice(self, clients: int) -> SumLattice:
        """The lattice of the sum of so many clients, as fine as the noise sampler allows."""
        s = self._spread(clients)
        for bits in range(LONGEST.bit_length() - 1, -1, -1):
            if (variance := math.ceil((s * 2**bits) ** 2)) <= MOST_VARIANCE:
                return SumLattice(bits, variance)
        raise ConfigError(f"noise of {float(s):.3g} times clip is above the limit of 2^28; write a smaller sigma")

    def _spread(self, clients: int) -> Fraction:
        """s: the standard deviation of the noise on the sum of so many clients, in units of `clip`."""
        return Fraction(self.sigma) * clients / (self.cohort or clients)

    def _rounded(self, x: torch.Tensor, lattice: SumLattice) -> torch.Tensor:
        """z_i of one client."""
        return onto_lattice(x, lattice.most / self.clip, lattice.most)

    # -- secure aggregation ----------------------------------------------------------------------------------------

    def check_clients(self, clients: int) -> None:
        """Raise a ConfigError if the sum of so many clients does not fit into 32 bits."""
        self.masked_lattice(clients)

    def add_to_sum(self, x: np.ndarray, clients: int, key: Key, least: int = 0) -> np.ndarray:
        """z_i of one client plus its share of the noise."""
        lattice = self.masked_lattice(clients, least)
        z: np.ndarray = self._rounded(torch.from_numpy(np.array(x)), lattice).numpy()
        return z + discrete_gaussian(z.size, lattice.variance, key) if lattice.variance else z

    def of_sum(self, total: np.ndarray, clients: int, began: int = 0, least: int = 0) -> np.ndarray:
        """The mean in units of `clip`, from the sum."""
        return total / float(self.masked_lattice(began or clients, least).most * clients)

    def masked_lattice(self, clients: int, least: int = 0) -> SumLattice:
        """The finest lattice whose sums fit into 32 bits, with the noise of one client.

        Args:
            clients: the number of clients that begin the sum.
            least: how many of them remain at least: so many have the requested noise together. 0: all.
        """
        s, least = self._spread(clients), least or clients
        # all clients together have more noise than requested if only some of them must suffice
        widest = s if least == clients else s * Fraction(math.ceil(1024 * math.sqrt(clients / least)), 1024)
        most = int(_RING / (clients + _FAR * widest))
        lattice = SumLattice(bits := max(0, most.bit_length() - 1), math.ceil((s * 2**bits) ** 2 / least))
        small = s and accountant.gap(clients, lattice.variance, _VALUES) * s > _SLACK
        if most < 1 or small or lattice.variance > MOST_VARIANCE:
            raise ConfigError(
                f"masked sums of {clients} clients have 32 bits, too few to distribute noise of sigma = {self.sigma}: "
                f"each client would add {math.sqrt(lattice.variance):.3g} steps. Sample fewer clients per round, or "
                "write secure_aggregation = false"
            )
        return lattice

    # -- privacy accounting ----------------------------------------------------------------------------------------

    def epsilon(self, clients: int, population: int, rounds: int, delta: float | None = None) -> float:
        """An upper bound on the epsilon of a run whose cohorts are drawn without replacement.

        Neighboring runs have one client with other data (replace-one). See `accountant`.

        Args:
            clients: clients per round; the field `cohort` overrides it.
            population: all clients that can be sampled; the field `population` overrides it.
            rounds: the number of rounds.
            delta: overrides the field `delta`.
        """
        sampled, total = self.cohort or clients, self.population or population
        if not 1 <= sampled <= total:
            raise ConfigError(
                f"{sampled} clients per round of {total} in total are not possible; write for example "
                f"privacy.population = {10 * sampled}"
            )
        if not self.sigma:
            return math.inf
        c = 2 * (1 + _SLACK) / self.sigma  # one update of norm `clip` is replaced by another
        return accountant.epsilon(c, sampled / total, rounds, self.delta if delta is None else delta)

    def spent(self, clients: int, population: int, rounds: int) -> tuple[float | None, str]:
        """The epsilon after these rounds, or None and the reason."""
        try:
            epsilon = self.epsilon(clients, population, rounds)
        except ConfigError as error:
            return None, str(error)
        return (epsilon, "") if math.isfinite(epsilon) else (None, "sigma = 0 adds no noise, so there is no guarantee")
