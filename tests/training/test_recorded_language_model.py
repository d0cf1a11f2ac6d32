"""A step of a language model can be recorded as a CUDA graph: nothing is copied from the host, nothing read back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from tests.federation import records_of
from tests.training.test_transformers_trainer import CLIENTS, task
from thinwire.data.token_rows import TokenRows
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.models import causal_lm

LORA = tw.spaces.LoRA(2, 4.0, ("query-value",))
# what a list, bool(tensor) and tensor[mask] call; and others whose shape or result the host needs
NOT_RECORDED = ("lift_fresh", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")


class Seen(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    "space",
    [LORA, dataclasses.replace(LORA, modules_to_save=("*norm.weight",))],
    ids=["folded", "vmap"],
)
def test_a_step_copies_nothing_from_the_host(space, precision, monkeypatch):
    from thinwire.training import cuda_graph

    own, seen = cuda_graph._Recording._step, Seen()
    shapes = []

    def refused(*args, **kwargs):
        raise AssertionError("torch.tensor in a step")

    def recorded(self, masked):
        rows = self.gather.__self__
        assert isinstance(rows, TokenRows)
        rows._largest  # noqa: B018 - as the steps before a recording do on a GPU
        with monkeypatch.context() as patch, seen:
            patch.setattr(TokenRows, "_most", lambda s, counts, flat: s._largest[0 if counts is s.sizes else 1])
            patch.setattr(causal_lm, "is_recorded", lambda tensor: True)
            patch.setattr(torch, "tensor", refused)  # it would be copied from the host
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            own(self, masked)
        shapes.append(masked)

    monkeypatch.setattr(cuda_graph._Recording, "_step", recorded)
    method = tw.Method(space, client_opt=tw.optimizers.AdamW(0.01))
    questions = task()
    questions.model.model.config._attn_implementation = "eager"  # as the task causal-lm has it
    job = Job(questions, method, rounds=2, cohort=CLIENTS, local=tw.Local(batch=3))
    records = records_of(Engine("cpu", "graph", precision=precision), job)
    assert shapes
    assert not seen.names & set(NOT_RECORDED)
    plain = records_of(Engine("cpu", "vmap"), job)
    near = 1e-5 if precision == "float32" else 0.05
    assert [one.loss for one in records] == pytest.approx([one.loss for one in plain], abs=near)
