"""Kernels written in Triton, run by its interpreter on a CPU."""

import importlib
import os

import pytest
import torch


def interpreted(name):
    """The module of that name with its kernels interpreted; skips the test where that cannot be."""
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves are tested on the GPU")
    os.environ["TRITON_INTERPRET"] = "1"  # stays: triton looks at it once, when it is imported
    language = pytest.importorskip("triton.language")
    if type(language.zeros).__name__ != "InterpretedFunction":
        pytest.skip("triton was imported before, without its interpreter")
    return importlib.import_module(name)
