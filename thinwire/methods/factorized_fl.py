"""Factorized-FL: each weight is a rank-one product plus a sparse residual.

    W = v u^T + mu          L1 penalty on mu; values of mu below `prune` are zero in the model

Products of factors need a smaller learning rate than weights.
"""

from __future__ import annotations

from thinwire.codecs import ByBlock, Raw, Threshold
from thinwire.codecs.by_block import CodecRule
from thinwire.core.registry import register
from thinwire.optimizers import L1L2, SGD
from thinwire.protocol.method import Method
from thinwire.schedules import AllBlocks
from thinwire.spaces import FactorizedFL


@register("method", "factorized-fl", paper="Jeong and Hwang, NeurIPS 2022")
def factorized_fl(prune: float = 5e-4, l1: float = 5e-4, lr: float = 0.1) -> Method:
    """Factorized-FL with u, v and mu averaged over clients: the variant that MAPO compares with.

        W = v u^T + mu          loss + l1 |mu|_1

    Args:
        prune: values of mu below this are zero in the model.
        l1: strength of the L1 penalty on mu.
        lr: learning rate of the clients.

    Paper: Factorized-FL: Personalized Federated Learning with Parameter Factorization & Similarity Matching (Jeong and
    Hwang, NeurIPS 2022).

    >>> factorized_fl(l1=1e-3).penalty.l1
    0.001
    """
    return Method(space=FactorizedFL(prune=prune), penalty=L1L2(l1=l1, coords=("*/mu",)), client_opt=SGD(lr))


@register("method", "factorized-fl-u", paper="Jeong and Hwang, NeurIPS 2022")
def factorized_fl_u(prune: float = 5e-4, l1: float = 5e-4, lr: float = 0.1) -> Method:
    """Factorized-FL with only u shared: personal models (task.validation_fraction tests them).

        W_i = v_i u^T + mu_i          u is averaged; v_i and mu_i stay on client i

    Args:
        prune: values of mu below this are zero in the model.
        l1: strength of the L1 penalty on mu.
        lr: learning rate of the clients.

    Paper: Factorized-FL: Personalized Federated Learning with Parameter Factorization & Similarity Matching (Jeong and
    Hwang, NeurIPS 2022).

    >>> factorized_fl_u().schedule.private
    ('*/v', '*/mu')
    """
    return factorized_fl(prune, l1, lr).replace(schedule=AllBlocks(private=("*/v", "*/mu")))


@register("method", "factorized-fl-sparse", paper="Jeong and Hwang, NeurIPS 2022")
def factorized_fl_sparse(prune: float = 5e-4, l1: float = 5e-4, lr: float = 0.1) -> Method:
    """Factorized-FL that sends mu without the values below the threshold, in both directions.

        send { mu_j : |mu_j| > prune }, and u and v as float32

    The threshold is on mu, not on its change: clients upload weights, and the server sends full downloads.

    Args:
        prune: the threshold; it is also used for the model.
        l1: strength of the L1 penalty on mu.
        lr: learning rate of the clients.

    Paper: Factorized-FL: Personalized Federated Learning with Parameter Factorization & Similarity Matching (Jeong and
    Hwang, NeurIPS 2022).

    >>> factorized_fl_sparse().upload, factorized_fl_sparse().download
    ('weights', 'full')
    """
    codec = ByBlock((CodecRule(("*/mu",), Threshold(prune)), CodecRule(("*",), Raw())))
    return factorized_fl(prune, l1, lr).replace(upload="weights", download="full", up=codec, down=codec)
