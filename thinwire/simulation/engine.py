"""One machine plays the server and all clients: how it does that, and on what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from thinwire.errors import ConfigError
from thinwire.runtime.job import Job, RoundRecord
from thinwire.simulation.simulation import OnMessage, Simulation
from thinwire.training.precision import Precision

Mode = Literal["auto", "graph", "threads", "vmap", "loop"]
Conv = Literal["auto", "grouped", "im2col", "fused"]


@dataclass(frozen=True)
class LocalEngine:
    """Simulate a federation on one CPU or GPU.

    Args:
        device: `cpu` or `cuda` (also `cuda:1`).
        backend: train the clients of a chunk in one program (`vmap`), in one program that is recorded once and then
            replayed (`graph`: many times faster for small models on a GPU), one after another (`loop`), or one on each
            core of a CPU (`threads`); `auto` takes on a GPU the first of graph, vmap, loop that the model can, on a CPU
            the fastest of threads, vmap, loop in a short race before the first round.
        chunk: clients trained together; 0 means the whole cohort, or as many as the memory of a GPU holds: a half, a
            quarter and so on, found by trying. Less needs less memory.
        precision: how products are computed in training on a GPU: `float32`; `tf32` reads its factors with 10 bits
            behind the point instead of 23; `bf16` computes layers in 16 bits (weights stay float32; also on a CPU), and
            what stays in float32, tests too, as `tf32` does.
        conv: convolutions of many clients as one `grouped` convolution, as products of matrices (`im2col`), which takes
            more memory and, on a GPU, less time, or as products that fetch their factors themselves (`fused`, with the
            package triton), which takes least memory; `auto` takes on a GPU `fused` in bf16, else `im2col`. Where
            clients train alone on a CPU without oneDNN, gradients are our own (see `columns`), with `grouped` torch's.
        workers: processes that train chunks of the cohort side by side, through Ray, on all GPUs or machines that it
            knows; 0 for none. The cohort is cut into as many chunks unless `chunk` says otherwise.
    """

    device: str = "cpu"
    backend: Mode = "auto"
    chunk: int = 0
    precision: Precision = "float32"
    conv: Conv = "auto"
    workers: int = 0

    def __post_init__(self) -> None:
        for name, known in (("backend", Mode), ("precision", Precision), ("conv", Conv)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(known))}, not {getattr(self, name)!r}")
        if self.chunk < 0:
            raise ConfigError(f"chunk must be 0 (whole cohort) or more, not {self.chunk}")
        if self.workers < 0:
            raise ConfigError(f"workers must be 0 (none but this process) or more, not {self.workers}")
        try:
            kind = torch.device(self.device).type
        except RuntimeError as error:
            raise ConfigError(f"device must be cpu or cuda, not {self.device!r}") from error
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda, not {self.device!r}")

    def prepare(self, job: Job) -> Simulation:
        """Bring model and data to the device and settle the contract."""
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device 'cuda' was asked for, but torch sees no GPU here; write device = 'cpu'")
        if (torch.device(self.device).index or 0) >= max(1, torch.cuda.device_count()):
            raise ConfigError(
                f"device {self.device!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs here"
            )
        if self.workers:
            from thinwire.simulation.ray_workers import RaySimulation

            simulation: Simulation = RaySimulation(self, job)
        else:
            simulation = Simulation(self, job)
        simulation.try_on()
        return simulation

    def run(self, job: Job, on_message: OnMessage | None = None) -> Iterator[RoundRecord]:
        """Run all rounds, one record each.

        Args:
            job: what to run.
            on_message: is shown every message, as it would travel.
        """
        simulation = self.prepare(job)
        state = simulation.start()
        for _ in range(job.rounds):
            state, record = simulation.round(state, on_message)
            yield record
