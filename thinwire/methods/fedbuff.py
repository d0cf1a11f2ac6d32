"""FedBuff: rounds that do not wait for slow clients."""

from __future__ import annotations

from thinwire.core.registry import register
from thinwire.protocol.asynchronous import Asynchronous
from thinwire.protocol.method import Method


@register("method", "fedbuff", paper="Nguyen et al., AISTATS 2022")
def fedbuff(concurrency: float = 2.0, exponent: float = 0.5, most_stale: int = 0) -> Method:
    """FedBuff: a version is made of the first uploads that arrive, also of clients with an older version.

        w <- w + sum_i (n_i / n) (1 + tau_i)^-exponent (update of client i)     over the uploads that came first

    with tau_i the number of versions since the one that client i trained from, n_i its examples and n those of all i.

    Args:
        concurrency: clients that train at the same time, in units of the cohort.
        exponent: how fast the weight of an update falls with its staleness.
        most_stale: the largest staleness of an upload that is used; 0 for any.

    Paper: Federated Learning with Buffered Asynchronous Aggregation (Nguyen et al., AISTATS 2022). There a client that
    is done is replaced at once; here its place is filled when the next version is there.

    >>> fedbuff(concurrency=3.0).asynchronous.clients(10, 100)
    30
    """
    return Method(asynchronous=Asynchronous(concurrency, exponent, most_stale))
