"""A round in which the server sees the sum of what clients say and nothing of each: `secure_aggregation = true`.

Codecs whose bytes are plain numbers, at the same places for all clients, can be hidden and added up as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from thinwire.core.key import Key
from thinwire.core.tree import Tree
from thinwire.errors import IncompatibleParts
from thinwire.privacy.base import MaskedPrivacy
from thinwire.privacy.secagg import Secret, hidden_size, hide, hide_words, reveal, reveal_sum
from thinwire.protocol.fields import EVERYONE, answer, expect_fields, noted
from thinwire.protocol.state import Contract
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire
from thinwire.wire.bits import Bytes


class SecAggCohort(NamedTuple):
    """Who is added up in a round, and what they share in pairs; the server knows the first only."""

    cohort: tuple[int, ...]
    secret: Secret
    noise: Key | None = None  # where clients take their noise from; by default the seed, which the server knows


def check_secure(contract: Contract) -> None:
    """Raise IncompatibleParts, saying what to write instead, if messages of this method cannot be added up unseen."""
    method = contract.method
    if any(up != method.ups[0] for up in method.ups):
        raise IncompatibleParts(
            "secure_aggregation = true adds up messages of one length, but tiers of the budget have different up codecs. "
            "Leave up out of the tiers, or write secure_aggregation = false"
        )
    if not getattr(method.ups[0], "adds", False):
        raise IncompatibleParts(
            f"secure_aggregation = true adds up messages number by number, but those of {method.ups[0]!r} cannot be added. "
            'Write up = "raw" or up = { kind = "randomk", shared = true }, or secure_aggregation = false'
        )
    if odd := [block.name for block in contract.code if block.dtype is not torch.float32]:
        raise IncompatibleParts(
            f"secure_aggregation = true adds up float32 numbers, but {odd[0]!r} is of another type. Train it in float32, "
            "keep it at home (schedule.private), or write secure_aggregation = false"
        )
    plan = Plan(contract.sendable.named)
    for seen, part, instead in (
        (contract.report.blocks, method.correction, "Take a correction that reports nothing"),
        (noted(contract, plan).blocks, method.schedule, "Take a schedule that reports nothing"),
        (contract.buffers.blocks, "a model with running statistics", "Take one without, such as with group norm"),
    ):
        if seen:
            raise IncompatibleParts(
                f"secure_aggregation = true hides what clients say, but with {part!s} they would say more beside it. "
                f"{instead}, or write secure_aggregation = false"
            )
    if method.correction.factor({}) != 1.0:  # without a report it is the same for all, but the server sees no terms
        raise IncompatibleParts(
            f"{method.correction!s} scales what each client changed, but secure_aggregation = true hides what that is. "
            "Take a correction that scales nothing, or write secure_aggregation = false"
        )


def hide_payload(
    contract: Contract, payload: Bytes, weight: float, version: int, client: int, circle: SecAggCohort | None
) -> bytes:
    """What the codec made, under the masks of this round; clipped and blurred, where the method is private."""
    if circle is None or client not in circle.cohort:
        raise IncompatibleParts(
            "secure_aggregation = true needs to know who else is asked: give cohort_round the circle"
        )
    if len(circle.cohort) < 2:
        raise IncompatibleParts("secure_aggregation = true hides a client among others: ask two or more in a round")
    if weight != int(weight):
        raise IncompatibleParts(
            f"secure_aggregation = true adds up whole weights, not {weight}; write client_weight = 'uniform'"
        )
    numbers, privacy = np.frombuffer(payload, "<f4"), contract.method.privacy
    if not isinstance(privacy, MaskedPrivacy):
        return hide(numbers, int(weight), client, circle.cohort, version, circle.secret)
    key = (circle.noise or contract.key).fold("privacy", version, client)
    added = privacy.add_to_sum(numbers, len(circle.cohort), key)
    return hide_words(np.append(added, [1, 1]), client, circle.cohort, version, circle.secret)


def secure_mean(contract: Contract, plan: Plan, version: int, messages: Mapping[int, Bytes], noise: Key) -> Tree:
    """What is made public of these clients, from messages that say nothing each: their mean, or their blurred sum."""
    privacy = contract.method.privacy
    up, peer = contract.method.ups[0], contract.peer(version, EVERYONE)
    spec = contract.method.sketch.spec(contract.coords.restrict(plan.names))

    def payload(client: int) -> Bytes:
        body = answer(contract, plan, version, client, messages[client])
        expect_fields(body, {wire.COORDS})
        return body.fields[wire.COORDS]

    size = up.size(spec)
    assert size is not None, "a codec that adds has one size"
    hidden = (payload(client) for client in sorted(messages))
    if isinstance(privacy, MaskedPrivacy):
        released = privacy.of_sum(reveal_sum(hidden, size // 4)[0], len(messages))
        return up.decode(released.astype("<f4").tobytes(), spec, peer)
    mean = up.decode(reveal(hidden, size // 4).astype("<f4").tobytes(), spec, peer)
    return privacy.aggregate([mean], lambda codes: codes[0], len(messages), noise)


def secure_size(payload: int) -> int:
    """How many bytes a payload of that many takes when it is hidden."""
    return hidden_size(payload // 4)
