"""Weight of a client in the aggregate: by its number of examples, or the same for all."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from thinwire.core.registry import register


class ClientWeight(Protocol):
    """Weight of a client in the weighted mean:  p_i = weight_i / sum_j weight_j."""

    sent: ClassVar[bool] = False
    """Whether the weight is a field of the upload (two bytes for 128 to 16,383), as only the client can compute it."""

    @abstractmethod
    def weight(self, samples: int) -> float:
        """Return the weight of a client with that many examples."""
        ...


@register("client_weight", "samples", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class BySamples(ClientWeight):
    """Weight clients by their number of examples:  p_i = n_i / sum_j n_j.

    >>> BySamples().weight(600)
    600.0
    """

    sent = True

    def weight(self, samples: int) -> float:
        """Return the number of examples."""
        return float(samples)


@register("client_weight", "uniform")
@dataclass(frozen=True)
class Uniform(ClientWeight):
    """Weight all clients of a round equally:  p_i = 1 / m.

    >>> Uniform().weight(600)
    1.0
    """

    def weight(self, samples: int) -> float:
        """Return 1."""
        return 1.0
