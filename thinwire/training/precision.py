"""Which kernels torch computes with while a simulation trains or tests: oneDNN's or not, how many bits on a GPU."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def kernels(device: torch.device, precision: Precision, onednn: bool | None = None) -> Iterator[None]:
    """Compute with these kernels; what was set before is set again afterwards.

    Args:
        device: where.
        precision: of products on a GPU.
        onednn: whether kernels on the CPU come from oneDNN; None: as a rule (see `onednn_as_a_rule`).

    >>> with kernels(torch.device("cpu"), "float32", onednn=False):
    ...     torch.backends.mkldnn.enabled
    False
    """
    settings: list[tuple[Any, str, Any]] = [
        (torch.backends.mkldnn, "enabled", onednn_as_a_rule() if onednn is None else onednn)
    ]
    if device.type == "cuda":
        kind, cudnn = "ieee" if precision == "float32" else "tf32", torch.backends.cudnn
        products: Any = (torch.backends.cuda.matmul, cudnn.conv)  # type: ignore[attr-defined]
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


def onednn_as_a_rule() -> bool:
    """Whether oneDNN is the better choice as a rule.

    It is left out on 64-bit ARM, where its backward convolution falls to a reference kernel. Measured on two
    Neoverse-N1 cores with CNN-2: a loop over clients 1.3x faster without it, vmap 5x.
    """
    return bool(torch.backends.mkldnn.enabled) and platform.machine() not in ("aarch64", "arm64")
