"""Arithmetic of torch while it trains or evaluates: precision on a GPU, oneDNN on a CPU."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


# oneDNN is usually the better choice, but not on 64-bit ARM, where its backward convolution uses a reference kernel.
# Measured on two Neoverse-N1 cores with CNN-2: without it a loop over clients is 1.3x faster, vmap 5x.
ONEDNN_PAYS = platform.machine() not in ("aarch64", "arm64")


@contextmanager
def compute_with(device: torch.device, precision: Precision, onednn: bool = ONEDNN_PAYS) -> Iterator[None]:
    """Compute with these settings; the former ones are restored afterwards.

    Args:
        device: the device.
        precision: of matrix products on a GPU.
        onednn: whether CPU kernels may be oneDNN's, where that is enabled.

    >>> with compute_with(torch.device("cpu"), "float32", onednn=False):
    ...     torch.backends.mkldnn.enabled
    False
    """
    settings: list[tuple[Any, str, Any]] = [
        (torch.backends.mkldnn, "enabled", bool(torch.backends.mkldnn.enabled) and onednn)
    ]
    if device.type == "cuda":
        kind, cudnn = "ieee" if precision == "float32" else "tf32", torch.backends.cudnn
        products: Any = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
        settings += [(part, "fp32_precision", kind) for part in products]
        settings += [(cudnn, "deterministic", True), (cudnn, "benchmark", False)]
    before = [getattr(part, name) for part, name, _ in settings]
    try:
        for part, name, value in settings:
            setattr(part, name, value)
        yield
    finally:
        for (part, name, _), value in zip(settings, before, strict=True):
            setattr(part, name, value)
