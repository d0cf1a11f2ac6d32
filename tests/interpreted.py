"""Triton kernels in the interpreter of triton, on a CPU."""

import importlib
import os

import pytest
import torch


def interpreted(name):
    """Import a module with its kernels interpreted; skips the test if that is not possible."""
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves are tested on the GPU")
    os.environ["TRITON_INTERPRET"] = "1"  # not reset: triton reads it once, on import
    language = pytest.importorskip("triton.language")
    if type(language.zeros).__name__ != "InterpretedFunction":
        pytest.skip("triton was imported before, without its interpreter")
    return importlib.import_module(name)
