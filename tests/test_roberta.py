"""Tests of the RoBERTa model; skipped without transformers."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from thinwire.core.tree import Tree, flatten, stack, unstack
from thinwire.errors import ConfigError
from thinwire.models import build, count


def weights(model: nn.Module) -> Tree:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[hf\]'"):
        build("roberta-large")


@pytest.mark.parametrize(("classes", "expected"), [(2, 355_361_794), (3, 355_362_819)])
def test_roberta_parameter_count(classes: int, expected: int) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        assert count(build("roberta-large", classes=classes)) == expected


def test_roberta_gradients_under_vmap_equal_those_of_single_clients() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build("roberta-large", layers=1, width=64, dropout=0)
    clients = [weights(model), {key: block + 0.01 for key, block in weights(model).items()}]
    ids = torch.tensor([[[0, 9, 8, 2], [0, 7, 2, 1]], [[0, 5, 2, 1], [0, 3, 4, 2]]])
    y = torch.tensor([[0, 1], [1, 1]])

    def loss(params: Tree, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (ids,)), y)

    together = vmap(grad(loss))(stack(clients), ids, y)
    for i, client in enumerate(clients):
        alone = grad(loss)(client, ids[i], y[i])
        torch.testing.assert_close(flatten(unstack(together, i)), flatten(alone), rtol=1e-3, atol=1e-5)


def test_roberta_logits_equal_those_of_the_wrapped_model() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build("roberta-large", layers=2, width=64).eval()
    ids = torch.tensor([[0, 9, 8, 2], [0, 7, 2, 1]])
    expected = model.model(input_ids=ids, attention_mask=(ids != 1).long()).logits
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=(ids != 1).long()), expected, rtol=0, atol=1e-5)
