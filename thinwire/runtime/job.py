"""A run, whatever does it: what is asked for, what is known after each round, and all that is needed to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.aggregators.base import check_cohort
from thinwire.data.task import Task
from thinwire.errors import ConfigError
from thinwire.privacy.base import MaskedPrivacy
from thinwire.protocol.method import Method
from thinwire.protocol.state import ClientState, ServerState
from thinwire.protocol.sync_counts import SyncCounts
from thinwire.training.batches import Local
from thinwire.training.local import Backend


class RoundRecord(NamedTuple):
    """What is known after a round; bytes are lengths of messages that were made."""

    round: int  # from 1
    loss: float  # mean training loss of the cohort, weighted by examples
    accuracy: float | None  # on the test examples; None where the round was not evaluated
    test_loss: float | None
    bytes_up: int
    bytes_down: int
    bytes_catchup: int
    clients: int
    seconds: float
    client_accuracy: float | None = None  # each client's own model on its own held-out examples, averaged over clients
    rate: float | None = None  # the clients' step size in this round
    drifted: int = 0  # clients whose public state had come apart and that were sent the whole; here they share one
    refused: int = 0  # clients whose message could not be used; in a simulation all can
    bounded: int = 0  # clients whose upload was far beyond the cohort's median and was scaled down
    absent: int = 0  # clients of the cohort that did not answer in time
    epsilon: float | None = None  # what differential privacy has cost so far; None without it, or where nobody can tell
    alarm: str | None = None  # what changed with this round: the run fell back to chance, or is above it again


@dataclass(frozen=True, eq=False)
class Job:
    """A run, but for the machine that does it.

    Args:
        task: model and data.
        method: how it is learnt.
        rounds: how many rounds.
        cohort: clients in a round.
        local: how much a client trains in a round.
        seed: the root of all randomness.
        eval_every: rounds between two evaluations; the last round is always evaluated.
    """

    task: Task
    method: Method = field(default_factory=Method)
    rounds: int = 10
    cohort: int = 10
    local: Local = field(default_factory=Local)
    seed: int = 0
    eval_every: int = 1

    def __post_init__(self) -> None:
        clients = len(self.task.clients)
        if not 1 <= self.cohort <= clients:
            raise ConfigError(f"cohort must be from 1 to the number of clients, {clients}, not {self.cohort}")
        if self.rounds < 1:
            raise ConfigError(f"rounds must be 1 or more, not {self.rounds}")
        if self.eval_every < 1:
            raise ConfigError(f"eval_every must be 1 or more, not {self.eval_every}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed must be from 0 to 2**64 - 1, not {self.seed}")
        self.method.budget.check(clients)
        check_cohort(self.method.aggregator, self.cohort)
        if self.method.next_stage is not None and self.method.next_stage.at >= self.rounds:
            raise ConfigError(
                f"the second stage begins after {self.method.next_stage.at} rounds, but the run has {self.rounds}; write for "
                f"example --set method.next_stage.at={max(1, self.rounds // 4)}, or more rounds"
            )
        if self.method.secure_aggregation and self.cohort < 2:
            raise ConfigError("secure_aggregation = true hides a client among others: cohort must be 2 or more, not 1")
        if self.method.secure_aggregation and isinstance(self.method.privacy, MaskedPrivacy):
            self.method.privacy.check_clients(self.cohort)


class RunState(NamedTuple):
    """All that a run needs to go on after any round."""

    round: int  # rounds that are done
    server: ServerState
    clients: Mapping[int, ClientState]  # only those that were ever asked
    cohort: tuple[int, ...]
    backend: Backend  # how clients are trained; settled once, so that a resumed run does the same
    backend_reason: str  # why not by the fastest, if so
    sync_counts: SyncCounts  # how often each block spoke
    chunk: int = 0  # clients trained together, where the memory of a GPU decided it
    onednn: bool | None = None  # whether CPU kernels come from oneDNN; None: unless this machine is known for slow ones
