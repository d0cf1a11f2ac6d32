"""Loss and number of examples as integers that are summed under the masks, so that no client reports its own.

    examples, and round(2^16 loss examples):    each as two words, its upper bits and its lower 16

>>> words = [pack_totals(0.5, 100, 8), pack_totals(0.25, 300, 8)]
>>> read_totals(np.array(words).sum(0).astype(np.uint32))                      # mean loss, examples of all
(0.3125, 400)
"""

from __future__ import annotations

import math

import numpy as np

from thinwire.errors import Diverged

WORDS = 4
_BITS = 16


def pack_totals(loss: float, examples: int, clients: int) -> tuple[int, ...]:
    """The words of one client.

    Args:
        loss: its mean training loss.
        examples: its number of examples.
        clients: number of clients of the sum, which must not overflow 32 bits.
    """
    if not math.isfinite(loss):
        raise Diverged(f"the training loss is {loss}; try a smaller learning rate")
    most = ((1 << 31) - 1) // clients << _BITS
    values = examples, round(max(-1e30, min(1e30, loss * examples)) * (1 << _BITS))
    bounded = [max(-most, min(most, value)) for value in values]
    return tuple(word for value in bounded for word in (value >> _BITS, value & ((1 << _BITS) - 1)))


def read_totals(words: np.ndarray) -> tuple[float, int]:
    """The mean loss over all examples, and their number, from the sum of the words of all clients (uint32)."""
    examples, loss = ((int(np.int32(high)) << _BITS) + int(low) for high, low in words.reshape(2, 2))
    return loss / max(1, examples) / (1 << _BITS), max(1, examples)
