"""The simulation engine: one machine is the server and all clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from thinwire.core.parallel import Precision
from thinwire.core.text import NonNegativeInt, check_settings
from thinwire.errors import ConfigError

Mode = Literal["auto", "graph", "chain", "threads", "vmap", "loop"]
Conv = Literal["auto", "grouped", "fused"]


@dataclass(frozen=True)
class Engine:
    """Simulates a federation on one CPU or GPU, or through Ray on several: device, training backend, precision.

    Args:
        device: `cpu` or `cuda` (also `cuda:1`).
        backend: train the clients of a group in one vectorized program (`vmap`), in one program that is recorded once
            as a CUDA graph and then replayed (`graph`: many times faster for small models), one after another (`loop`),
            or one on each core of a CPU, with autograd (`threads`) or, if the model is a chain of layers, without
            (`chain`: `training/chain.py`); `auto` uses on a GPU the first of graph, vmap, loop that supports the model,
            on a CPU what was fastest for such models (`federation/backends.py`).
        chunk: number of clients trained together; 0 means the whole cohort, or as many as fit into the memory of a GPU:
            a half, a quarter and so on, found by trying. Fewer need less memory.
        precision: of matrix products in training on a GPU: `float32`; `tf32` rounds factors to 10 bits of mantissa
            instead of 23; `bf16` computes layers in 16 bits (weights stay float32; also on a CPU), and what stays in
            float32, evaluation too, as `tf32` does.
        conv: convolutions of many clients as one `grouped` convolution, or as Triton kernels (`fused`), which take less
            memory and time; `auto` uses `fused` on a GPU where triton is installed. Clients that train alone on a CPU
            without oneDNN use our own gradients (`kernels/conv_cpu.py`), with `grouped` torch's.
        workers: number of processes that train groups of the cohort in parallel, through Ray, on all GPUs or machines
            that it manages; 0 for none. The cohort is divided into as many groups unless `chunk` is given.
    """

    device: str = "cpu"
    backend: Mode = "auto"
    chunk: NonNegativeInt = 0
    precision: Precision = "float32"
    conv: Conv = "auto"
    workers: NonNegativeInt = field(default=0, metadata={"rare": True})

    def __post_init__(self) -> None:
        check_settings(self)
        try:
            known = torch.device(self.device).type in ("cpu", "cuda")
        except RuntimeError:
            known = False
        if not known:
            raise ConfigError(f"device must be cpu or cuda, not {self.device!r}")

    def check_device(self) -> None:
        """Raise ConfigError if this machine does not have the device."""
        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device 'cuda' was given, but torch sees no GPU here; write device = 'cpu'")
        if (device.index or 0) >= max(1, torch.cuda.device_count()):
            raise ConfigError(f"device {self.device!r} was given, but torch sees {torch.cuda.device_count()} GPUs here")
