"""SparseLoCo: many local AdamW steps, and two bits for the largest values of each chunk of their sum."""

from __future__ import annotations

from thinwire.codecs import ErrorFeedback, Quantize, Threshold, TopK
from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.optimizers import SGD, AdamW
from thinwire.protocol.method import Method


@register("method", "sparseloco", paper="Sarfi et al., 2025", preset={"local": {"steps": 15}})
def sparseloco(k: int = 64, chunk: int = 4096, beta: float = 0.95, lr: float = 0.02, server_lr: float = 2.0) -> Method:
    """SparseLoCo: AdamW state stays at home; the largest values of each chunk go up in two bits, with error feedback.

        client:  H steps of AdamW from w to w_i          e <- beta e + (w_i - w)
                 send c = 2 bits of the k largest of each chunk of e          e <- e - c
        server:  w <- w + server_lr mean(c_i)

    Args:
        k: values of each chunk that are sent.
        chunk: consecutive values of the model among which they are selected.
        beta: factor of the earlier error; what is never large enough to be sent is forgotten.
        lr: learning rate of the local AdamW.
        server_lr: learning rate of the server.

    Paper: Communication Efficient LLM Pre-training with SparseLoCo (Sarfi et al., 2025). H is `local.steps`.

    >>> method = sparseloco()
    >>> method.opt_lifetime, method.up.decay, method.up.inner.density * method.up.inner.chunk
    ('run', 0.95, 64.0)
    """
    if not 1 <= k <= chunk:
        raise ConfigError(f"k must be from 1 to the {chunk} values of a chunk, not {k}")
    sparse = TopK(k / chunk, "chunk", Quantize(2, "sign-magnitude"), "up", chunk)
    return Method(
        up=ErrorFeedback(sparse, decay=beta),
        down=Threshold(0.0),
        client_opt=AdamW(lr),
        opt_lifetime="run",
        server_opt=SGD(server_lr),
    )
