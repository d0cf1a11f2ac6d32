"""The training backends of a simulation: which one is used, and what follows if it fails."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from thinwire.errors import ConfigError, ThinwireError
from thinwire.federation.federation import Federation
from thinwire.federation.job import RunState
from thinwire.kernels.conv_cpu import by_columns
from thinwire.training.backends import LoopTrainer, ThreadPoolTrainer, VmapTrainer
from thinwire.training.chain import Chain, may_be_chain
from thinwire.training.cuda_graph import CudaGraphCache
from thinwire.training.inputs import Backend, TrainableModel, Trainer, UnsupportedModel

SMALL = 300_000  # weights of a model without convolutions that is trained by vmap
FEW_CORES = 4
_NEXT: dict[Backend, Backend] = {"graph": "vmap", "chain": "threads", "threads": "vmap", "vmap": "loop"}  # if one fails


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
        self.trainers: dict[Backend, Trainer] = {
            "graph": CudaGraphCache(),
            "chain": ThreadPoolTrainer(),
            "threads": ThreadPoolTrainer(),
            "vmap": VmapTrainer(),
            "loop": federation.own_trainer or LoopTrainer(),
        }
        model, device = federation.model, federation.device
        alone = replace(model, products=None)  # torch's own convolutions are fastest for one client
        self.models: dict[Backend, TrainableModel] = {"graph": model, "vmap": model, "loop": alone, "threads": alone}
        self.models["chain"] = Chain(alone)
        # except for their gradients on a CPU without oneDNN
        if device.type == "cpu" and engine.conv != "grouped":
            by_columns(model.module)

    def initial(self) -> tuple[Backend, str]:
        """The backend before the first round, and the reason if it is not the default."""
        if self.job.local.trainer:
            return "loop", "a trainer of one's own trains one client after another"
        if self.engine.backend != "auto":
            return self.engine.backend, "given"
        return ("graph" if self.federation.device.type == "cuda" else self._on_cpu()), ""

    def _on_cpu(self) -> Backend:
        """What was fastest for such models, with FedAvg and MAPO, on Neoverse-N1 (2 cores) and x86 (1, 2 and 8 cores).

        A step of a small model without convolutions is overhead: one program for all clients takes 0.2 to 0.6 of the
        time of one client on each core. With convolutions it takes twice the time; layer by layer takes 0.6 to 0.9 on
        few cores, but 1.5 on eight, where Python limits it.
        """
        model = self.federation.model
        own = any(isinstance(layer, (_ConvNd, nn.LSTM)) for layer in model.module.modules())  # kernels for one client
        if not own and model.parameters() <= SMALL:
            return "vmap"
        layered = may_be_chain(model) and self.engine.conv != "grouped" and torch.get_num_threads() <= FEW_CORES
        return "chain" if layered else "threads"

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


def first_line(error: BaseException) -> str:
    """The first line of an error message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether the memory of a GPU was not enough; a recording that failed may raise another error first."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
