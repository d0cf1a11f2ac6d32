"""Federated learning in three lines of Python: your model, your clients' data, a method.

>>> import torch, thinwire as tw
>>> clients = [(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
>>> run = tw.simulate(torch.nn.Linear(4, 2), clients, tw.Method(client_opt=tw.SGD(0.1)), rounds=2, test=clients[0])
>>> len(run.history), run.bytes_total == sum(r.bytes_up + r.bytes_down + r.bytes_catchup for r in run.history)
(2, True)
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.core.tree import Tree
from thinwire.data.losses import Loss, cross_entropy
from thinwire.data.task import Task, as_examples, pool_clients
from thinwire.errors import ConfigError
from thinwire.experiments.chance import chance_of
from thinwire.experiments.collapse import Course, news
from thinwire.experiments.combine import join, named
from thinwire.experiments.config import method_from, method_table
from thinwire.experiments.execute import summarise
from thinwire.experiments.parts import arguments, plain
from thinwire.experiments.peft_export import save_adapter
from thinwire.experiments.run_directory import RunFolder
from thinwire.experiments.toml import Table
from thinwire.protocol.method import Method
from thinwire.runtime.job import Job, RoundRecord
from thinwire.simulation.engine import LocalEngine, Mode
from thinwire.simulation.simulation import OnMessage, Simulation
from thinwire.spaces.base import Space
from thinwire.spaces.full import Full
from thinwire.spaces.lora import LoRA
from thinwire.training.batches import Local
from thinwire.training.precision import Precision

OWN_TASK = "own data"  # what reports call the task of a script


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Args:
        history: one record a round.
        weights: the final trainable weights by name.
        buffers: the final floating-point buffers by name.
        trained_by: `graph`, `vmap` or `loop`.
        because: why so, if not by the fastest.
        path: the run directory, if one was written.
        coords: the final numbers that were trained, by name: of LoRA the factors of each correction.
        status: `finished`, `collapsed` (it had learned and ended at chance) or `at chance` (it never learned).
        why: a sentence that says so, where something is wrong.
    """

    history: list[RoundRecord]
    weights: Tree
    buffers: Tree
    trained_by: str
    because: str
    _start: nn.Module
    path: Path | None = None
    coords: Tree = field(default_factory=dict)
    status: str = "finished"
    why: str = ""
    _space: Space | None = None
    _basis: Tree = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        """Bytes that clients sent."""
        return sum(record.bytes_up for record in self.history)

    @property
    def bytes_down(self) -> int:
        """Bytes that the server sent, but for those below."""
        return sum(record.bytes_down for record in self.history)

    @property
    def bytes_catchup(self) -> int:
        """Bytes that the server sent on top because clients had missed rounds."""
        return sum(record.bytes_catchup for record in self.history)

    @property
    def bytes_total(self) -> int:
        """All bytes that were sent."""
        return self.bytes_up + self.bytes_down + self.bytes_catchup

    @property
    def bytes_ideal(self) -> int:
        """The same as many papers count it: as if returning clients caught up for free."""
        return self.bytes_up + self.bytes_down

    @property
    def accuracy(self) -> float | None:
        """The accuracy at the end; None without test examples."""
        return self.history[-1].accuracy

    def model(self) -> nn.Module:
        """A plain module with the final weights: a new copy each time, on the CPU."""
        model = copy.deepcopy(self._start)
        final = {**self.weights, **self.buffers}
        with torch.no_grad():
            for name, block in (*model.named_parameters(), *model.named_buffers()):
                if name in final:
                    block.copy_(final[name])
        return model

    def save_adapter(self, folder: Path | str) -> None:
        """Write what was trained with LoRA as a folder that `peft.PeftModel.from_pretrained` loads."""
        save_adapter(folder, self._start, self._space or Full(), self._basis, self.coords, self.weights)


def simulate(
    model: nn.Module,
    clients: Sequence[Any],
    method: Method | str | None = None,
    *,
    rounds: int = 10,
    cohort: int | None = None,
    test: Any = None,
    seed: int = 0,
    loss: Loss | None = None,
    local: Local | None = None,
    device: str = "cpu",
    backend: Mode = "auto",
    chunk: int = 0,
    precision: Precision = "float32",
    eval_every: int = 1,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_message: OnMessage | None = None,
    out: Path | str | None = None,
    name: str | None = None,
) -> Run:
    """Train a model over a federation of clients on this machine, over real messages.

    Args:
        model: any nn.Module; it is copied, never changed.
        clients: one entry a client: a pair `(inputs, targets)` of tensors, or a torch Dataset of such pairs.
        method: a Method, the name of one (`thinwire list methods`) or of several (`mapo+int8`), or None for FedAvg.
        rounds: how many rounds.
        cohort: clients in a round; all of them by default.
        test: a pair or a Dataset to evaluate on.
        seed: the root of all randomness.
        loss: `loss(outputs, targets)`, one number an example or their mean; cross entropy by default.
        local: how much a client trains in a round; one epoch of batches of 32 by default.
        device: `cpu` or `cuda`.
        backend: `auto`, `graph`, `threads`, `vmap` or `loop`.
        chunk: clients trained together; 0 means the whole cohort.
        precision: `float32`, or on a GPU `tf32` or `bf16`, which are faster and less exact.
        eval_every: rounds between two evaluations.
        on_round: is called with every record: the place for a progress bar, or for a tracker (docs/reports.md).
        on_message: is shown every message: `on_message(round, "up" or "down", client, message)`.
        out: write a run directory there, for `tw.report` and `thinwire watch`; what a script wrote there is replaced.
        name: what reports call this run; by default the method's name, or else that of the directory.
    """
    label = name or (method if isinstance(method, str) else Path(out).name if out else "fedavg")
    if isinstance(method, str):
        table = join(named(method))
        method = method_from(table.get("method", {}))
        local = local or Local(**arguments(Local, table.get("local", {}), "local"))
    elif method is not None and not isinstance(method, Method):
        raise ConfigError(f"method must be a Method or the name of one, not {type(method).__name__}")
    pool, assignment = pool_clients(clients)
    task = Task(model, pool, assignment, None if test is None else as_examples(test), loss=loss or cross_entropy)
    job = Job(
        task,
        method or Method(),
        rounds,
        len(assignment) if cohort is None else cohort,
        local or Local(),
        seed,
        eval_every,
    )
    simulation = LocalEngine(device, backend, chunk, precision).prepare(job)
    folder = None if out is None else RunFolder(Path(out), _described(label, simulation))
    state, chance = simulation.start(), chance_of(simulation)
    history, course = [], Course(chance)
    with folder.anew() if folder else nullcontext():
        for _ in range(rounds):
            state, record = simulation.round(state, on_message)
            before, course = course, course.after(record._asdict())
            if alarm := news(before, course):
                record = record._replace(alarm=alarm)
                warnings.warn(f"round {record.round}: {alarm}", RuntimeWarning, stacklevel=2)
            history.append(record)
            if folder:
                folder.record(record)
            if on_round:
                on_round(record)
        public = state.server.public
        final = {name: block.detach().cpu() for name, block in simulation.weights(public).items()}
        buffers = {name: block.detach().cpu() for name, block in public.buffers.items()}
        if folder:
            facts = {"device": device, "clients_trained_by": state.backend, "because": state.backend_reason}
            folder.write_environment({**facts, "chance": chance._asdict() if chance else None})
            folder.finish(summarise(label, OWN_TASK, simulation, history, state.sync_counts), {**final, **buffers})
        basis, coords = simulation.contract.basis(public.version, device), public.coords
        space = simulation.contract.at(public.version).method.space
    return Run(
        history,
        final,
        buffers,
        state.backend,
        state.backend_reason,
        copy.deepcopy(model).cpu(),
        folder.path if folder else None,
        {name: block.detach().cpu() for name, block in coords.items()},
        course.verdict.status,
        course.verdict.why,
        space,
        {name: block.detach().cpu() for name, block in basis.items()} if isinstance(space, LoRA) else {},
    )


def _described(name: str, simulation: Simulation) -> Table:
    """What is asked of a simulation, for the configuration file of its run directory."""
    job, engine = simulation.job, simulation.engine
    return {
        "name": name,
        "script": sys.argv[0] or "your script",
        "seed": job.seed,
        "rounds": job.rounds,
        "task": {
            "kind": OWN_TASK,
            "clients": len(job.task.clients),
            "examples": len(job.task.train),
            "model": {"kind": type(job.task.model).__name__, "parameters": simulation.model.parameters()},
        },
        "cohort": {"size": job.cohort},
        "local": plain(job.local),
        "engine": plain(engine),
        "eval": {"every": job.eval_every},
        "method": method_table(job.method, strict=False),
    }
