"""A federation: a job on a device, and its rounds. Who the clients are, it does not know.

    Round.open  ->  clients.collect  ->  clients.close  ->  state and record  ->  evaluation

Clients are simulated (`simulated.py`, `ray_workers.py` in several processes, `buffered.py` for asynchronous rounds), or
real ones over Flower (`flower/server.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from thinwire.core.key import Key
from thinwire.core.parallel import compute_with, on_one_core
from thinwire.core.text import visible
from thinwire.core.tree import Tree, add, to_device
from thinwire.data.checks import check_task
from thinwire.data.examples import Examples, Inputs
from thinwire.errors import ConfigError, Diverged, Unfit, WireError
from thinwire.federation.attacks import poisoned
from thinwire.federation.engine import Engine
from thinwire.federation.evaluation import averaged, training_loss, where_defined, with_client_accuracies
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.sampler import Sampler
from thinwire.federation.standing import left_out
from thinwire.kernels.conv import Products
from thinwire.kernels.support import has_triton
from thinwire.protocol.bounds import Known, Recent
from thinwire.protocol.round import Closed, Reply, Round
from thinwire.protocol.setup import initial_server_state, make_contract
from thinwire.protocol.state import ClientState, ClientStates, PublicState, SyncCounts
from thinwire.protocol.upload import MAX_EXAMPLES, Upload, as_received, received_weight
from thinwire.secure.masks import sum_masked
from thinwire.training.evaluation import Evaluation, all_batches, evaluate
from thinwire.training.functional import Functional
from thinwire.training.inputs import Backend
from thinwire.training.own_trainer import OwnTrainer
from thinwire.wire.message import Parts

NAMED = 20  # clients whose reasons are in a record
OnMessage = Callable[[int, str, int, bytes], None]  # round, "down" or "up", client, message


@dataclass
class Collected:
    """What a round has received.

    Args:
        round: the round.
        state: the state before it, with the training backend that was used.
        cohort: the clients that took part.
        versions: the version that each of them has.
        downloads: what was sent to them.
        replies: what they sent.
        uploads: their decoded uploads.
        refused: clients whose upload cannot be used, with reasons.
        loss: mean training loss, weighted by examples.
        waiting: uploads of an asynchronous round that arrive later.
        clock: simulated seconds since the start of the run; None where no clock runs.
        bytes_up: bytes of uploads.
        bytes_down: bytes of ordinary downloads.
        bytes_catchup: bytes beyond these, because clients had missed rounds.
        bounded: clients whose upload or reports were bounded, with reasons.
        bad: clients that lose standing: refused, or scaled down heavily.
        late: clients that the round did not wait for.
        absent: places of the cohort without a response.
        drifted: clients that were sent the whole state.
        left_out: clients that it was drawn without, and until when.
        asked: the most clients that were asked in a round so far, and the fewest that were there; 0 for the job's.
    """

    round: Round
    state: RunState
    cohort: tuple[int, ...] = ()
    versions: dict[int, int] = field(default_factory=dict)
    downloads: dict[int, Parts] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)
    uploads: dict[int, Upload] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    loss: float = 0.0
    waiting: tuple[Reply, ...] = ()
    clock: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_catchup: int = 0
    bounded: dict[int, str] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    absent: int = 0
    drifted: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    asked: tuple[int, int] = (0, 0)

    @property
    def number(self) -> int:
        """The number of the round, from 1."""
        return self.state.round + 1

    @property
    def sent(self) -> tuple[int, int, int]:
        """Bytes of the round: up, down, and for catching up."""
        return self.bytes_up, self.bytes_down, self.bytes_catchup

    @property
    def counted(self) -> dict[int, Reply]:
        """The replies that are used."""
        return {i: self.replies[i] for i in self.uploads}


class Clients:
    """The clients of a federation: they train, and their uploads are collected.

    Args:
        federation: the federation that they take part in.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation, self.contract, self.job = federation, federation.contract, federation.job
        self.without: Mapping[int, int] = {}  # clients far off when the run went back, and the last round without them
        self.attempt = 0  # how often the run went back

    simulated = False
    """Whether clients are on this machine: then none should be refused."""

    backend: tuple[Backend, str] = ("loop", "clients are in other processes")
    """The training backend before the first round, and the reason if it is not the default."""

    def open(self, round: Round, state: RunState) -> Collected:
        """A round before anything was received."""
        return Collected(round, state, left_out=self.left_out(state))

    def collect(self, got: Collected) -> None:
        """Collect the uploads of a round. A federation without clients, as a node has it, has no rounds."""
        raise NotImplementedError

    def count(self, got: Collected) -> None:
        """Count the bytes of the messages that were produced, where that was not done before."""

    # -- one path for all uploads, of simulated and of real clients: read, refuse, bound -----------------------------

    def read(self, got: Collected, reply: Reply) -> Upload:
        """The decoded upload of a client; raises WireError or Diverged if it is refused."""
        upload = self.decoded(got, reply)
        if not (math.isfinite(reply.loss) and 0 < reply.examples <= MAX_EXAMPLES):
            raise Diverged(f"its training loss is {reply.loss} over {reply.examples} examples")
        return upload

    def decoded(self, got: Collected, reply: Reply) -> Upload:
        """The decoded upload of a client; raises WireError if it cannot be decoded."""
        return got.round.read(reply)

    def usable(self, got: Collected, reply: Reply) -> Upload | str:
        """The decoded upload of a client, or why it is refused."""
        try:
            return self.read(got, reply)
        except (WireError, Diverged) as error:
            return str(error)

    def accept(self, got: Collected, client: int, found: Upload | str) -> None:
        """Add an upload to a round, or the reason why it is refused."""
        if isinstance(found, str):
            self.refuse(got, client, found)
        else:
            got.uploads[client] = found

    def refuse(self, got: Collected, client: int, why: str, bad: bool = True) -> None:
        """Remove an upload; each refused client is named once in the log of a round.

        Args:
            got: the round.
            client: the client.
            why: the reason.
            bad: whether the client loses standing.
        """
        if client not in got.refused:
            self.say(got, f"refused {self.names([client])}: {why}")
        got.refused[client] = why
        got.uploads.pop(client, None)
        got.bad.update([client] if bad else [])

    def close(self, got: Collected) -> Closed:
        """The next version from these uploads; clients that are refused then are removed from what was received."""
        state, method, version = got.state, self.job.method, got.round.version
        recent, lr = state.recent, self.contract.at(version).client_opt(version).lr
        if got.refused and not got.uploads:
            raise Diverged(f"no upload can be used: {next(iter(got.refused.values()))}; try a smaller learning rate")
        known = {i: one for i in got.uploads if (one := self.known(state, i))}
        clients = len(self.job.task.clients)
        closed = got.round.close(got.uploads, clients, self.noise(), recent.sizes(lr), known, sum_masked)
        claimed = {i: one.weight for i, one in got.uploads.items() if i not in known}
        for client, why in closed.uploads.refused.items():
            self.refuse(got, client, why)
        own = self.job.task.clients
        unknown = self.job.task.blank or method.secure_aggregation  # there, each client counts with the mean
        examples = {} if unknown else {i: len(own.client(i)) for i in got.uploads}
        got.loss, odd, medians = training_loss(got.counted, recent, examples, method.norm_bound > 0)
        got.bounded = {i: why for i, why in {**odd, **closed.uploads.bounded}.items() if i in got.uploads}
        for i, why in got.bounded.items():
            self.say(got, f"bounded {self.names([i])}: {why}")
        got.bad |= closed.uploads.heavy
        sizes = {i: size for i, size in closed.uploads.sizes.items() if i in got.uploads}
        recent = recent.after({**closed.uploads.medians, **medians}, lr, sizes, state.round)
        if self.contract.at(version + 1) is not self.contract.at(version):  # its coordinates have other sizes
            recent = Recent()
        standing = state.standing
        if claimed and not method.secure_aggregation:
            standing = standing._replace(weights={**claimed, **standing.weights})
        if not (method.privacy.active or method.secure_aggregation):  # there, no client decides who takes part
            standing = standing.after(got.number, got.bad, got.uploads.keys() - got.bad)
        for client, last in sorted(standing.until.items() - state.standing.until.items()):
            self.say(got, f"{self.names([client])} is left out until round {last}, after several such uploads")
        got.state = state._replace(recent=recent, standing=standing)
        return closed

    def noise(self) -> Key | None:
        """The source of noise for differential privacy; None for the seed, which clients know."""
        return None

    def known(self, state: RunState, client: int) -> Known | None:
        """The weight and the local steps of a client, from the task or from earlier rounds; None if it is new."""
        task, weights = self.job.task, state.standing.weights
        if task.blank:
            return Known(weights[client]) if client in weights else None
        size = len(task.clients.client(client))
        return Known(received_weight(self.contract, size), self.job.local.steps_of(size))

    def left_out(self, state: RunState) -> dict[int, str]:
        """The clients that the next round leaves out, and until when: at most half."""
        until = {**state.standing.until}
        until |= {i: max(number, until.get(i, 0)) for i, number in self.without.items()}
        out = left_out(until, state.round + 1, self.federation.eligible)
        return {i: f"until round {last}, after uploads that were refused or far off" for i, last in out.items()}

    def say(self, got: Collected, line: str) -> None:
        """Log a line about a round; a simulation has no log."""

    def names(self, clients: Iterable[int]) -> str:
        """The names of some clients, as text."""
        return ", ".join(f"client {i}" for i in clients)

    def evaluate(self, state: RunState, record: RoundRecord) -> RoundRecord:
        """The record of a round with evaluations of clients on their own examples."""
        return record

    def results(self, state: RunState) -> list[dict[str, Any]]:
        """The numbers of each client after the last round; none if clients are in other processes."""
        return []

    def leave_out(self, until: Mapping[int, int], attempt: int) -> None:
        """Leave clients out of cohorts.

        Args:
            until: the last round without each of them.
            attempt: how often the run went back so far.
        """
        self.without, self.attempt = dict(until), attempt


class Federation:
    """A job on a device. The state goes in and comes out of `round`; everything here stays the same.

    Args:
        engine: the device and how to compute on it.
        job: what is trained, by which method, on which data.
        clients: makes the clients; by default there are none, and no rounds.
    """

    def __init__(self, engine: Engine, job: Job, clients: Callable[[Federation], Clients] = Clients) -> None:
        self.engine, self.job = engine, job
        self.device = torch.empty(0, device=engine.device).device  # with its index, if it is a GPU
        functional = Functional.of(job.task.model, job.task.loss, self.device)
        self.model = replace(
            functional,
            products=_conv(engine, self.device),
            half=engine.precision == "bf16",
            logit_adjustment=job.local.logit_adjustment,
            pseudo_count=job.local.pseudo_count,
            adapter_dropout=job.method.space.adapter_dropout,
        )
        self.key = Key(job.seed)
        train = poisoned(job.task, job.attack, self.key) if job.attack else job.task.train
        self.train: Examples = train.to(self.device)
        self.test: Examples | None = job.task.test.to(self.device) if job.task.test is not None else None
        self._test_batches: tuple[Tensor, ...] = ()
        weights, buffers = self.model.weights(), self.model.buffers()
        method = job.method.over(job.rounds).for_model(functional.module)  # both sides know the number of rounds
        self.contract, self.first = make_contract(method, weights, buffers, self.key.fold("run"))
        tiers, everyone = job.method.budget.tiers, range(len(job.task.clients))
        self.eligible = [i for i in everyone if not tiers or tiers[self.contract.tier(i)].sampled]
        if not self.eligible:
            raise ConfigError("no client is in a tier that takes part; give it a larger share, or list budget.clients")
        data = (self.train, job.task.clients, self.device)
        self.sampler = Sampler(self.key, self.eligible, job.cohort, job.local, *data)
        self.averages = job.method.evaluate == "average"  # the averaged model is evaluated and saved
        # a context in which torch computes with the precision of the engine, and with oneDNN where it is faster
        self.compute = partial(compute_with, self.device, engine.precision)
        self.clients = clients(self)

    @cached_property
    def own_trainer(self) -> OwnTrainer | None:
        """The trainer of one's own, where there is one; only machines that train load it."""
        trainer = self.job.local.trainer
        return OwnTrainer.of(trainer, replace(self.model, products=None)) if trainer else None

    def try_model(self) -> None:
        """Check data, model and loss, so that a mismatch is found before anything is trained or written."""
        check_task(self.job.task, self._initial_outputs, batch=self.job.local.batch)

    def _initial_outputs(self, inputs: Inputs) -> Tensor:
        """The outputs of the initial model, as the method starts it, for a batch on the CPU."""
        self.model.module.eval()
        own = tree_map(lambda block: block.to(self.device), inputs)
        return self.model.outputs(self.weights(self.first), dict(self.first.buffers), own).cpu()

    # -- rounds --------------------------------------------------------------------------------------------------------

    def start(self) -> RunState:
        """The state before the first round."""
        server = initial_server_state(self.contract, self.first)
        return RunState(0, server, {}, (), *self.clients.backend, SyncCounts())

    def round(self, state: RunState, on_message: OnMessage | None = None) -> tuple[RunState, RoundRecord]:
        """One round: the state after it, and its record.

        Args:
            state: the state before it.
            on_message: is called with every message, as it is sent.
        """
        began = time.perf_counter()
        with on_one_core() if self.device.type == "cuda" else nullcontext():
            got = self.clients.open(Round.open(self.contract, state.server), state)
            try:
                self.clients.collect(got)
                closed = self.clients.close(got)
            except Unfit:
                raise
            except Diverged as error:
                self._count(got, on_message)
                raise Diverged(f"round {got.number}: {error}", got.sent) from error
            self._count(got, on_message)
            after, record = self._finished(got, closed)
            if (due := self.is_evaluated(record.round)) or self.averages:
                after, record = self._evaluated(after, record, due)
        return after, record._replace(seconds=time.perf_counter() - began)

    def _count(self, got: Collected, on_message: OnMessage | None) -> None:
        """Count, and show, the messages of a round that were produced so far."""
        self.clients.count(got)
        if on_message is not None:
            for client, message in got.downloads.items():
                on_message(got.number, "down", client, bytes(message))
            for client, reply in got.replies.items():
                on_message(got.number, "up", client, bytes(reply.message))

    def _finished(self, got: Collected, closed: Closed) -> tuple[RunState, RoundRecord]:
        """State and record after a round, without evaluation."""
        state, method, version = got.state, self.job.method, got.round.version
        used = [*got.counted.values()]
        new = ((one.client, one.state) for one in used)
        handed: list[tuple[int, ClientState]] = []
        if method.opt_owner == "place":  # clients that are not in this cohort have handed their optimizer state over
            kept = [(i, state.clients[i]) for i in state.cohort if i in state.clients and i not in got.cohort]
            handed = [(i, replace(one, opt={})) for i, one in kept]
        after = state._replace(
            round=state.round + 1,
            server=closed.server,
            clients=ClientStates.updated(state.clients, (*handed, *new)),
            cohort=got.cohort,
            sync_counts=got.round.counts(state.sync_counts, got.uploads),
            clock=state.clock if got.clock is None else got.clock,
            waiting=got.waiting,
        )
        kinds = {"refused": got.refused, "bounded": got.bounded, "left out": got.left_out}
        reasons = [(i, f"{kind}: {why}") for kind, found in kinds.items() for i, why in found.items()]
        record = RoundRecord(
            round=after.round,
            loss=got.loss,
            accuracy=None,
            test_loss=None,
            bytes_up=got.bytes_up,
            bytes_down=got.bytes_down,
            bytes_catchup=got.bytes_catchup,
            clients=len(used),
            seconds=0.0,
            lr=self.contract.at(version).client_opt(version).lr,
            drifted=got.drifted,
            refused=len(got.refused),
            bounded=len(got.bounded),
            left_out=len(got.left_out),
            why={str(i): visible(text, 300) for i, text in reasons[:NAMED]},
            absent=got.absent,
            late=len(got.late),
            clock=got.clock,
            staleness=sum(version - one.version for one in used) / len(used) if method.asynchronous.active else None,
        )
        if method.privacy.active and (spent := self.epsilon(after.round, *got.asked)):
            record = record._replace(epsilon=spent[0])
        # of the model that clients received, which is that of the round before
        if evaluations := [one.evaluation.accuracy for one in used if one.evaluation]:
            valid = [one for one in evaluations if one is not None and 0 <= one <= 1]
            record = with_client_accuracies(record, valid)
        return after, record

    def _evaluated(self, state: RunState, record: RoundRecord, due: bool) -> tuple[RunState, RoundRecord]:
        """The state of a round with its averaged model, and its record with the evaluation, if that is due."""
        public = state.server.public
        with self.compute():
            if self.averages:
                newest = {**self.weights(public), **public.buffers}
                average = averaged(state.average, newest, public.version, self.job.method.ema_decay)
                state = state._replace(average=average)
            if due and self.test is not None:
                found = self.evaluation(*self.final(state))
                record = record._replace(test_loss=found.loss, accuracy=found.accuracy, metrics=found.metrics)
            if due:
                record = self.clients.evaluate(state, record)
        return state, record

    def epsilon(self, rounds: int, asked: int = 0, available: int = 0) -> tuple[float | None, str] | None:
        """The epsilon of this number of rounds, or why it is not known; None where the method promises none.

        Args:
            rounds: the number of rounds.
            asked: the most clients that were asked in a round; by default the cohort.
            available: the fewest clients that a cohort was drawn from; by default all that are eligible.
        """
        if not self.job.method.privacy.active:
            return None
        population = available or len(self.eligible)  # cohorts are drawn from these
        return self.job.method.privacy.spent(min(asked or self.job.cohort, population), population, rounds)

    # -- the model and its evaluation ----------------------------------------------------------------------------------

    def final(self, state: RunState) -> tuple[Tree, Tree]:
        """The weights and buffers to evaluate and to save: those of the newest version, or their average."""
        public = state.server.public
        if not state.average:
            return self.weights(public), dict(public.buffers)
        specs = self.contract.weights, self.contract.buffers
        weights, buffers = ({one.name: state.average[one.name].to(one.dtype) for one in spec.blocks} for spec in specs)
        return weights, buffers

    def evaluated(self, public: PublicState) -> PublicState:
        """A version as the server or, with `evaluate = "client"`, a client has it."""
        contract = self.contract.at(public.version)
        client = contract.method.evaluate == "client"
        return as_received(contract, public, contract.method.down) if client else public

    def weights(self, public: PublicState) -> Tree:
        """The weights of a version, as it is evaluated."""
        contract, public = self.contract.at(public.version), self.evaluated(public)
        basis = contract.basis(public.version, self.device)
        return contract.method.space.evaluation_weights(public.base, basis, public.coords)

    def is_evaluated(self, number: int) -> bool:
        """Whether the model is evaluated after this round."""
        return number % self.job.eval_every == 0 or number == self.job.rounds

    def evaluation(self, weights: Tree, buffers: Tree) -> Evaluation:
        """The evaluation of a model on the test set."""
        assert self.test is not None
        if not self._test_batches:  # the same batches every time
            self._test_batches = all_batches(self.model, weights, buffers, self.test)
        metrics, batches = self.job.all_metrics, self._test_batches
        return evaluate(self.model, weights, buffers, self.test, metrics=metrics, batches=batches)

    def client_evaluation(
        self,
        public: PublicState,
        state: ClientState | None,
        client: int,
        average: tuple[Tree, Tree] | None = None,
        every: bool = False,
    ) -> Evaluation | None:
        """Loss, accuracy and metrics of a client's model on its own validation examples; None if it has none.

        Args:
            public: the public state that the client has.
            state: the client's state; None if it keeps nothing.
            client: its number.
            average: weights and buffers that are evaluated unless the client has changes that it has not sent; by
                default the public state, with the changes added.
            every: whether to compute all metrics of the job also if there is a test set, not only the objective. They
                are NaN where they are not defined, and left out where one cannot be computed.
        """
        tests = self.job.task.client_tests
        if tests is None or not len(tests.client(client)):
            return None
        contract, coords = self.contract.at(public.version), public.coords
        if state is not None and state.unsent:
            coords, average = {**coords, **add(to_device(state.unsent, self.device), coords)}, None
        basis = contract.basis(public.version, self.device)
        model = average or (contract.method.space.evaluation_weights(public.base, basis, coords), public.buffers)
        known, ranked_by = self.job.all_metrics, self.job.ranked_by.name
        metrics = {name: one for name, one in known.items() if every or self.test is None or name == ranked_by}
        measured = partial(evaluate, self.model, *model, self.train, tests.client(client))
        try:
            return measured(where_defined(metrics))
        except ConfigError:
            if every:
                return measured()
            raise


def _conv(engine: Engine, device: torch.device) -> Products | None:
    """How convolutions of many clients are computed; None for torch's grouped convolution."""
    conv = engine.conv
    if conv == "auto":
        # measured on an H200 (docs/benchmarks.md): fused kernels are fastest in every precision
        conv = "fused" if has_triton(device) else "grouped"
    if conv == "fused" and not has_triton(device):
        raise ConfigError("conv = 'fused' needs a GPU and the package triton; write conv = 'auto'")
    return None if conv == "grouped" else conv
