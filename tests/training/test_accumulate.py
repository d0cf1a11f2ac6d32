"""Gradient accumulation: the step of the whole batch, and one line where it cannot be that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.runs.config import digest

LENGTH, WORDS = 6, 11


class Tokens(nn.Module):
    """Logits of the next token for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


def _tokens(clients: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of which very different numbers of labels count, some rows none."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for rows in (13, 8, 10)[:clients]:
        x = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
        y = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
        ignored = torch.arange(LENGTH) >= torch.randint(0, LENGTH + 1, (rows, 1), generator=generator)
        y[ignored] = -100
        y[0] = -100
        out.append((x, y))
    return out


def _weights(model, clients, backend: str = "loop", parts: int = 1, batch: int = 8, **options):
    torch.manual_seed(0)
    method = options.pop("method", tw.Method(client_opt=tw.optimizers.SGD(0.5, momentum=0.9)))
    local = tw.Local(epochs=2, batch=batch, accumulate=parts)
    made = model() if isinstance(model, type) else model
    run = tw.simulate(made, clients, method, rounds=2, local=local, backend=backend, **options)
    return run.weights, [record.loss for record in run.history]


@pytest.mark.parametrize(("backend", "parts"), [("loop", 3), ("vmap", 3), ("graph", 3), ("threads", 50)])
def test_parts_of_a_batch_give_the_step_of_the_whole_batch_over_all_labels(backend, parts):
    whole, loss = _weights(Tokens, _tokens(), backend)
    divided, again = _weights(Tokens, _tokens(), backend, parts)
    for name, weight in whole.items():
        torch.testing.assert_close(divided[name], weight, rtol=0, atol=1e-6)
    assert again == pytest.approx(loss, abs=1e-6)


def test_the_mean_of_the_means_of_parts_would_be_another_step():
    clients = _tokens()
    one, _ = _weights(Tokens, clients)
    few = [(x, torch.where(torch.arange(len(y))[:, None] % 8 < 4, y, -100)) for x, y in clients]
    other, _ = _weights(Tokens, few)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-3


def test_a_criterion_that_averages_itself_and_a_penalty_give_the_same_step():
    torch.manual_seed(2)
    clients = [(torch.randn(9, 4), torch.randn(9, 1)) for _ in range(2)]
    method = tw.Method(client_opt=tw.optimizers.SGD(0.05), penalty=tw.optimizers.L1L2(l1=0.01))
    options = {"loss": nn.functional.mse_loss, "method": method, "batch": 4}
    model = nn.Linear(4, 1)
    whole, _ = _weights(model, clients, **options)
    divided, _ = _weights(model, clients, parts=2, **options)
    for name, weight in whole.items():
        torch.testing.assert_close(divided[name], weight, rtol=0, atol=1e-6)


def test_a_model_with_batch_statistics_is_refused_in_one_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(1)
    clients = [(torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator))]
    with pytest.raises(
        tw.ConfigError, match=r"layer '1' \(BatchNorm1d\) computes statistics of the whole batch; write"
    ):
        _weights(model, clients, parts=2)
    torch.manual_seed(0)
    # one group: the norm of two values that are nearly equal would enlarge rounding a thousandfold
    normed = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(1, 4), nn.Linear(4, 2))
    whole, _ = _weights(normed, clients)
    divided, _ = _weights(normed, clients, parts=4)
    assert all(torch.allclose(divided[name], whole[name], rtol=0, atol=1e-6) for name in whole)


def test_wrong_numbers_of_parts_and_counted_classes_are_refused():
    with pytest.raises(tw.ConfigError, match="accumulate must be 1"):
        tw.Local(accumulate=0)
    clients = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))]
    with pytest.raises(tw.ConfigError, match="logit_adjustment counts the classes of the whole batch"):
        tw.simulate(nn.Linear(4, 2), clients, local=tw.Local(accumulate=2, logit_adjustment=1.0))


def test_accumulation_is_a_setting_of_files_that_leaves_other_digests_as_they_are():
    plain, divided = (tw.resolve("fedavg", on="digits", overrides=o) for o in ({}, {"local.accumulate": 4}))
    assert divided.local.accumulate == 4
    assert digest(plain) != digest(divided)
    assert "accumulate" not in repr(plain.local)
