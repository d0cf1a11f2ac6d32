"""Methods in two stages: after some rounds other numbers are trained, and they begin where the first ones ended."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs.base import Codec
from thinwire.errors import ConfigError
from thinwire.masks.masks import Mask
from thinwire.optimizers.base import Optimizer
from thinwire.spaces.base import Space
from thinwire.spaces.lora import LoRA


@dataclass(frozen=True)
class Stage:
    """What a method does otherwise from some version on; whatever is not given stays as it was.

        version < at     coordinates of the first space
        version = at     coordinates of `space` closest to the weights then (`from_weights`), on the base of version 0
        version > at     trained with fresh optimisers and memories

    Args:
        at: rounds of the first stage.
        space: where clients train from then on; one that can begin at given weights, such as `LoRA` or `Full`.
        mask: which numbers are trained; None leaves the method's.
        up: client's numbers to bytes; None leaves the method's.
        down: server's numbers to bytes; None leaves the method's.
        client_opt: moves the coordinates on a client; None leaves the method's.
        server_opt: moves them on the server; None leaves the method's.

    Nothing more is sent at the switch: on `full` download, which this needs, clients receive the coordinates of their
    stage in every round, and the base is the one that they know from the beginning.

    >>> Stage(at=50, space=LoRA(rank=4)).at
    50
    """

    at: int = 50
    space: Space = LoRA()
    mask: Mask | None = None
    up: Codec | None = None
    down: Codec | None = None
    client_opt: Optimizer | None = None
    server_opt: Optimizer | None = None

    def __post_init__(self) -> None:
        if self.at < 1:
            raise ConfigError(f"then.at must be 1 or more rounds, not {self.at}; write for example at = 50")
