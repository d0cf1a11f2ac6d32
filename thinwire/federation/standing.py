"""Standing of clients: who is left out of cohorts for a while, because its uploads were refused or cut heavily.

    an upload that is refused, or scaled down and above      score + 2
      4 times the upper quartile of its round (`HEAVY`)
    any other                                                score - 1, not below 0
    score 6                                                  left out of the next ten rounds, the second time twenty,
                                                             then forty; then with a score of 4

So three such uploads in a row are needed, and one in three rounds does no harm. At least half of the clients that can
take part stay. In a cohort of fewer than five clients the size of an update does not count: its quartile says little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

LEFT_OUT_ROUNDS = 10  # without a client, the first time; each further time twice as many
OFFENCE, MOST = 2, 6


class Standing(NamedTuple):
    """What is held against clients.

    Args:
        score: of each client that has one.
        times: how often each client was left out.
        until: the last round without each of them.
        weights: the first weight that each client claimed, where its size is not known.
    """

    score: Mapping[int, int] = {}
    times: Mapping[int, int] = {}
    until: Mapping[int, int] = {}
    weights: Mapping[int, float] = {}

    def after(self, number: int, bad: Collection[int], good: Collection[int]) -> Standing:
        """The standing after a round.

        Args:
            number: the round.
            bad: the clients whose upload was refused or scaled down heavily.
            good: the other clients of the round.

        >>> standing = Standing()
        >>> for number in (1, 2, 3):
        ...     standing = standing.after(number, bad=[4], good=[0])
        >>> standing.until, standing.score
        ({4: 13}, {4: 4})
        """
        if not bad and not self.score:
            return self
        score = dict(self.score) | {i: self.score.get(i, 0) + OFFENCE for i in bad}
        score |= {i: score[i] - 1 for i in good if i in score and i not in bad}
        out = [i for i in bad if score[i] >= MOST]
        times = {**self.times, **{i: self.times.get(i, 0) + 1 for i in out}}
        until = {**self.until, **{i: number + LEFT_OUT_ROUNDS * 2 ** (times[i] - 1) for i in out}}
        score |= dict.fromkeys(out, MOST - OFFENCE)
        return self._replace(score={i: one for i, one in score.items() if one > 0}, times=times, until=until)


def left_out(until: Mapping[int, int], number: int, clients: Collection[int]) -> dict[int, int]:
    """The clients that are left out of a round, those first that stay away longest, and the last round without each.

    Args:
        until: the last round without each client.
        number: the round.
        clients: all that can take part.

    >>> left_out({3: 13, 4: 20, 5: 2, 6: 15}, 12, range(5))
    {4: 20, 3: 13}
    """
    away = [i for i in sorted(until, key=lambda i: (-until[i], i)) if until[i] >= number and i in clients]
    return {i: until[i] for i in away[: len(clients) // 2]}


def left_out_until(times: Collection[tuple[int, Collection[int]]]) -> dict[int, int]:
    """The last round without each client, of a run that went back.

    Args:
        times: for each time, the rounds done in the state that it went back to, and the clients that were left out.

    >>> left_out_until([(5, [3]), (20, [3, 4])])
    {3: 40, 4: 30}
    """
    until, counts = dict[int, int](), dict[int, int]()
    for done, clients in times:
        for client in clients:
            counts[client] = counts.get(client, 0) + 1
            until[client] = done + LEFT_OUT_ROUNDS * 2 ** (counts[client] - 1)
    return until
