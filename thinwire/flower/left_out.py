"""Clients that are left out of cohorts for some rounds, because their uploads were far off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from thinwire.core.key import Key

ROUNDS = 10  # without a client the first time; each further time twice as many


def left_out_until(times: Iterable[tuple[int, Iterable[int]]]) -> dict[int, int]:
    """The last round without each client.

    Args:
        times: for each time that a run went back, the rounds done in the state that it went back to, and the clients
            that were left out.

    >>> left_out_until([(5, [3]), (20, [3, 4])])
    {3: 40, 4: 30}
    """
    until: dict[int, int] = {}
    counts: dict[int, int] = {}
    for done, clients in times:
        for client in clients:
            counts[client] = counts.get(client, 0) + 1
            until[client] = done + ROUNDS * 2 ** (counts[client] - 1)
    return until


def replaced(cohort: tuple[int, ...], out: Set[int], eligible: Sequence[int], key: Key) -> tuple[int, ...]:
    """A cohort with other clients in place of those that are left out, as long as there are others.

    Args:
        cohort: the clients of the round.
        out: clients that are left out.
        eligible: the clients that can be sampled.
        key: draws the others.

    >>> replaced((0, 1), frozenset({1}), range(3), Key(0)), replaced((0, 1), frozenset({1, 2}), range(3), Key(0))
    ((0, 2), (0,))
    """
    if out.isdisjoint(cohort):
        return cohort
    order = key.choice(len(eligible), len(eligible))
    others = iter([one for i in order if (one := eligible[int(i)]) not in out and one not in cohort])
    found = tuple(one for i in cohort if (one := next(others, -1) if i in out else i) >= 0)
    return found or cohort
