"""What clients are trained by: the contract, with corrections beside the weights where the space has such."""

from __future__ import annotations

from dataclasses import replace

from thinwire.protocol.state import Contract
from thinwire.spaces.unmerged import unmerged


def for_training(contract: Contract) -> Contract:
    """The same contract for `cohort_round`: the numbers differ by rounding only, and no matrix is built a client.

    A penalty looks at the weights that coordinates make, so with one they are built.
    """
    if contract.later is not None:
        later = for_training(contract.later)
        return replace(for_training(replace(contract, later=None)), later=later)
    method = contract.method
    if method.penalty.active or unmerged(method.space) is method.space:
        return contract
    return replace(contract, method=replace(method, space=unmerged(method.space)))
