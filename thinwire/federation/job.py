"""A job, the record of a round, and the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.text import PositiveInt, check_settings
from thinwire.data.losses import bce, cross_entropy, is_classification, is_regression
from thinwire.data.task import Task
from thinwire.errors import ConfigError
from thinwire.federation.attacks import Attack
from thinwire.federation.speed import Speed
from thinwire.federation.standing import Standing
from thinwire.metrics.base import Metric, metrics_by_name
from thinwire.metrics.objective import Objective, objective_of
from thinwire.protocol.bounds import Recent
from thinwire.protocol.method import Method
from thinwire.protocol.round import Reply
from thinwire.protocol.state import ClientState, ServerState, SyncCounts
from thinwire.training.batches import Local
from thinwire.training.evaluation import correct_and_labels
from thinwire.training.functional import Functional
from thinwire.training.inputs import Backend
from thinwire.training.own_trainer import check_own_trainer


class RoundRecord(NamedTuple):
    """What is known after a round; bytes are lengths of messages that were produced."""

    round: int  # from 1
    loss: float  # mean training loss of the cohort, weighted by examples
    accuracy: float | None  # on the test set, or without one on the clients' validation examples; None if not evaluated
    test_loss: float | None
    bytes_up: int
    bytes_down: int
    bytes_catchup: int
    clients: int
    seconds: float
    client_accuracy: float | None = None  # each client's model on its own validation examples, averaged over clients
    client_loss: float | None = None  # the same for the loss; in a deployment None if the server has a test set
    lr: float | None = None  # the clients' learning rate in this round
    drifted: int = 0  # clients whose public state was not the server's and that were sent the whole state
    refused: int = 0  # clients whose upload could not be used
    bounded: int = 0  # clients whose upload was far above the cohort's median and was scaled down
    left_out: int = 0  # clients that the cohort was drawn without, because of earlier uploads
    why: Mapping[str, str] = {}  # by client: why it was refused, bounded or left out; 20 clients at most
    absent: int = 0  # places of the cohort without a response: its client did not respond, or too few were there
    epsilon: float | None = None  # of differential privacy so far; None without it, or where it is not known
    metrics: Mapping[str, float] = {}  # on the test set, by name; empty in rounds without evaluation
    clients_eval: Mapping[str, float] | None = None  # accuracy: count, mean, worst_10, p10, p50, p90; metrics
    sites_eval: Mapping[
        str, Mapping[str, float]
    ] = {}  # by site: examples, loss, accuracy and metrics; without test set
    alarm: str | None = None  # a change of status in this round: accuracy fell to chance, or is above it again
    bytes_abandoned: int = 0  # of all rounds that were trained before from the same state, and given up
    late: int = 0  # clients of the cohort that had not responded when the round was closed
    layers: Mapping[str, Mapping[str, float]] = {}  # what a schedule measures, as FedLAMA does at the end of a window
    clock: float | None = None  # simulated seconds since the start, by `Speed`; None where no speed is set
    staleness: float | None = None  # mean number of versions since those of the uploads; None in synchronous rounds


@dataclass(frozen=True, eq=False)
class Job:
    """What a run does, without the machine that runs it.

    Args:
        task: model and data.
        method: the federated method.
        rounds: number of rounds.
        cohort: number of clients in a round.
        local: how much a client trains in a round.
        seed: the root of all randomness.
        eval_every: rounds between two evaluations; the last round is always evaluated.
        metrics: further metrics of the test set, besides those of the task, by name.
        objective: what rounds and runs are ranked by; by default the task's.
        attack: what malicious clients do, in a simulation; None if there are none.
        speed: how long clients take; for a simulation.
    """

    task: Task
    method: Method = field(default_factory=Method)
    rounds: PositiveInt = 10
    cohort: int = 10
    local: Local = field(default_factory=Local)
    seed: int = 0
    eval_every: PositiveInt = 1
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    objective: str = ""
    attack: Attack | None = None
    speed: Speed = field(default_factory=Speed)

    def __post_init__(self) -> None:
        check_settings(self)
        clients = len(self.task.clients)
        if not 1 <= self.cohort <= clients:
            raise ConfigError(f"cohort must be from 1 to the number of clients, {clients}, not {self.cohort}")
        _ = self.ranked_by  # raises if it is not a metric of this run
        self.method.over(self.rounds)  # raises if a learning-rate schedule is longer than the run
        self.method.budget.check(clients)
        self.method.aggregator.check(self.cohort)
        if self.method.asynchronous.active and self.cohort >= clients:
            raise ConfigError(
                f"asynchronous rounds need a cohort below the number of clients, {clients}, not {self.cohort}: others "
                f"train meanwhile; write cohort.size = {max(1, clients // 2)}, or asynchronous.concurrency = 0"
            )
        if self.local.trainer:
            check_own_trainer(self.method.correction, self.method.penalty)
        if self.local.logit_adjustment and self.task.loss is not cross_entropy:
            raise ConfigError("local.logit_adjustment needs class labels and the loss cross-entropy; leave it at 0")
        if self.method.next_stage is not None and self.method.next_stage.at >= self.rounds:
            raise ConfigError(
                f"the second stage begins after {self.method.next_stage.at} rounds, but the run has {self.rounds}; "
                f"write for example --set method.next_stage.at={max(1, self.rounds // 4)}, or more rounds"
            )
        if self.attack is not None and self.method.upload != "delta":
            raise ConfigError(f"an attack changes updates, and upload = {self.method.upload!r}; write upload = 'delta'")
        if self.method.secure_aggregation and self.cohort < 2:
            raise ConfigError("secure_aggregation = true needs a cohort of 2 or more clients, not 1")
        if self.method.secure_aggregation and self.method.privacy.masked is not None:
            self.method.privacy.masked.check_clients(self.cohort)

    @property
    def all_metrics(self) -> dict[str, Metric]:
        """The metrics of the task and those of the job; a regression has R2 and the mean absolute error besides."""
        usual = metrics_by_name(("r2", "mae")) if is_regression(self.task.loss) else {}
        return {**usual, **self.task.metrics, **self.metrics}

    @property
    def ranked_by(self) -> Objective:
        """What rounds and runs are ranked by."""
        return objective_of(self.all_metrics, self._has_accuracy, self.objective or self.task.objective)

    @cached_property
    def _has_accuracy(self) -> bool:
        """Whether evaluations have an accuracy: targets are class labels, or labels of 0 and 1.

        Integers may also be counts, or grades of a ranking. Where the loss does not decide, the shape of one output
        does, as in `evaluate`.
        """
        task = self.task
        if is_classification(task.loss):
            return task.loss is bce or not task.train.targets.is_floating_point()
        if is_regression(task.loss) or task.train.targets.is_floating_point():
            return False
        try:
            inputs, targets = task.train.gather(torch.from_numpy(task.clients.order[:2]))
            outputs = Functional.of(task.model).predictions(inputs)
        except Exception:  # the check before the first round says what is wrong
            return True
        return bool(correct_and_labels(task.loss, outputs, targets)[1])


class RunState(NamedTuple):
    """Everything that a run needs to continue after any round."""

    round: int  # rounds done
    server: ServerState
    clients: Mapping[int, ClientState]  # only of clients that have taken part
    cohort: tuple[int, ...]
    backend: Backend  # chosen once, so that a resumed run uses the same one
    backend_reason: str  # why this one, if it is not the default
    sync_counts: SyncCounts
    chunk: int = 0  # number of clients trained together, where the memory of a GPU limits it
    average: Mapping[str, Tensor] = {}  # the averaged model, weights and buffers; empty unless it is evaluated
    recent: Recent = Recent()  # medians of the latest rounds
    standing: Standing = Standing()  # what is held against clients
    clock: float = 0.0  # simulated seconds since the start
    waiting: tuple[Reply, ...] = ()  # uploads of asynchronous rounds that have not arrived, in the order asked
