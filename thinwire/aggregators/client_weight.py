"""How much a client counts in the mean. The client says it; where all count alike, nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thinwire.core.registry import register


class ClientWeight(Protocol):
    """Gives a client's weight in the mean, p_i = weight_i / sum of weights."""

    @property
    def sent(self) -> bool:
        """Whether the weight travels as a lane (four bytes) because the server cannot know it."""
        ...

    def weight(self, samples: int) -> float:
        """The weight of a client with that many examples."""
        ...


@register("client_weight", "samples", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class BySamples:
    """A client counts as much as it has examples:  p_i = n_i / sum n_j.

    >>> BySamples().weight(600)
    600.0
    """

    @property
    def sent(self) -> bool:
        """Yes: only the client knows how many examples it has."""
        return True

    def weight(self, samples: int) -> float:
        """The number of examples."""
        return float(samples)


@register("client_weight", "uniform")
@dataclass(frozen=True)
class Uniform:
    """All clients count alike:  p_i = 1 / m."""

    @property
    def sent(self) -> bool:
        """No."""
        return False

    def weight(self, samples: int) -> float:
        """One."""
        return 1.0
