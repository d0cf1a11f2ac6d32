"""Optimizer states that belong to places in the cohort, not to clients (`Method.opt_owner`).

    opt of cohort_t[p] at the start of round t = opt of cohort_{t-1}[p] at the end of round t - 1

Programs in which m machines train the m clients of a round have one optimizer for each machine. Its momentum is then
that of the client which the machine trained before. Cohorts are in the order drawn, so that who follows whom is random.

>>> from thinwire.protocol.state import ClientState
>>> kept = {7: ClientState(1, opt={"momentum": {}})}
>>> hand_over("place", {4: ClientState(), 7: kept[7]}, (4, 7), (7,), kept)[4].opt
{'momentum': {}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from thinwire.protocol.state import ClientState


def hand_over(
    owner: str,
    states: dict[int, ClientState],
    cohort: Sequence[int],
    last: Sequence[int],
    kept: Mapping[int, ClientState],
) -> dict[int, ClientState]:
    """The states of a cohort, in which each client has the optimizer state of its place.

    Args:
        owner: "place"; with "client" nothing is handed over.
        states: the states of its clients.
        cohort: its clients in the order of their places.
        last: those of the round before. Places that were empty then have no optimizer state.
        kept: the states of clients after that round.
    """
    if owner == "client":
        return states
    opts = [kept[i].opt if i in kept else {} for i in last]
    opts += [{}] * (len(cohort) - len(opts))
    return {i: replace(states[i], opt=opt) for i, opt in zip(cohort, opts, strict=False)}


def left_behind(
    owner: str, cohort: Sequence[int], last: Sequence[int], kept: Mapping[int, ClientState]
) -> Iterator[tuple[int, ClientState]]:
    """The clients of the last cohort that are not in this one, without the optimizer states that they handed over."""
    left = last if owner == "place" else ()
    return ((i, replace(kept[i], opt={})) for i in left if i in kept and i not in cohort)
