"""The averaged model: an exponential moving average of the weights of all versions (Polyak and Ruppert's averaging).

    avg_t = m avg_{t-1} + (1 - m) w_t        m = min(decay, 1 - 1 / t)

w_t is the model of version t; version 0, the initial weights, does not count. The average of one version is that
version, that of the first 1 / (1 - decay) versions is their plain mean, and later ones weigh versions by
(1 - decay) decay^age. It costs no bytes, because the server knows every version.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.core.tree import Tree


def averaged(average: Mapping[str, Tensor], newest: Mapping[str, Tensor], version: int, decay: float) -> Tree:
    """The average after a version.

    Args:
        average: the average before it; not used for version 1.
        newest: the weights and floating-point buffers of the version.
        version: its number, from 1.
        decay: the largest weight of the average before it.

    Sums are float32 at least: an average of 16-bit weights would hardly move in 16 bits.

    >>> one, two, three = ({"w": torch.tensor([x])} for x in (1.0, 2.0, 6.0))
    >>> mean = averaged(averaged(averaged({}, one, 1, 0.9), two, 2, 0.9), three, 3, 0.9)
    >>> mean["w"].item(), averaged(averaged({}, one, 1, 0.0), two, 2, 0.0)["w"].item()
    (3.0, 2.0)
    """
    wide = {name: block.to(torch.promote_types(block.dtype, torch.float32)) for name, block in newest.items()}
    if version == 1:
        return {name: block.clone() for name, block in wide.items()}  # a copy: the version may reuse its memory
    share = max(1 - decay, 1 / version)
    return dict(
        zip(wide, torch._foreach_lerp([average[name] for name in wide], list(wide.values()), share), strict=True)
    )
