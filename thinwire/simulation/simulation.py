"""A job on its device, round by round, over real messages.

The cohort of a round, the order of every client's examples and the initial weights are functions of the seed alone,
whatever the method: two methods run with one seed see the same clients and the same batches.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from thinwire.core.key import Key
from thinwire.core.threads import on_one_core
from thinwire.core.tree import Tree, add, to_device
from thinwire.data.examples import Examples
from thinwire.training.functional import Functional
from thinwire.errors import ConfigError, Diverged, ThinwireError
from thinwire.kernels.conv_cpu import by_columns
from thinwire.kernels.support import has_triton
from thinwire.privacy.base import spent
from thinwire.protocol.client import (
    NO_HASTE,
    Haste,
    Reply,
    cohort_round,
    forget,
    initial_client_state,
    make_training_inputs,
)
from thinwire.protocol.download import RoundOpening, receive
from thinwire.protocol.fields import as_received
from thinwire.protocol.foresight import Foreseen, foreseeable
from thinwire.protocol.secagg import SecAggCohort
from thinwire.protocol.server import closed_round
from thinwire.protocol.setup import agree, begin, plan_round
from thinwire.protocol.state import ClientState, Contract, Public, ServerState
from thinwire.protocol.sync_counts import SyncCounts
from thinwire.runtime.job import Job, RoundRecord, RunState
from thinwire.runtime.sampler import Sampler
from thinwire.schedules.base import Plan
from thinwire.simulation.client_states import ClientStates
from thinwire.simulation.lazy import Lazy
from thinwire.simulation.pipeline import Ahead, Early
from thinwire.spaces.base import in_use
from thinwire.training import autotune as probe
from thinwire.training.autotune import Way, first_line
from thinwire.training.cuda_graph import CudaGraphCache
from thinwire.training.local import Backend, UnsupportedModel, Workload
from thinwire.training.precision import kernels, onednn_as_a_rule
from thinwire.training.threads import ThreadPoolTrainer
from thinwire.training.unmerged import for_training
from thinwire.wire.message import Pieces, length

if TYPE_CHECKING:
    from thinwire.simulation.engine import LocalEngine

_NEXT: dict[Backend, Backend] = {"graph": "vmap", "threads": "vmap", "vmap": "loop"}  # where one cannot
OnMessage = Callable[[int, str, int, bytes], None]  # round, "down" or "up", client, message


class _Down(NamedTuple):
    """What opens a round."""

    messages: dict[int, Pieces]
    ordinary: int  # bytes that they would have if nobody had missed a round
    catchup: int  # bytes on top of that

    @classmethod
    def of(cls, opening: RoundOpening, versions: Mapping[int, int]) -> _Down:
        messages = opening.messages(versions)
        return cls(messages, *opening.split([length(pieces) for pieces in messages.values()]))


class _Open(NamedTuple):
    """A round that is open."""

    plan: Plan  # what it wants to hear
    cohort: tuple[int, ...]  # from whom
    known: dict[int, ClientState]  # what these know
    down: Lazy[_Down]  # what they are sent


class Portion(NamedTuple):
    """Some clients of a cohort that are trained together: all that one has to know of them but the public state."""

    number: int  # rounds that were done before
    how: Backend
    onednn: bool | None
    plan: Plan
    cohort: tuple[int, ...]
    clients: tuple[int, ...]
    states: list[ClientState]

    @classmethod
    def of(cls, state: RunState, opened: _Open, clients: tuple[int, ...]) -> Portion:
        """These clients, trained as it was settled."""
        states = [opened.known[i] for i in clients]
        return cls(state.round, state.backend, state.onednn, opened.plan, opened.cohort, clients, states)


class Simulation:
    """A job on its device: what stays the same from round to round. The state goes in and comes out of `round`."""

    def __init__(self, engine: LocalEngine, job: Job) -> None:
        self.engine, self.job = engine, job
        self.device = torch.empty(0, device=engine.device).device  # with its number, if it is a GPU
        products = engine.conv
        if products == "auto":
            # measured on an H200: in 16 bits fused kernels win; in 32 their gradient by the kernel takes too long
            fused = engine.precision == "bf16" and has_triton(self.device)
            products = "grouped" if self.device.type == "cpu" else "fused" if fused else "im2col"
        if products == "fused" and not has_triton(self.device):
            raise ConfigError("conv = 'fused' needs a GPU and the package triton; write conv = 'auto'")
        self.model = replace(
            Functional.of(job.task.model, job.task.loss, self.device),
            products=None if products == "grouped" else products,
            half=engine.precision == "bf16",
        )
        self.alone = replace(self.model, products=None)  # one client is best served by torch's own convolutions
        # but for their gradients on a CPU without oneDNN
        self.columns = self.device.type == "cpu" and engine.conv != "grouped" and by_columns(self.model.module)
        self.recorder, self.crew = CudaGraphCache(), ThreadPoolTrainer()
        self.ahead = Ahead(self.device, on=self.device.type == "cuda" and not engine.workers)
        self.train: Examples = job.task.train.to(self.device)
        self.test: Examples | None = job.task.test.to(self.device) if job.task.test is not None else None
        self.key = Key(job.seed)
        self.contract: Contract
        self.contract, self.public = agree(job.method, self.model.weights(), self.model.buffers(), self.key.fold("run"))
        self.training = for_training(self.contract)
        tiers = job.method.budget.tiers
        everybody = range(len(job.task.clients))
        self.asked = [i for i in everybody if not tiers or tiers[self.contract.tier(i)].asked]
        if not self.asked:
            raise ConfigError("no client is in a tier that is asked; give it a larger share, or list budget.clients")
        self.draws = Sampler(self.key, self.asked, job.cohort, job.local, self.train, job.task.clients, self.device)

    @torch.no_grad()
    def try_on(self) -> None:
        """Show the model one example: what does not fit is found before anything is trained or written."""
        inputs, targets = self.train.gather(torch.from_numpy(self.job.task.clients.client(0)[:1]).to(self.device))
        self.model.module.eval()
        try:
            outputs = self.model.outputs(self.weights(self.public), dict(self.public.buffers), inputs)
            self.model.criterion(outputs, targets)
        except ThinwireError:
            raise
        except Exception as error:
            shapes = {k: list(v.shape) for k, v in inputs.items()} if isinstance(inputs, dict) else list(inputs.shape)
            raise ConfigError(
                f"model, data and loss do not fit: inputs of shape {shapes}: {first_line(error)}"
            ) from error

    def start(self) -> RunState:
        """The state before the first round."""
        how: Backend
        if self.engine.backend == "auto":
            how, why = "graph" if self.device.type == "cuda" else "vmap", ""
        else:
            how, why = self.engine.backend, "asked for"
        return RunState(0, begin(self.contract, self.public), {}, (), how, why, SyncCounts())

    def weights(self, public: Public) -> Tree:
        """The weights with which the model is tested and used, as the server or a client has it (`method.evaluate`)."""
        contract = self.contract.at(public.version)
        if contract.method.evaluate == "client":
            public = as_received(contract, public, contract.method.down)
        basis = contract.basis(public.version, self.device)
        return in_use(contract.method.space, public.base, basis, public.coords)

    def round(self, state: RunState, on_message: OnMessage | None = None) -> tuple[RunState, RoundRecord]:
        """One round."""
        with on_one_core() if self.device.type == "cuda" else nullcontext():
            return self._round(state, on_message)

    def _round(self, state: RunState, on_message: OnMessage | None) -> tuple[RunState, RoundRecord]:
        began = time.perf_counter()
        state = self.settled(state)
        number = state.round + 1
        server, job = state.server, self.job
        public = server.public
        contract = self.contract.at(public.version)
        plan, cohort = self._opening(state)
        early = self.ahead.take(state.round, cohort, public.coords)
        ready = early.ready if early else self.ahead.now()
        opened = self._opened(state, plan, cohort, ready)
        down = opened.down
        try:
            with self.kernels(state.onednn):
                state, replies, loss = self._train(state, opened, early)
            if not math.isfinite(loss):
                raise Diverged(f"the training loss is {loss}; try a smaller learning rate")
            up = {i: message for reply, ids in replies for i, message in zip(ids, reply.messages, strict=True)}
            with self.ahead.beside(ready):
                foreseen = replies[0][0].foreseen
                closed = closed_round(self.contract, server, plan, up, len(job.task.clients), foreseen=foreseen)
            server = self.ahead.settled(closed.server)
        except Diverged as error:
            raise Diverged(f"round {number}: {error}") from error
        if on_message:
            joined = {i: b"".join(pieces) for i, pieces in down.result().messages.items()}
            show(on_message, number, joined, {i: bytes(message) for i, message in up.items()})
        roster = state.clients if isinstance(state.clients, ClientStates) else ClientStates(state.clients)
        pairs = (pair for reply, ids in replies for pair in zip(ids, reply.states, strict=True))
        clients = roster.updated(pair for pair in pairs if pair[0] not in closed.refused)
        test_loss = accuracy = client_accuracy = None
        if self._tested(number):
            with self.kernels(state.onednn), self.ahead.beside():
                test_loss, accuracy = self._test(server.public)
                client_accuracy = self._own_accuracy(server, clients)
        record = RoundRecord(
            number,
            loss,
            accuracy,
            test_loss,
            sum(len(message) for message in up.values()),
            down.result().ordinary,
            down.result().catchup,
            len(cohort),
            time.perf_counter() - began,
            client_accuracy,
            contract.method.client_opt_at(state.server.public.version).lr,
            refused=len(closed.refused),
            bounded=len(closed.bounded),
            epsilon=(self.spent(number) or (None,))[0],
        )
        sync_counts = state.sync_counts.add(contract, plan, up)
        return RunState(
            number, server, clients, cohort, state.backend, state.backend_reason, sync_counts, state.chunk, state.onednn
        ), record

    def spent(self, rounds: int) -> tuple[float | None, str] | None:
        """The epsilon of so many rounds, or why it is not known; None where the method promises none."""
        population = len(self.asked)  # cohorts are drawn from these; the others hide nobody
        return spent(self.job.method.privacy, min(self.job.cohort, population), population, rounds)

    def _go_on(self, state: RunState, plan: Plan, foreseen: Foreseen) -> None:
        """Ask the GPU to train the next cohort from the state that this round will lead to."""
        ready, number, clients = self.ahead.now(), state.round + 1, self.draws.cohort(state.round + 1)
        public = state.server.public._replace(version=state.server.public.version + 1, coords=foreseen.coords)
        work, basis = self.draws.workload(number, clients), self.contract.basis(public.version, self.device)
        blank = [ClientState(public.version)] * len(clients)
        training = self.training.at(public.version)
        lesson = make_training_inputs(training, self.model, public, basis, plan, blank, work, {})
        try:
            trained = self.recorder.train(lesson)
        except torch.OutOfMemoryError:  # two cohorts at a time are more than it can hold
            self.ahead.stop()
            return
        self.ahead.early = Early(number, clients, foreseen.coords, work, trained, ready)

    def _opening(self, state: RunState) -> tuple[Plan, tuple[int, ...]]:
        """Of what the next round wants to hear, and from whom."""
        plan = plan_round(self.contract, state.server)
        if state.cohort and not plan.resample:
            return plan, state.cohort
        return plan, self.draws.cohort(state.round)

    def _tested(self, number: int) -> bool:
        """Whether the model is tested after this round."""
        return number % self.job.eval_every == 0 or number == self.job.rounds

    def _test(self, public: Public) -> tuple[float | None, float | None]:
        """Loss and accuracy on the test examples, where there are any."""
        if self.test is None:
            return None, None
        return self.model.evaluate(self.weights(public), public.buffers, self.test)

    def _opened(
        self, state: RunState, plan: Plan, cohort: tuple[int, ...], ready: torch.cuda.Event | None = None
    ) -> _Open:
        """The next round with what its clients know and are sent, once the public state is ready."""
        server, contract = state.server, self.contract.at(state.server.public.version)
        known = {i: state.clients.get(i) or initial_client_state(contract, server.public, i) for i in cohort}
        opening, versions = RoundOpening(contract, server), {i: known[i].version for i in cohort}
        down = Lazy(lambda: _Down.of(opening, versions), self.ahead.stream, ready)
        known = {i: forget(s, server.ledger.touched(s.version)) for i, s in known.items()}
        return _Open(plan, cohort, known, down)

    def settled(self, state: RunState) -> RunState:
        """The state with the fastest way to train, if it is still open: before the first round, on a CPU.

        A run directory keeps it before that round, so that a run which is resumed goes the same way.
        """
        undecided = self.engine.backend == "auto" and not (state.round or state.backend_reason)
        if not undecided or self.device.type != "cpu":
            return state
        if not probe.wanted():
            return state._replace(backend_reason="THINWIRE_PROBE is off")
        try:
            (how, onednn), why = self._fastest(state, self._opened(state, *self._opening(state)))
        except Diverged as error:
            raise Diverged(f"round {state.round + 1}: {error}") from error
        return state._replace(backend=how, backend_reason=why, onednn=onednn)

    def _fastest(self, state: RunState, opened: _Open) -> probe.Choice:
        """The fastest way to train this cohort, by a race or as one decided before."""
        chunk, seen = next(self._chunks(state, opened))
        work = self.draws.workload(state.round, chunk)

        def run(way: Way, clients: int) -> None:
            tried = state._replace(backend=way.how, onednn=way.onednn)
            some = Portion.of(tried, opened, chunk[:clients])
            with self.kernels(way.onednn):
                self.train_portion(some, seen, work=work.first(clients, probe.STEPS))

        method, contract = self.job.method, self.contract
        parts = (method.space, method.client_opt, method.correction, method.penalty, method.sketch)
        inputs, _ = work.gather(work.index[:1, 0, :1])
        shapes = {k: v.shape for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.shape
        what = (
            *(self.model.module, shapes, contract.weights.digest().hex(), contract.coords.digest().hex()),
            *(type(part).__name__ for part in parts),
            *(min(len(chunk), max(probe.CLIENTS)), work.index.shape[-1], self.engine.conv, self.engine.precision),
            *(platform.machine(), os.cpu_count(), self.crew.workers, torch.__version__),
        )
        # on one core threads are a loop
        hows: tuple[Backend, ...] = ("threads", "vmap", *(("loop",) if self.crew.workers > 1 else ()))
        return probe.choose(what, hows, onednn_as_a_rule(), len(chunk), run)

    def kernels(self, onednn: bool | None = None) -> AbstractContextManager[None]:
        """The kernels to compute with, oneDNN's as chosen."""
        return kernels(self.device, self.engine.precision, onednn)

    def convolutions(self, state: RunState) -> str:
        """How convolutions are done in training."""
        if state.backend not in ("loop", "threads"):
            return self.model.products or "torch"
        onednn = onednn_as_a_rule() if state.onednn is None else state.onednn
        return "columns" if self.columns and not onednn and not self.model.half else "torch"

    def _own_accuracy(self, server: ServerState, clients: Mapping[int, ClientState]) -> float | None:
        """How well each client's own model (public blocks, and what it keeps to itself) does at home, on average."""
        tests = self.job.task.client_tests
        if tests is None:
            return None
        public, shares = server.public, []
        basis = self.contract.basis(public.version, self.device)
        for i in range(len(tests)):
            coords = public.coords
            if i in clients:
                mine = forget(clients[i], server.ledger.touched(clients[i].version))
                coords = {**coords, **add(to_device(mine.held, self.device), coords)}
            weights = in_use(self.contract.at(public.version).method.space, public.base, basis, coords)
            _, share = self.model.evaluate(weights, public.buffers, self.train, tests.client(i))
            if share is not None:
                shares.append(share)
        return sum(shares) / len(shares) if shares else None

    def _train(
        self, state: RunState, opened: _Open, early: Early | None
    ) -> tuple[RunState, list[tuple[Reply, tuple[int, ...]]], float]:
        """Train the cohort chunk by chunk, unless it was trained early."""
        replies: list[tuple[Reply, tuple[int, ...]]] = []
        while True:
            chunks = list(self._chunks(state, opened))
            portions = [(Portion.of(state, opened, chunk), seen) for chunk, seen in chunks]
            haste = self._haste(state, opened, early)
            try:
                for (chunk, _), reply in zip(chunks, self._replies(portions, haste), strict=True):
                    replies.append((reply, chunk))
                break
            except Exception as error:  # training is pure, so nothing is half-done
                state = self._other_way(state, error, max(len(chunk) for chunk, _ in chunks), bool(replies))
                replies, early = [], None
        loss = examples = 0.0
        for reply, chunk in replies:
            for value, client in zip(reply.loss.tolist(), chunk, strict=True):
                count = len(self.job.task.clients.client(client))
                loss, examples = loss + value * count, examples + count
        return state, replies, loss / examples

    def _haste(self, state: RunState, opened: _Open, early: Early | None) -> Haste:
        """What is done ahead of its time in the next round."""

        def meanwhile() -> None:
            self._look_ahead(state, opened.down)

        contract, number = self.contract.at(state.server.public.version), state.round + 1
        # the first round shows whether this way of training works
        may = self.ahead.on and self._whole(state) and 1 < number < self.job.rounds
        may = may and state.backend == "graph" and foreseeable(contract, state.server, opened.plan)
        trained, work = (early.trained, early.work) if early else (None, None)
        return Haste(meanwhile, trained, work, partial(self._go_on, state, opened.plan) if may else None)

    def _other_way(self, state: RunState, error: Exception, size: int, begun: bool) -> RunState:
        """How to train where one way failed, with so many clients at a time: fewer of them, or the next way."""
        if _short_of_memory(error):
            if size == 1 or self.engine.chunk:
                smaller = f"local.batch = {max(1, self.job.local.batch // 2)}"
                clients, instead = (
                    ("one client", smaller) if size == 1 else (f"{size} clients", f"engine.chunk = {size // 2}")
                )
                raise ConfigError(
                    f"{self.device} has too little memory to train {clients} at a time; write for example {instead}"
                ) from error
            self.ahead.stop()
            self.recorder = CudaGraphCache()  # recordings hold the memory of a chunk
            torch.cuda.empty_cache()
            why = f"{size} clients at a time are more than the memory of {self.device} holds"
            return state._replace(
                chunk=-(-size // 2), backend_reason="; ".join(filter(None, (state.backend_reason, why)))
            )
        # what a model cannot do is found at the first chunk
        auto = self.engine.backend == "auto"
        if isinstance(error, UnsupportedModel) and not auto:
            raise ConfigError(f"backend = {state.backend!r}: {error}; write backend = 'auto'") from error
        ours = isinstance(error, ThinwireError) and not isinstance(error, UnsupportedModel)
        if ours or state.backend == "loop" or not auto or state.round or begun:
            raise error
        why = "; ".join(filter(None, (state.backend_reason, f"{state.backend} failed: {first_line(error)}")))
        return state._replace(backend=_NEXT[state.backend], backend_reason=why)

    def _replies(self, portions: list[tuple[Portion, Public]], haste: Haste) -> Iterator[Reply]:
        """What the clients of each portion give back, from the public state that they received."""
        for portion, seen in portions:
            yield self.train_portion(portion, seen, haste)

    def train_portion(
        self, portion: Portion, seen: Public, haste: Haste = NO_HASTE, work: Workload | None = None
    ) -> Reply:
        """Train some clients of a cohort from the public state that they received, on their own examples by default."""
        number, how, _, plan, cohort, clients, states = portion
        circle = SecAggCohort(cohort, self._secret) if self.job.method.secure_aggregation else None
        basis = self.contract.basis(seen.version, self.device)
        work = work or haste.work or self.draws.workload(number, clients)
        model = self.alone if how in ("loop", "threads") else self.model
        told = (seen, basis, plan, clients, states, work, how)
        return cohort_round(self.training, model, *told, self.recorder, circle, self.crew, haste)

    def _chunks(self, state: RunState, opened: _Open) -> Iterator[tuple[tuple[int, ...], Public]]:
        """FlatTree the cohort into chunks of clients that start from the same public state.

        On incremental download every client reaches the server's own, bit for bit, so nothing is replayed here; on 'snapshot'
        clients of one tier read the same coordinates.
        """
        snapshot = self.job.method.download == "full"
        groups: dict[int, list[int]] = {}
        for i in opened.cohort:
            groups.setdefault(self.contract.tier(i) if snapshot else 0, []).append(i)
        for ids in groups.values():
            seen = state.server.public
            if snapshot:
                before = self.public._replace(version=opened.known[ids[0]].version)
                told = b"".join(opened.down.result().messages[ids[0]])
                seen = receive(self.contract, before, told, ids[0]).public
            size = state.chunk or self.engine.chunk or math.ceil(len(ids) / max(1, self.engine.workers))
            for start in range(0, len(ids), size):
                yield tuple(ids[start : start + size]), seen

    def _secret(self, i: int, j: int) -> bytes:
        """What two clients share. The simulator deals secrets; clients of their own would agree on them."""
        return hashlib.blake2b(f"{i} {j}".encode(), key=self.key.fold("secret").value.to_bytes(8, "little")).digest()

    def _whole(self, state: RunState) -> bool:
        """Whether all clients of a cohort are trained together."""
        return not (state.chunk or self.engine.chunk or self.engine.workers or self.job.method.budget.tiers)

    def _look_ahead(self, state: RunState, down: Lazy[_Down]) -> None:
        """What can be done while the device is busy: this round's messages, the batches of the next.

        The latter in vain where the next round keeps its clients.
        """
        down.result()
        number = state.round + 1
        busy = self.device.type == "cuda"  # with training; a CPU has nothing left to look ahead with
        if busy and self._whole(state) and number < self.job.rounds:
            self.draws.plan(number)


def show(on_message: OnMessage, number: int, down: Mapping[int, bytes], up: Mapping[int, bytes]) -> None:
    """Show the messages of a round to whoever wants to see them."""
    for direction, messages in (("down", down), ("up", up)):
        for client, message in messages.items():
            on_message(number, direction, client, message)


def _short_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU's memory did not suffice; a recording that broke off may say something else of it first."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
