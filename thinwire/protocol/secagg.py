"""Secure aggregation: the server learns the sum of the uploads and nothing about each of them.

Codecs whose payloads are plain float32 values, at the same positions for all clients, can be masked and summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from thinwire.core.key import Key
from thinwire.core.tree import Tree
from thinwire.errors import IncompatibleParts
from thinwire.privacy.secagg import Secret, fixed_point, hide_words, reveal, reveal_sum
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.schedules.base import Plan
from thinwire.wire.bits import Bytes


class SecAggCohort(NamedTuple):
    """The clients of a secure sum and the secrets that they share in pairs; the server knows only the clients."""

    cohort: tuple[int, ...]
    secret: Secret
    noise: Key | None = None  # the source of the clients' noise; by default the seed, which the server knows
    own: bytes = b""  # the seed of the client's own mask, in a deployment
    extra: tuple[int, ...] = ()  # further integers of this client that are summed
    least: int = 0  # how many clients remain at least; 0: all


def check_secure_aggregation(contract: Contract) -> None:
    """Raise IncompatibleParts, with what to write instead, if uploads of this method cannot be summed under masks."""
    method = contract.method
    if any(up != method.ups[0] for up in method.ups):
        raise IncompatibleParts(
            "secure_aggregation = true sums uploads of one size, but tiers of the budget have different upload codecs. "
            "Remove up from the tiers, or write secure_aggregation = false"
        )
    if not method.ups[0].summable:
        raise IncompatibleParts(
            f"secure_aggregation = true sums uploads value by value, but those of {method.ups[0]!r} cannot be summed. "
            'Write up = "raw" or up = { kind = "randomk", shared = true }, or secure_aggregation = false'
        )
    if odd := [block.name for block in contract.code if block.dtype is not torch.float32]:
        raise IncompatibleParts(
            f"secure_aggregation = true sums float32 values, but {odd[0]!r} has another type. Train it in float32, "
            "make it private (schedule.private), or write secure_aggregation = false"
        )
    report = contract.upload_fields(Plan(contract.sendable.named))[2]
    for sent, part, instead in (
        (contract.report.blocks, method.correction, "Use a correction that reports nothing"),
        (report.blocks, method.schedule, "Use a schedule that reports nothing"),
        (contract.buffers.blocks, "a model with running statistics", "Use one without, for example with group norm"),
    ):
        if sent:
            raise IncompatibleParts(
                f"secure_aggregation = true masks the update, but with {part!s} clients send more than it. "
                f"{instead}, or write secure_aggregation = false"
            )
    if method.correction.active and method.correction.factor({}) != 1.0:
        raise IncompatibleParts(
            f"{method.correction!s} scales each client's update, but secure_aggregation = true hides it. "
            "Use a correction that scales nothing, or write secure_aggregation = false"
        )


def mask_payload(
    contract: Contract, payload: Bytes, weight: float, version: int, client: int, secagg: SecAggCohort | None
) -> bytes:
    """An encoded update under the masks of this round; clipped and with noise, where the method is private."""
    if secagg is None or client not in secagg.cohort:
        raise IncompatibleParts("secure_aggregation = true needs the cohort and its secrets: pass a SecAggCohort")
    if len(secagg.cohort) < 2:
        raise IncompatibleParts("secure_aggregation = true needs a cohort of two or more clients")
    if weight != int(weight):
        raise IncompatibleParts(
            f"secure_aggregation = true sums integer weights, not {weight}; write client_weight = 'uniform'"
        )
    values, masked = np.frombuffer(payload, "<f4"), contract.method.privacy.masked
    if masked is None:
        words = fixed_point(values, int(weight), client, len(secagg.cohort))
    else:
        key = (secagg.noise or contract.key).fold("privacy", version, client)
        words = np.append(masked.add_to_sum(values, len(secagg.cohort), key, secagg.least), [1, 1])
    words = np.append(words, np.array(secagg.extra, np.int64))
    return hide_words(words, client, secagg.cohort, version, secagg.secret, secagg.own)


def sum_masked(
    contract: Contract, plan: Plan, version: int, payloads: Sequence[Bytes], noise: Key, began: tuple[int, int] = (0, 0)
) -> Tree:
    """The mean, or the noisy sum, of uploads that reveal nothing each.

    Args:
        contract: the contract at `version`.
        plan: the plan of the round.
        version: the version that clients trained from.
        payloads: the masked payloads; all masks cancel in their sum.
        noise: the source of noise, where the server adds it.
        began: how many clients began the sum, and how many had to remain; 0: those of `payloads`.
    """
    privacy, up, peer = contract.method.privacy, contract.method.ups[0], contract.peer(version, EVERYONE)
    spec = contract.upload_fields(plan)[1]
    size = up.size(spec)
    assert size is not None, "a summable codec has a constant size"
    if privacy.masked is not None:
        released = privacy.masked.of_sum(reveal_sum(iter(payloads), size // 4)[0], len(payloads), *began)
        return up.decode(released.astype("<f4").tobytes(), spec, peer)
    mean = up.decode(reveal(iter(payloads), size // 4).astype("<f4").tobytes(), spec, peer)
    return privacy.aggregate([mean], lambda codes: codes[0], len(payloads), noise)
