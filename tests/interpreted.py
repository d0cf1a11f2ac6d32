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
    _convert_scalars()
    return importlib.import_module(name)


def _convert_scalars():
    """numpy 2.4 has no `int` of an array with one value, which the interpreter of triton 3.5 uses for a scalar."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    before = interpreter._patch_lang_tensor
    if getattr(before, "converts", False):
        return

    def patch(tensor):
        before(tensor)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch.converts = True
    interpreter._patch_lang_tensor = patch
