"""The training backends of a simulation: which one is used, how it is chosen, and what follows if it fails."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace

import torch

from thinwire.errors import ConfigError, ThinwireError
from thinwire.federation.federation import Federation
from thinwire.federation.job import RunState
from thinwire.kernels.conv_cpu import by_columns
from thinwire.protocol.client import Group
from thinwire.training import autotune
from thinwire.training.autotune import Configuration, first_line
from thinwire.training.backends import LoopTrainer, ThreadPoolTrainer, VmapTrainer
from thinwire.training.chain import Chain, may_be_chain
from thinwire.training.cuda_graph import CudaGraphCache
from thinwire.training.inputs import Backend, TrainableModel, Trainer, UnsupportedModel, Workload
from thinwire.training.precision import onednn_choices, prefers_onednn

_NEXT: dict[Backend, Backend] = {"graph": "vmap", "chain": "threads", "threads": "vmap", "vmap": "loop"}  # if one fails
Run = Callable[[Backend, bool, Workload, int], None]  # backend, oneDNN, batches, number of clients


class Backends:
    """The backends and the models that they train.

    Args:
        federation: model and data on the device.
    """

    def __init__(self, federation: Federation) -> None:
        engine, job = federation.engine, federation.job
        self.engine, self.job, self.federation = engine, job, federation
        if job.local.trainer and engine.backend not in ("auto", "loop"):
            raise ConfigError(
                f"backend = {engine.backend!r} runs our own steps, and local.trainer is set; write backend = 'auto'"
            )
        self.threads = ThreadPoolTrainer()
        self.trainers: dict[Backend, Trainer] = {
            "graph": CudaGraphCache(),
            "chain": ThreadPoolTrainer(),
            "threads": self.threads,
            "vmap": VmapTrainer(),
            "loop": federation.own_trainer or LoopTrainer(),
        }
        model, device = federation.model, federation.device
        alone = replace(model, products=None)  # torch's own convolutions are fastest for one client
        self.models: dict[Backend, TrainableModel] = {"graph": model, "vmap": model, "loop": alone, "threads": alone}
        self.models["chain"] = Chain(alone)
        # except for their gradients on a CPU without oneDNN
        self.columns = device.type == "cpu" and engine.conv != "grouped" and by_columns(model.module)

    def initial(self) -> tuple[Backend, str]:
        """The backend before the first round, and the reason if it is not the default."""
        if self.job.local.trainer:
            return "loop", "a trainer of one's own trains one client after another"
        if self.engine.backend != "auto":
            return self.engine.backend, "given"
        return "graph" if self.federation.device.type == "cuda" else "vmap", ""

    def undecided(self, state: RunState) -> bool:
        """Whether the backend is still to be chosen."""
        auto = self.engine.backend == "auto" and self.federation.device.type == "cpu"
        return auto and not (state.round or state.backend_reason)

    def choose(self, state: RunState, group: Group, run: Run) -> RunState:
        """The state with the fastest backend for this group, by measurement or as recorded before."""
        if not autotune.is_enabled():
            return state._replace(backend_reason="THINWIRE_PROBE is off")
        work = self.federation.sampler.workload(state.round, group.clients)

        def measure(one: Configuration, clients: int) -> None:
            run(one.backend, one.onednn, work.first(clients, autotune.STEPS), clients)

        backends: list[Backend] = ["threads", "vmap"]
        if may_be_chain(self.federation.model) and self.engine.conv != "grouped":
            backends.insert(0, "chain")  # first: as fast as threads in the measurement, and faster in long rounds
        if self.threads.workers > 1:  # on one core, threads are a loop
            backends.append("loop")
        key = (*self._key(group, work), *backends)
        choices = onednn_choices(self.engine.precision)
        (backend, onednn), reason = autotune.choose(key, backends, choices, len(group.clients), measure)
        return state._replace(backend=backend, backend_reason=reason, onednn=onednn)

    def _key(self, group: Group, work: Workload) -> tuple:
        """Everything that the speed depends on, as values that print alike in every process."""
        method, contract = self.job.method, self.federation.contract
        parts = (method.space, method.client_opt, method.correction, method.penalty, method.sketch)
        inputs, _ = work.gather(work.index[:1, 0, :1])
        shapes = {k: v.shape for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.shape
        specs = (contract.weights.digest().hex(), contract.coords.digest().hex())
        return (
            *(self.federation.model.module, shapes, *specs, *(type(part).__name__ for part in parts)),
            *(min(len(group.clients), max(autotune.CLIENTS)), work.index.shape[-1]),
            *(self.engine.conv, self.engine.precision, platform.machine(), os.cpu_count()),
            *(self.threads.workers, torch.__version__),
        )

    def convolutions(self, state: RunState) -> str:
        """How convolutions are computed in training, for the record of the environment."""
        if state.backend == "chain":
            return "chain"
        if state.backend not in ("loop", "threads"):
            return self.federation.model.products or "torch"
        onednn = prefers_onednn() if state.onednn is None else state.onednn
        return "columns" if self.columns and not onednn and not self.federation.model.half else "torch"

    def fall_back(self, state: RunState, error: Exception, size: int, begun: bool) -> RunState:
        """What to try after a failure with groups of this size: smaller groups, or the next backend."""
        if _out_of_memory(error):
            return self._smaller_groups(state, error, size)
        # what a model does not support is found with the first group
        auto = self.engine.backend == "auto"
        if isinstance(error, UnsupportedModel) and not auto:
            raise ConfigError(f"backend = {state.backend!r}: {error}; write backend = 'auto'") from error
        ours = isinstance(error, ThinwireError) and not isinstance(error, UnsupportedModel)
        if ours or state.backend == "loop" or not auto or state.round or begun:
            raise error
        reason = "; ".join(filter(None, (state.backend_reason, f"{state.backend} failed: {first_line(error)}")))
        return state._replace(backend=_NEXT[state.backend], backend_reason=reason)

    def _smaller_groups(self, state: RunState, error: Exception, size: int) -> RunState:
        """Groups of half the size, where the memory of a GPU is not enough."""
        device = self.federation.device
        if size == 1 or self.engine.chunk:
            smaller = f"local.batch = {max(1, self.job.local.batch // 2)}"
            clients, instead = (
                ("one client", smaller) if size == 1 else (f"{size} clients", f"engine.chunk = {size // 2}")
            )
            raise ConfigError(
                f"{device} has too little memory to train {clients} at a time; write for example {instead}"
            ) from error
        self.trainers["graph"] = CudaGraphCache()  # recordings hold the memory of a group
        torch.cuda.empty_cache()
        reason = f"{size} clients at a time do not fit into the memory of {device}"
        reason = "; ".join(filter(None, (state.backend_reason, reason)))
        return state._replace(chunk=-(-size // 2), backend_reason=reason)


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether the memory of a GPU was not enough; a recording that failed may raise another error first."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
