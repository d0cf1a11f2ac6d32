"""MAPO with few bits in every message: the method of this project for the thinnest links."""

from __future__ import annotations

from thinwire.codecs import ErrorFeedback, Lattice, LatticeSum
from thinwire.core.registry import register
from thinwire.protocol.method import Method
from thinwire.spaces import MAPO


@register("method", "thin", paper="composed here: MAPO, updates on a lattice, error feedback")
def thin(k: int = 0, up: float = 1.0, down: float = 2.0, redraw_every: int = 10) -> Method:
    """MAPO with about two bits a value up, one and a half down, and exact short sums for clients that missed rounds.

        b <- b + D(mean_i L(b_i - b))          after `redraw_every` rounds:  W0 <- W0 + b a

    L rounds to multiples of a power of two near `up` times the root mean square of the values, at random and without
    bias; D rounds to the nearest multiple near `down` times theirs, with error feedback. Multiples of powers of two add
    up exactly, so what a client missed of a basis is one vector of small integers.

    Args:
        k: trained parameters; 0 derives them from the number of weights, floor(2 d^(2/3)).
        up: distance of the levels of uploads, in root mean squares.
        down: distance of the levels of downloads.
        redraw_every: rounds for which a direction is kept.

    Not from a paper: a composition of MAPO, stochastic rounding and error feedback.

    >>> thin().space.sizes(11274).k
    1005
    """
    return Method(
        space=MAPO(k=k, redraw_every=redraw_every),
        up=Lattice(up, stochastic=True),
        down=ErrorFeedback(Lattice(down)),
        merge_codec=LatticeSum(),
    )
