"""Clients whose examples are one batch of the frozen model train as under vmap."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.federation import records_of
from tests.training.test_transformers_trainer import CLIENTS, model, rows, task
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.spaces import LoRASB
from thinwire.training import backends

FOLDED = {
    "lora": tw.spaces.LoRA(2, 4.0, ("query-value",)),
    "ffa-lora": tw.spaces.LoRA(2, 4.0, ("query-value",), freeze_a=True),
    "from the start": tw.spaces.LoRA(2, 4.0, ("query-value",), from_start=True),
    "lora-sb": LoRASB(2, ("query-value",)),
}
NOT_FOLDED = {
    "a trained head": tw.spaces.LoRA(2, 4.0, ("query-value",), modules_to_save=("*norm.weight",)),
    "all weights": tw.spaces.Full(),
}


def trained(space, backend, local):
    """The losses of two rounds."""
    method = tw.Method(space, client_opt=tw.optimizers.AdamW(0.01))
    questions = task()
    questions.model.model.config._attn_implementation = "eager"  # as the task causal-lm has it
    job = Job(questions, method, rounds=2, cohort=CLIENTS, local=local)
    return [one.loss for one in records_of(Engine("cpu", backend), job)]


@pytest.mark.parametrize(("name", "batch"), [("lora", 3), *((name, 4) for name in FOLDED)])  # 4: the last is short
def test_folded_clients_train_as_under_vmap(name, batch, monkeypatch):
    space, local = FOLDED[name], tw.Local(batch=batch)
    answers = []
    own = backends.can_fold
    monkeypatch.setattr(backends, "can_fold", lambda inputs: answers.append(own(inputs)) or answers[-1])
    found = trained(space, "vmap", local)
    recorded = trained(space, "graph", local)
    assert all(answers)
    monkeypatch.setattr(backends, "can_fold", lambda inputs: False)
    expected = trained(space, "vmap", local)
    assert found == pytest.approx(expected, abs=1e-6)
    assert recorded == pytest.approx(expected, abs=1e-6)
    assert found == pytest.approx(trained(space, "loop", local), abs=1e-6)


@pytest.mark.parametrize("space", NOT_FOLDED.values(), ids=NOT_FOLDED)
def test_other_clients_are_not_folded(space, monkeypatch):
    answers = []
    own = backends.can_fold
    monkeypatch.setattr(backends, "can_fold", lambda inputs: answers.append(own(inputs)) or answers[-1])
    trained(space, "vmap", tw.Local(batch=3))
    assert answers
    assert not any(answers)


def test_rows_of_a_language_model_do_not_influence_each_other():
    language, examples = model().eval(), rows()
    inputs, _ = examples.gather(torch.arange(4))
    alone = [language(**{name: block[i : i + 1] for name, block in inputs.items()}) for i in range(4)]
    torch.testing.assert_close(language(**inputs), torch.cat(alone), rtol=1e-5, atol=1e-5)
