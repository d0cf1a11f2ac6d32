"""From the shares that clients revealed to the sum: recover secrets, and remove the masks that they give.

    sum of q_i = sum of y_i - own masks of survivors + masks of dropped clients with survivors   mod 2^32

A survivor's seed is checked against its commitment, the mask key of a dropped client against its public key, so wrong
shares are found, and outvoted where enough others are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.flower.secure import frames
from thinwire.flower.secure.client import context_of, mask_secret
from thinwire.flower.secure.frames import Advert, Head
from thinwire.flower.secure.keys import is_committed, is_private_key
from thinwire.flower.secure.shamir import recover
from thinwire.privacy.secagg import pair_masks, self_mask

Revealed = Mapping[int, Mapping[int, tuple[int, int]]]  # by who revealed it: kind and share of each member


class Closing(NamedTuple):
    """A session after its uploads: who is in the sum, and who dropped out."""

    head: Head
    schema: bytes
    adverts: Mapping[int, Advert]
    threshold: int
    members: tuple[int, ...]
    survivors: tuple[int, ...]


def check_revealed(closing: Closing, shares: Mapping[int, tuple[int, int]]) -> Mapping[int, tuple[int, int]]:
    """The shares that one client revealed, if they are of the right members and kinds."""
    left = frozenset(closing.survivors)
    wanted = {client: frames.SEED if client in left else frames.MASK_KEY for client in closing.members}
    if {client: kind for client, (kind, _) in shares.items()} != wanted:
        raise WireError("it revealed other shares than were requested")
    return shares


def remaining_masks(closing: Closing, revealed: Revealed, count: int) -> np.ndarray:
    """What must be added to the sum of the survivors' uploads so that no mask remains: (count,) uint32."""
    head, left = closing.head, frozenset(closing.survivors)
    context = context_of(closing.schema, head)
    total = np.zeros(count, np.uint32)
    for client in closing.members:
        advert = closing.adverts[client]
        shares = {who + 1: theirs[client][1] for who, theirs in revealed.items()}
        if client in left:
            is_seed = partial(is_committed, context=context, commitment=advert.commitment)
            total -= self_mask(count, recover(shares, closing.threshold, is_seed), head.version)
        else:
            key = recover(shares, closing.threshold, partial(is_private_key, public=advert.mask_key))

            def secret(i: int, j: int, own: bytes = key, me: int = client) -> bytes:
                other = closing.adverts[j if i == me else i]
                return mask_secret(own, other.mask_key, context, i, j)

            total += pair_masks(count, client, closing.survivors, head.version, secret)
    return total
