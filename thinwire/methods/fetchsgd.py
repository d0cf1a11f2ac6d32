"""FetchSGD: count sketches up, the largest values down."""

from __future__ import annotations

from thinwire.codecs import Threshold
from thinwire.core.registry import register
from thinwire.optimizers import SGD
from thinwire.protocol.method import Method
from thinwire.sketches import CountSketch


@register("method", "fetchsgd", paper="Rothchild et al., ICML 2020")
def fetchsgd(rows: int = 5, columns: int = 0, k: int = 0, server_lr: float = 1.0, momentum: float = 0.5) -> Method:
    """FetchSGD: clients upload a count sketch of their update; momentum and error stay in the server's sketch.

        S = mean_i sketch(w_i - w)      M <- momentum M + S      E <- E + server_lr M
        D = the k largest estimates of E      w <- w + D      E, M <- 0 in the cells of D

    Args:
        rows: rows of the sketch.
        columns: cells of a row; 0: all rows together have a quarter as many as the model has weights.
        k: values that the server broadcasts in a round; 0 for a twentieth of the weights.
        server_lr: learning rate of the server.
        momentum: momentum of the server.

    Paper: FetchSGD: Communication-Efficient Federated Learning with Sketching (Rothchild et al., ICML 2020).

    >>> fetchsgd(columns=500_000, k=50_000).sketch.rows
    5
    """
    sketch = CountSketch(rows=rows, columns=columns, k=k)
    return Method(sketch=sketch, down=Threshold(0.0), server_opt=SGD(server_lr, momentum=momentum))
