"""Batches of an evaluation: as large as fits into memory, with the same result."""

import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.core.parallel import compute_with
from thinwire.data.task import as_examples
from thinwire.training import evaluation
from thinwire.training.evaluation import evaluate
from thinwire.training.functional import Functional

LENGTH, WORDS = 16, 500


class Language(nn.Module):
    """A language model of one tied embedding matrix."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 8)

    def forward(self, codes):
        return nn.functional.linear(self.words(codes), self.words.weight)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that an operation returns, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


def evaluated(model, examples, batch=0):
    with LargestTensor() as watch:
        loss, accuracy = evaluate(model, model.weights(), {}, examples, batch=batch)[:2]
    return loss, accuracy, watch.largest


def test_outputs_of_a_language_model_fit_into_the_memory_limit(monkeypatch):
    torch.manual_seed(0)
    codes = torch.randint(0, WORDS, (300, LENGTH))
    examples, model = as_examples((codes, codes.roll(1, 1))), Functional.of(Language())
    one = LENGTH * WORDS * 4  # bytes of the outputs of an example
    loss, accuracy, largest = evaluated(model, examples)
    assert largest == 300 * one  # all fit at once
    monkeypatch.setitem(evaluation.MAX_TENSOR_BYTES, "cpu", 20 * one + 5)
    again, same, small = evaluated(model, examples)
    assert small == 20 * one
    assert (again, same) == (pytest.approx(loss, rel=1e-7), accuracy)
    assert evaluated(model, examples, batch=7)[:2] == (pytest.approx(loss, rel=1e-7), accuracy)


def test_by_default_no_tensor_takes_more_than_256_mebibytes():
    codes = torch.zeros(1000, LENGTH, dtype=torch.int64)
    _, _, largest = evaluated(Functional.of(Language(5000)), as_examples((codes, codes)))
    assert 1 << 27 < largest <= 1 << 28


def test_gpt2_of_length_256_is_evaluated_within_the_memory_limit():
    """Its 50,257 outputs at each of 256 positions are 51 MB for one example."""
    one = 256 * 50_257 * 4
    for device, limit in (("cpu", 1 << 28), ("cuda", 1 << 31)):
        batch = evaluation._at_once(torch.zeros(1, 256, dtype=torch.int64), one, torch.device(device))
        assert batch >= 1
        assert batch * one <= limit
    assert evaluation._at_once(torch.zeros(1, 256), 1 << 40, torch.device("cpu")) == 1


def test_hidden_layers_count_as_outputs_do():
    """Feature maps are many times as large as the images and the outputs."""
    wide = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
    model = Functional.of(wide)
    examples = as_examples((torch.randn(30, 1, 64, 64), torch.zeros(30, dtype=torch.int64)))
    evaluate(model, model.weights(), {}, examples)
    assert list(model.example_bytes.values()) == [64 * 64 * 64 * 4]


def test_large_weights_do_not_make_batches_small():
    """Only tensors that grow with the number of examples count."""
    model = Functional.of(nn.Sequential(nn.Linear(4, 40_000), nn.ReLU(), nn.Linear(40_000, 2)))
    evaluate(model, model.weights(), {}, as_examples((torch.randn(3, 4), torch.tensor([0, 1, 1]))))
    assert list(model.example_bytes.values()) == [40_000 * 4]


class Threads(nn.Module):
    """A convolution that records the threads that call it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = nn.Conv2d(1, 4, 3), set()

    def forward(self, images):
        assert not torch.is_grad_enabled()
        self.seen.add(threading.get_ident())
        return self.conv(images).mean((2, 3))


def test_without_onednn_each_core_evaluates_parts_of_a_batch(monkeypatch):
    torch.manual_seed(0)
    examples, model = as_examples((torch.randn(450, 1, 30, 30), torch.randint(0, 4, (450,)))), Functional.of(Threads())
    copies, real = [], Functional.sharing_weights
    monkeypatch.setattr(Functional, "sharing_weights", lambda self: copies.append(real(self)) or copies[-1])
    monkeypatch.setattr(evaluation, "cores", lambda: 2)
    weights = {name: torch.randn_like(block) for name, block in model.weights().items()}
    with compute_with(torch.device("cpu"), "float32", onednn=False):
        found = evaluate(model, weights, {}, examples)
        again = evaluate(model, weights, {}, examples)
        monkeypatch.setattr(evaluation, "cores", lambda: 1)
        alone = evaluate(model, weights, {}, examples)
        monkeypatch.setattr(evaluation, "PART", 1000)
        whole = evaluate(model, weights, {}, examples)
    assert found == again == alone
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (found.accuracy, found.examples) == (whole.accuracy, 450)
    assert len(copies) == 2  # one for each evaluation with two cores
    assert copies[0].module.conv.weight is model.module.conv.weight
    assert copies[0].module.conv is not model.module.conv
    assert copies[0].module.seen


class Noisy(nn.Module):
    """A model that adds noise, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, images):
        out = self.conv(images)
        return (out + torch.randn_like(out)).mean((2, 3))


def test_a_model_that_draws_random_numbers_is_evaluated_part_after_part(monkeypatch):
    examples = as_examples((torch.randn(450, 1, 30, 30), torch.randint(0, 4, (450,))))
    model = Functional.of(Noisy())
    evaluate(model, model.weights(), {}, examples)  # the size of a batch is found once
    monkeypatch.setattr(Functional, "sharing_weights", None)  # fails if it is called
    with compute_with(torch.device("cpu"), "float32", onednn=False):
        torch.manual_seed(1)
        first = evaluate(model, model.weights(), {}, examples)
        torch.manual_seed(1)
        assert evaluate(model, model.weights(), {}, examples) == first
