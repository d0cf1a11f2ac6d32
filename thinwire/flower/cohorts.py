"""The cohort of a round from the clients that are there, and the record of all cohorts.

The order in which a round takes clients is drawn from the seed and the number of the round (`Sampler.order`). The
cohort is the first of them that are there: a function of the seed and of the recorded set. If all clients are there, it
is the cohort of the simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from thinwire.flower.deadline import Clock, Deadline
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.transport import Transport


class RecordedRound(NamedTuple):
    """Who took part in a round.

    Args:
        available: the clients that were there when the cohort was drawn.
        cohort: the clients that were asked.
        accepted: those whose upload is in the next version; None while the round is open.
        late: those that had not responded when the round was closed.
        based: of asynchronous rounds, the version that each accepted upload was trained from.
    """

    available: tuple[int, ...]
    cohort: tuple[int, ...]
    accepted: tuple[int, ...] | None = None
    late: tuple[int, ...] = ()
    based: tuple[int, ...] = ()


class CohortLog:
    """The cohorts of a run by round, kept in memory. Each change is one line, which a subclass may write.

    The line of a draw is written before its requests are sent, that of the result after the round. A draw replaces
    those of the same round and of later ones: the run went back.

    >>> log = CohortLog()
    >>> log.drawn(1, [0, 2, 3], [3, 0])
    >>> log.closed(1, [0], [3])
    >>> log.rounds[1]
    RecordedRound(available=(0, 2, 3), cohort=(3, 0), accepted=(0,), late=(3,), based=())
    """

    def __init__(self) -> None:
        self._rounds: dict[int, RecordedRound] = {}

    @property
    def rounds(self) -> Mapping[int, RecordedRound]:
        """The rounds so far, by number from 1."""
        return self._rounds

    def drawn(self, number: int, available: Sequence[int], cohort: Sequence[int]) -> None:
        """Record a cohort before it is asked."""
        self._add({"round": number, "available": [*available], "cohort": [*cohort]})

    def closed(
        self, number: int, accepted: Sequence[int], late: Sequence[int], based: Sequence[int] | None = None
    ) -> None:
        """Record whose uploads are in the next version, and in asynchronous rounds the versions they are based on."""
        versions = {} if based is None else {"based": [*based]}
        self._add({"round": number, "accepted": [*accepted], "late": [*late], **versions})

    def extremes(self) -> tuple[int, int]:
        """The most clients that were asked in a round, and the fewest that a cohort was drawn from; 0 if unknown."""
        rounds = [one for one in self.rounds.values() if one.cohort]
        return max((len(one.cohort) for one in rounds), default=0), min(
            (len(one.available) for one in rounds), default=0
        )

    def _add(self, line: dict[str, Any]) -> None:
        self._read(line)
        self._write(line)

    def _read(self, line: Mapping[str, Any]) -> None:
        """Apply a line."""
        number = line["round"]
        if "cohort" in line:
            for later in [one for one in self._rounds if one >= number]:
                del self._rounds[later]
            self._rounds[number] = RecordedRound(tuple(line["available"]), tuple(line["cohort"]))
        elif number in self._rounds:
            result = {name: tuple(line.get(name, ())) for name in ("accepted", "late", "based")}
            self._rounds[number] = self._rounds[number]._replace(**result)

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line; this class keeps it in memory only."""


class Turn(NamedTuple):
    """A round that needs a cohort.

    Args:
        number: of the round.
        order: all eligible clients, in the order in which it takes them.
        kept: the cohort that the schedule keeps within its window; empty at the start of one.
        size: the number of uploads that the round is for.
        concurrent: of an asynchronous round, the number of clients that train at the same time; 0 otherwise.
        training: the clients that were asked in earlier rounds, and whose uploads this one can use.
    """

    number: int
    order: tuple[int, ...]
    kept: tuple[int, ...]
    size: int
    concurrent: int = 0
    training: Set[int] = frozenset()


class CohortSampler:
    """Takes cohorts from the clients that are there.

    Args:
        transport: knows who is there.
        policy: how many are asked, and how long to wait for clients that are not there.
        record: the cohorts of the run.
        log: receives a line when the cohort of a round is changed.
        clock: the clock.
    """

    def __init__(
        self,
        transport: Transport,
        policy: RoundPolicy,
        record: CohortLog,
        log: Callable[[str], None],
        clock: Clock = time,
    ) -> None:
        self.transport, self.policy, self.record, self.log, self.clock = transport, policy, record, log, clock
        self.busy: dict[int, Deadline] = {}  # clients that work on an earlier request, and for how long at most
        self.here: Set[int] = frozenset()  # who was there when this was last asked
        self._first = True  # of this process: clients need some time to connect

    def draw(self, turn: Turn) -> tuple[int, ...]:
        """The cohort of a round. A resumed round has its recorded cohort, unless some of it do not come back."""
        number, everyone = turn.number, frozenset(turn.order)
        before = self.record.rounds.get(number) if self._first else None
        old = before.cohort if before and everyone.issuperset(before.cohort) else ()
        known = everyone & self.transport.sites().keys() or everyone  # with a roster, others do not come
        wanted = (frozenset(old) or known) if self._first else frozenset()
        self._first = False
        here = self._wait(everyone, wanted, self.policy.needed(turn.size))
        if old and here >= frozenset(old):
            return old
        if gone := [self.transport.name(i) for i in old if i not in here]:
            self.log(f"round {number}: drawn again without {', '.join(gone)}, not back in {self.policy.wait:g} seconds")
        elif not wanted <= here:
            self.log(
                f"round {number}: {len(here)} of {len(known)} clients are there after {self.policy.wait:g} seconds"
            )
        cohort = self._chosen(turn, here)
        self.record.drawn(number, sorted(here), cohort)
        return cohort

    def again(self, turn: Turn, cohort: tuple[int, ...], responded: Set[int]) -> tuple[int, ...]:
        """The cohort of a round with too few uploads: others take the places of those that did not respond."""
        here = self._wait(frozenset(turn.order), frozenset(), self.policy.needed(turn.size), responded)
        missing = max(len(cohort), self.policy.asked(turn.size)) - len(responded)
        free = [i for i in turn.order if i in here - self.working() and i not in cohort]
        if others := free[:missing]:
            names = ", ".join(map(self.transport.name, others))
            self.log(f"round {turn.number}: {names} take part in place of clients that did not respond")
            cohort = (*cohort, *others)
            self.record.drawn(turn.number, sorted(here), cohort)
        return cohort

    def available(self, cohort: Set[int], needed: int) -> Set[int]:
        """The clients of a cohort that are there, when so many of them are or `seconds` end."""
        return self._wait(cohort, frozenset(), needed)

    def late(self, clients: Set[int], until: Deadline) -> None:
        """Note the clients whose responses the round did not wait for; others are asked until these have responded."""
        self.busy |= dict.fromkeys(clients, until)

    def responded(self, client: int) -> None:
        """Note that a client has responded, whether its upload was used or not."""
        self.busy.pop(client, None)

    def working(self) -> Set[int]:
        """The clients that work on an earlier request."""
        return frozenset(client for client, until in self.busy.items() if until.left())

    def _chosen(self, turn: Turn, here: Set[int]) -> tuple[int, ...]:
        """The first clients that are there and idle; those that still work only if there are too few others."""
        needed, idle = self.policy.needed(turn.size), here - self.working()
        if turn.concurrent:
            places = turn.concurrent - len(turn.training & self.working())
            return tuple([i for i in turn.order if i in idle][: max(0, places)])
        ready = [i for i in turn.kept if i in idle]
        if len(ready) < needed or not turn.kept:
            ready += [i for i in turn.order if i in idle and i not in turn.kept]
            ready = ready[: self.policy.asked(turn.size)]
        if len(ready) < needed:
            ready += [i for i in turn.order if i in here and i not in idle]
        return tuple(ready[: max(self.policy.asked(turn.size), len(turn.kept))])

    def _wait(self, everyone: Set[int], wanted: Set[int], needed: int, responded: Set[int] = frozenset()) -> Set[int]:
        """Who is there, when all that are wanted are or `wait` seconds end, and enough are or `seconds` end."""
        for_all = Deadline(self.policy.wait if wanted else 0.0, self.clock)
        for_enough = Deadline(self.policy.seconds, self.clock)
        while True:
            here = frozenset(everyone & self.transport.clients())
            self.here, self.busy = here, {i: end for i, end in self.busy.items() if i in here}
            if (wanted <= here or not for_all.left()) and (len(here | responded) >= needed or not for_enough.left()):
                return here
            self.clock.sleep(min(1.0, self.policy.seconds / 10))
