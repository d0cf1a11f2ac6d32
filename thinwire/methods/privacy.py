"""Differential privacy at the level of clients, with a trusted server or with secure aggregation.

`clip` and `sigma` must be chosen for a task. FLASC's FLAIR uses clip = 0.005 and sigma = 0.34 with 200 clients a round.
"""

from __future__ import annotations

from thinwire.aggregators import Uniform
from thinwire.core.registry import register
from thinwire.optimizers import Adam
from thinwire.privacy import DP
from thinwire.protocol.method import Method


@register("method", "dp-fedadam", paper="McMahan et al., ICLR 2018; De et al., 2022")
def dp_fedadam(clip: float = 0.1, sigma: float = 0.34, server_lr: float = 0.01) -> Method:
    """DP-FedAdam: clipped updates, discrete Gaussian noise on their sum, Adam at a trusted server.

        g = (sum_i D_i min(1, clip / |D_i|) / clip + N(0, sigma^2)) / m          w <- Adam(w, -g)

    Args:
        clip: largest norm of an update.
        sigma: noise multiplier: standard deviation of the noise on the sum, in units of clip.
        server_lr: learning rate of the server.

    Papers: Learning Differentially Private Recurrent Language Models (McMahan et al., ICLR 2018); Unlocking
    High-Accuracy Differentially Private Image Classification through Scale (De et al., 2022).

    >>> dp_fedadam(clip=0.005).privacy.clip
    0.005
    """
    return Method(privacy=DP(clip=clip, sigma=sigma), client_weight=Uniform(), server_opt=Adam(server_lr))


@register("method", "ddg", paper="Kairouz, Liu and Steinke, ICML 2021")
def ddg(clip: float = 0.1, sigma: float = 0.34, server_lr: float = 0.01) -> Method:
    """Distributed discrete Gaussian: DP-FedAdam with noise added by the clients and secure aggregation.

        client i sends round(D_i) + N_Z(0, sigma^2 / m) under a mask; the masks cancel in the sum

    The server sees only the sum, so `up` must be a codec whose values can be added: `raw` or `randomk`.

    Args:
        clip: largest norm of an update.
        sigma: noise multiplier: standard deviation of the noise on the sum, in units of clip.
        server_lr: learning rate of the server.

    Paper: The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation (Kairouz, Liu and
    Steinke, ICML 2021).

    >>> ddg().secure_aggregation
    True
    """
    return dp_fedadam(clip, sigma, server_lr).replace(secure_aggregation=True)
