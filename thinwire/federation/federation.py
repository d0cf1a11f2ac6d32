"""What simulation and deployment share: contract, model, data, sampling, evaluation of a job on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.tree import Tree, add, to_device
from thinwire.data.checks import check_task
from thinwire.data.examples import Examples, Inputs
from thinwire.errors import ConfigError
from thinwire.federation.average import averaged
from thinwire.federation.client_evaluations import where_defined
from thinwire.federation.engine import EngineSettings
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.poisoned import poisoned
from thinwire.federation.sampler import Sampler
from thinwire.federation.stored_layout import on_model
from thinwire.kernels.conv import Products
from thinwire.kernels.support import has_triton
from thinwire.protocol.setup import initial_server_state, make_contract, plan_round
from thinwire.protocol.state import ClientState, PublicState
from thinwire.protocol.sync_counts import SyncCounts
from thinwire.protocol.upload import as_received
from thinwire.schedules.base import Plan
from thinwire.training.evaluation import Evaluation, all_batches, begin_evaluation, evaluate
from thinwire.training.functional import Functional
from thinwire.training.inputs import Backend
from thinwire.training.own_trainer import OwnTrainer
from thinwire.training.precision import compute_with, prefers_onednn

OnMessage = Callable[[int, str, int, bytes], None]  # round, "down" or "up", client, message


class Federation:
    """A job on a device: everything that does not change from round to round.

    Args:
        engine: the device and how to compute on it.
        job: what is trained, by which method, on which data.
    """

    def __init__(self, engine: EngineSettings, job: Job) -> None:
        self.engine, self.job = engine, job
        self.device = torch.empty(0, device=engine.device).device  # with its index, if it is a GPU
        functional = Functional.of(job.task.model, job.task.loss, self.device)
        self.model = replace(
            functional,
            products=_conv(engine, self.device),
            half=engine.precision == "bf16",
            logit_adjustment=job.local.logit_adjustment,
            pseudo_count=job.local.pseudo_count,
            adapter_dropout=getattr(job.method.space, "lora_dropout", 0.0),
        )
        train = poisoned(job.task, job.attack, Key(job.seed)) if job.attack else job.task.train
        self.train: Examples = train.to(self.device)
        self.test: Examples | None = job.task.test.to(self.device) if job.task.test is not None else None
        self._test_batches: tuple[Tensor, ...] = ()
        self.key, self._onednn = Key(job.seed), prefers_onednn()
        weights, buffers = self.model.weights(), self.model.buffers()
        method = on_model(job.method.over(job.rounds), functional.module)  # both sides know the number of rounds
        self.contract, self.first = make_contract(method, weights, buffers, self.key.fold("run"))
        tiers, everyone = job.method.budget.tiers, range(len(job.task.clients))
        self.eligible = [i for i in everyone if not tiers or tiers[self.contract.tier(i)].sampled]
        if not self.eligible:
            raise ConfigError("no client is in a tier that takes part; give it a larger share, or list budget.clients")
        data = (self.train, job.task.clients, self.device)
        self.sampler = Sampler(self.key, self.eligible, job.cohort, job.local, *data)
        self.recorded: Mapping[int, tuple[int, ...]] = {}  # cohorts by round that replace those of the seed
        self.arrivals: Mapping[int, Mapping[int, int]] = {}  # of asynchronous rounds: client -> version trained

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
        own = to_device(inputs, self.device) if isinstance(inputs, dict) else inputs.to(self.device)
        return self.model.outputs(self.weights(self.first), dict(self.first.buffers), own).cpu()

    def start(self, backend: Backend, reason: str) -> RunState:
        """The state before the first round."""
        return RunState(0, initial_server_state(self.contract, self.first), {}, (), backend, reason, SyncCounts())

    def sample(self, state: RunState) -> tuple[Plan, tuple[int, ...]]:
        """The plan and the cohort of the next round; within a window of the schedule the cohort stays the same."""
        plan = plan_round(self.contract, state.server)
        if self.recorded:
            return plan, self.recorded[state.round + 1]
        keep = state.cohort and not plan.resample
        return plan, state.cohort if keep else self.sampler.cohort(state.round)

    def compute(self, onednn: bool | None = None) -> AbstractContextManager[None]:
        """A context in which torch computes with the precision of the engine, with oneDNN or without."""
        wanted = self._onednn if onednn is None else onednn
        if self.device.type == "cpu" and wanted == bool(torch.backends.mkldnn.enabled):
            return nullcontext()
        return compute_with(self.device, self.engine.precision, wanted)

    @property
    def averages(self) -> bool:
        """Whether the averaged model is evaluated and saved."""
        return self.job.method.evaluate == "average"

    def with_average(self, state: RunState) -> RunState:
        """The state after a round with its version in the averaged model; the same state where none is asked for."""
        if not self.averages:
            return state
        public = state.server.public
        newest = {**self.weights(public), **public.buffers}
        average = averaged(state.average, newest, public.version, self.job.method.ema_decay)
        return state._replace(average=average)

    def final(self, state: RunState) -> tuple[Tree, Tree]:
        """The weights and buffers to evaluate and to save: those of the newest version, or their average."""
        public = state.server.public
        if not state.average:
            return self.weights(public), dict(public.buffers)
        specs = self.contract.weights, self.contract.buffers
        weights, buffers = ({one.name: state.average[one.name].to(one.dtype) for one in spec.blocks} for spec in specs)
        return weights, buffers

    def weights(self, public: PublicState) -> Tree:
        """The weights of a version, as the server or, with `evaluate = "client"`, a client has them."""
        contract = self.contract.at(public.version)
        if contract.method.evaluate == "client":
            public = as_received(contract, public, contract.method.down)
        basis = contract.basis(public.version, self.device)
        return contract.method.space.evaluation_weights(public.base, basis, public.coords)

    def is_evaluated(self, number: int) -> bool:
        """Whether the model is evaluated after this round."""
        return number % self.job.eval_every == 0 or number == self.job.rounds

    def begin_evaluation(self, public: PublicState) -> Callable[[], Evaluation] | None:
        """Begin to evaluate a version on the test set, if there is one; a call of the result waits for it."""
        if self.test is None:
            return None
        return self._begin_evaluation(self.test, self.weights(public), dict(public.buffers))

    def _begin_evaluation(self, test: Examples, weights: Tree, buffers: Tree) -> Callable[[], Evaluation]:
        """Begin to evaluate a model on the test set, in the same batches every time."""
        if not self._test_batches:
            self._test_batches = all_batches(self.model, weights, buffers, test)
        metrics, batches = self.job.all_metrics, self._test_batches
        return begin_evaluation(self.model, weights, buffers, test, metrics=metrics, batches=batches)

    def evaluated(
        self, state: RunState, record: RoundRecord, begun: Callable[[], Evaluation] | None = None
    ) -> RoundRecord:
        """The record of a round with loss, accuracy and metrics on the test set, if there is one.

        Args:
            state: the state after the round.
            record: its record.
            begun: the result of `begin_evaluation` of the same version.
        """
        if self.test is None:
            return record
        found = (begun or self._begin_evaluation(self.test, *self.final(state)))()
        return record._replace(test_loss=found.loss, accuracy=found.accuracy, metrics=found.metrics)

    def client_evaluation(
        self, public: PublicState, state: ClientState | None, client: int, average: tuple[Tree, Tree] | None = None
    ) -> Evaluation | None:
        """Loss and accuracy of a client's model on its own validation examples; None if it has none.

        Without a test set, also the metrics of the job, which are NaN where they are not defined.

        Args:
            public: the public state that the client has.
            state: the client's state; None if it keeps nothing.
            client: its number.
            average: weights and buffers of the averaged model, which a client without unsent changes uses instead.

        Its model is the public one, with the client's unsent changes added.
        """
        tests = self.job.task.client_tests
        if tests is None or not len(tests.client(client)):
            return None
        contract, coords = self.contract.at(public.version), public.coords
        if state is not None and state.unsent:
            coords, average = {**coords, **add(to_device(state.unsent, self.device), coords)}, None
        basis = contract.basis(public.version, self.device)
        model = average or (contract.method.space.evaluation_weights(public.base, basis, coords), public.buffers)
        metrics = where_defined(self.job.all_metrics) if self.test is None else {}
        return evaluate(self.model, *model, self.train, tests.client(client), metrics)

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


def show_messages(on_message: OnMessage, number: int, down: Mapping[int, bytes], up: Mapping[int, bytes]) -> None:
    """Call `on_message` with all messages of a round."""
    for direction, messages in (("down", down), ("up", up)):
        for client, message in messages.items():
            on_message(number, direction, client, message)


def _conv(engine: EngineSettings, device: torch.device) -> Products | None:
    """How convolutions of many clients are computed; None for torch's grouped convolution."""
    conv = engine.conv
    if conv == "auto":
        # measured on an H200 (docs/benchmarks.md): fused kernels are fastest in every precision
        conv = "fused" if has_triton(device) else "grouped"
    if conv == "fused" and not has_triton(device):
        raise ConfigError("conv = 'fused' needs a GPU and the package triton; write conv = 'auto'")
    return None if conv == "grouped" else conv
