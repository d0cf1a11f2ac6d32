"""Asynchronous rounds in a simulation (FedBuff): a round is closed by the uploads that arrive first.

    round:   ask clients until enough train -> train them now -> take the uploads that arrive first -> next version

A client is trained when it is asked, because what it sends depends on nothing that happens later; its reply is kept
until its time on the simulated clock has come. An upload is decoded as of the version that it is based on, and its
weight falls with its staleness. With equal speeds and a concurrency of 1 all of this is a synchronous round, bit for
bit.
"""

from __future__ import annotations

from thinwire.federation.federation import Collected
from thinwire.federation.job import RunState
from thinwire.federation.simulated import SimulatedClients
from thinwire.protocol.round import Reply, Round


class BufferedClients(SimulatedClients):
    """Simulated clients of which a round does not wait for all that were asked; see `Asynchronous`."""

    def collect(self, got: Collected) -> None:
        """Collect the uploads that arrive first, of clients asked now and before."""
        round, state = got.round, got.state
        self.train_cohort(got, self._asked(round, state))
        arrives = self.arrivals(got)
        waiting = (*state.waiting, *(one._replace(arrives=arrives[i]) for i, one in got.replies.items()))
        taken: dict[int, Reply] = {}
        for one in sorted(waiting, key=lambda one: one.arrives):  # stable
            if len(got.uploads) == self.federation.sampler.size:
                break
            taken[one.client] = one
            self.accept(got, one.client, self.usable(got, one))
        got.replies, got.cohort = taken, tuple(got.uploads)
        got.waiting = tuple(one for one in waiting if one.client not in taken)
        got.clock = max([state.clock, *(one.arrives for one in taken.values())])

    def _asked(self, round: Round, state: RunState) -> tuple[int, ...]:
        """The clients that are asked at the beginning of a round, in addition to those that still train."""
        sampler = self.federation.sampler
        most = self.job.method.asynchronous.clients(sampler.size, len(self.federation.eligible))
        training = {one.client for one in state.waiting} | self.left_out(state).keys()
        idle = [i for i in sampler.order(state.round) if i not in training]
        return tuple(idle[: most - len(state.waiting)])
