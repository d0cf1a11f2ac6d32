"""Small real tasks (the handwritten digits of scikit-learn), and a federation that talks in messages only."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from thinwire.core.key import Key
from thinwire.core.tree import Tree, same
from thinwire.data.examples import Arrays
from thinwire.data.losses import Loss, cross_entropy
from thinwire.data.partition import Assignment
from thinwire.data.task import Task
from thinwire.errors import Drifted
from thinwire.federation.engine import Engine
from thinwire.federation.federation import OnMessage
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.simulation import make_simulation
from thinwire.federation.transfer import to_host
from thinwire.protocol import Method
from thinwire.protocol.client import (
    Group,
    drop_stale,
    initial_client_state,
    make_uploads,
    training_inputs,
    updates,
)
from thinwire.protocol.contract import Contract
from thinwire.protocol.receive import receive, request_full_state
from thinwire.protocol.round import Closed, Reply, Round
from thinwire.protocol.setup import initial_server_state, make_contract
from thinwire.protocol.state import ClientState, PublicState, ServerState
from thinwire.protocol.upload import Upload
from thinwire.schedules.base import Plan
from thinwire.secure.masks import SecAggCohort, sum_masked
from thinwire.training import Local
from thinwire.training.backends import LoopTrainer
from thinwire.training.batches import plan_batches
from thinwire.training.functional import Functional
from thinwire.training.inputs import Trainer, Workload
from thinwire.wire import message as wire

SIZES = (40, 17, 33, 5, 24, 9)  # unequal on purpose


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """(1797, 64) pixels from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


def perceptron(norm: bool = False, hidden: int = 12) -> nn.Module:
    """A small network whose weights are the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
        return nn.Sequential(*layers[:1], *([nn.BatchNorm1d(hidden)] if norm else []), *layers[1:])


def digits_task(model: nn.Module | None = None, sizes=SIZES, loss: Loss = cross_entropy, test: int = 100) -> Task:
    """The digits, dealt in order to clients of these sizes."""
    x, y = digits()
    n = sum(sizes)
    clients = Assignment(np.arange(n), np.concatenate(([0], np.cumsum(sizes))))
    held_out = Arrays(x[-test:], y[-test:]) if test else None
    return Task(model or perceptron(), Arrays(x[:n], y[:n]), clients, held_out, loss=loss)


def keeps_nothing(state: ClientState) -> bool:
    """Whether a client keeps nothing besides the version."""
    return not (state.unsent or state.correction or state.codec or state.opt)


def workload(task: Task, clients, keys, local: Local) -> Workload:
    """The batches of some clients."""
    own = [task.clients.client(i) for i in clients]
    batches = plan_batches([len(mine) for mine in own], keys, local)
    index = np.stack([mine[part] for mine, part in zip(own, batches.index, strict=True)])
    return Workload(
        torch.from_numpy(index), batches.rows, tuple(len(mine) for mine in own), tuple(clients), Key(0), 0,
        task.train.gather,
    )  # fmt: skip


def schema_of(contract: Contract, data: bytes, client: int = 0) -> wire.Schema:
    """The schema with which a message is read: of what clients send, that of the client."""
    return contract.schema.sent_by(client) if data[0] & 15 in wire.FROM_CLIENTS else contract.schema


def same_public(a: PublicState, b: PublicState) -> bool:
    """Whether two public states are equal bit for bit."""
    return a.version == b.version and all(same(x, y) for x, y in zip(a[1:], b[1:], strict=True))


class Federation:
    """A server, and clients that each have their own public state: only bytes pass between them."""

    def __init__(self, method: Method, task: Task | None = None, local: Local | None = None, seed: int = 0) -> None:
        self.task = task or digits_task()
        self.method, self.key, self.local = method, Key(seed), local or Local(epochs=1, batch=16)
        self.model = Functional.of(self.task.model, self.task.loss)
        self.contract, first = make_contract(method.over(100), self.model.weights(), self.model.buffers(), self.key)
        self.server = initial_server_state(self.contract, first)
        self.first = first
        clients = range(len(self.task.clients))
        self.public = dict.fromkeys(clients, first)
        self.states = {i: initial_client_state(self.contract, first, i) for i in clients}
        self.requested: dict[int, Plan] = {}
        self.losses: list[float] = []
        self.drifted: list[int] = []
        self.cohort = tuple(clients)

    @property
    def opened(self) -> Round:
        """The next round on the server."""
        return Round.open(self.contract, self.server)

    def download(self, client: int) -> bytes:
        """Bring one client to the current version by a message."""
        version = self.public[client].version
        data = self.opened.downloads.messages({client: version})[client]
        try:
            received = receive(self.contract, self.public[client], data, client)
        except Drifted:
            self.drifted.append(client)
            lost = request_full_state(self.contract, version, client)
            state = self.opened.downloads.full_state(lost, client)
            received = receive(self.contract, self.first._replace(version=version), state, client)
        self.public[client], synced, self.requested[client] = received
        self.states[client] = drop_stale(self.states[client], synced)
        return data

    def upload(self, client: int, trainer: Trainer | None = None) -> bytes:
        """Train one client; its upload."""
        version = self.server.public.version
        work = workload(self.task, [client], [self.key.fold("batches", version, client)], self.local)
        # the plan that it received, not the one that the server has
        group = Group(self.public[client], self.requested[client], (client,), (self.states[client],))
        ((message, self.states[client]),) = self.train(group, work, trainer)
        return message

    def train(self, group: Group, work: Workload, trainer: Trainer | None = None):
        """Train some clients together; their uploads and next states."""
        inputs = training_inputs(self.contract, self.model, group, work)
        outcome = (trainer or LoopTrainer()).train(inputs)
        update = to_host(updates(self.contract, group, inputs, outcome))()
        secagg = SecAggCohort(self.cohort, lambda i, j: f"{i} {j}".encode())  # tests have no secrets
        self.losses += update.loss.tolist()
        return [(bytes(message), state) for message, state in make_uploads(self.contract, group, update, secagg)]

    def round(self, cohort) -> dict[int, bytes]:
        """One round; the uploads of its clients."""
        plan = Round.open(self.contract, self.server).plan
        self.cohort = tuple(cohort)
        for client in cohort:
            self.download(client)
        up = {client: self.upload(client) for client in cohort}
        self.close(plan, up)
        return up

    def close(self, plan, up: dict[int, bytes]) -> None:
        """Close a round on the server."""
        self.server = closed(self.contract, self.server, plan, up, len(self.task.clients)).server

    def weights(self, public: PublicState | None = None) -> Tree:
        """The weights of the model at a public state."""
        public = public or self.server.public
        return self.method.space.expand(public.base, self.contract.basis(public.version, "cpu"), public.coords)


def decoded(contract: Contract, server: ServerState, plan: Plan, up) -> dict[int, Upload]:
    """Decode the messages of a round, in the order of client numbers."""
    one, version = Round(contract, server, plan), server.public.version
    return {i: one.read(Reply(i, version, up[i], 0.0, 1, ClientState(version))) for i in sorted(up)}


def closed(contract: Contract, server: ServerState, plan: Plan, up, registered: int, noise=None) -> Closed:
    """Decode messages and close the round."""
    uploads = decoded(contract, server, plan, up)
    return Round(contract, server, plan).close(uploads, registered, noise, sum_masked=sum_masked)


def records_of(engine: Engine, job: Job, on_message: OnMessage | None = None) -> list[RoundRecord]:
    """The records of all rounds of a job."""
    federation, records = make_simulation(engine, job), []
    state = federation.start()
    for _ in range(job.rounds):
        state, record = federation.round(state, on_message)
        records.append(record)
    return records
