"""Methods in two stages: after some rounds other parameters are trained, starting from the weights reached."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs.base import Codec
from thinwire.errors import ConfigError
from thinwire.masks.base import Mask
from thinwire.optimizers.base import Optimizer
from thinwire.spaces.base import Space


@dataclass(frozen=True)
class Stage:
    """The second stage of a method; parts that are None stay those of the method.

        version < at     coordinates of the first space
        version = at     coordinates of `space` closest to the weights then (`from_weights`), on the base of version 0
        version > at     trained with new optimizer states

    Args:
        at: number of rounds of the first stage.
        space: the space of the second stage; one that can start from given weights, such as `LoRA` or `Full`.
        mask: which parameters are trained.
        up: the codec of uploads.
        down: the codec of downloads.
        client_opt: the client optimizer.
        server_opt: the server optimizer.

    Nothing more is sent at the switch: with full downloads, which this needs, clients receive the coordinates of their
    stage in every round, and the base is that of version 0.

    >>> Stage(at=50).at
    50
    """

    at: int = 50
    space: Space | None = None
    mask: Mask | None = None
    up: Codec | None = None
    down: Codec | None = None
    client_opt: Optimizer | None = None
    server_opt: Optimizer | None = None

    def __post_init__(self) -> None:
        if self.at < 1:
            raise ConfigError(f"next_stage.at must be 1 or more rounds, not {self.at}; write for example at = 50")
