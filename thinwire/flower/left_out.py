"""Clients that are left out of cohorts for some rounds, because their uploads were far off."""

from __future__ import annotations

from collections.abc import Iterable

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
