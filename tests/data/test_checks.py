"""Checks of a task before its first round; errors that name client and row. Mistakes of users: tests/mistakes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thinwire.data.checks import CHUNK_VALUES, Part, check_task as check
from thinwire.data.examples import Arrays, Images
from thinwire.data.losses import bce, cross_entropy, mse
from thinwire.data.partition import Assignment
from thinwire.data.task import Task, as_examples
from thinwire.errors import ConfigError, DataError

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(9) % 3
CLIENTS = Assignment(np.array([8, 0, 1, 2, 3, 4, 5]), np.array([0, 3, 7]))  # examples 6 and 7 are of no client


def task(inputs=X, targets=Y, model=None, clients=CLIENTS, **options) -> Task:
    return Task(model or nn.Linear(4, 3), Arrays(inputs, targets), clients, **options)


def check_task(found: Task, **options) -> None:
    own = copy.deepcopy(found.model).eval()
    check(found, lambda inputs: own(**inputs) if isinstance(inputs, dict) else own(inputs), **options)


def changed(values, row, value):
    values = values.clone()
    values[row] = value
    return values


def test_rows_are_those_of_the_client():
    with pytest.raises(DataError, match=r"^client 0, row 0: the input is nan at position \[2\]"):
        check_task(task(changed(X, (8, 2), float("nan"))))
    with pytest.raises(DataError, match=r"^client 0, row 0 \(and 1 more\): label 3, .* 3 outputs \(labels 0 to 2\)"):
        check_task(task(targets=changed(Y, [5, 8], 3)))
    with pytest.raises(DataError, match=r"^client 1, row 3: label 3"):
        check_task(task(targets=changed(Y, 5, 3)))


def test_examples_of_no_client_are_not_checked():
    check_task(task(changed(X, 6, float("inf")), changed(Y, 7, 77)))


def test_large_data_is_read_in_chunks():
    rows = CHUNK_VALUES // 1000 + 100  # more than one chunk
    inputs = torch.zeros(rows, 1000)
    inputs[-1, 5] = float("inf")
    part = Part(Arrays(inputs, torch.zeros(rows)), Assignment(np.arange(rows), np.array([0, rows])))
    with pytest.raises(DataError, match=rf"^client 0, row {rows - 1}: the input is inf at position \[5\]"):
        part.check_finite()


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(9,), (9, 1)])
def test_labels_of_any_integer_type_are_accepted_also_as_a_column(kind, shape):
    check_task(task(targets=Y.to(kind).view(shape), test=as_examples((X, Y.to(kind).view(shape)))))


def test_bytes_and_named_inputs_are_accepted():
    images = Images(torch.zeros(9, 1, 2, 2, dtype=torch.uint8), Y)
    check_task(Task(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), images, CLIENTS))

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.fc(a + b)

    check_task(task({"a": X, "b": X}, model=Named()))
    with pytest.raises(DataError, match="client 0, row 0: the input 'b' is nan"):
        check_task(task({"a": X, "b": changed(X, 8, float("nan"))}, model=Named()))


def test_targets_of_each_loss():
    labels = F.one_hot(Y, 3)
    check_task(task(targets=labels, loss=bce))
    check_task(task(targets=changed(labels, (1, 1), -100), loss=bce))
    with pytest.raises(DataError, match="client 0, row 2: target 2, but loss 'bce' takes 0 or 1"):
        check_task(task(targets=changed(labels, (1, 1), 2), loss=bce))
    check_task(task(targets=X[:, :3], loss=mse))
    check_task(task(targets=F.one_hot(Y, 3).float(), loss=F.cross_entropy))  # probabilities
    check_task(task(targets=changed(Y, 2, 255), loss=nn.CrossEntropyLoss(ignore_index=255, reduction="none")))
    with pytest.raises(DataError, match="label 255"):
        check_task(task(targets=changed(Y, 2, 255), loss=nn.CrossEntropyLoss()))
    with pytest.raises(ConfigError, match=r"the loss failed on outputs .*: Target 7 is out of"):
        check_task(task(targets=changed(Y, 5, 7), loss=lambda o, t: F.cross_entropy(o, t, reduction="none")))


def weighted(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 20.0]))


def spread(outputs, targets):
    return (outputs - outputs.mean(0)).square().sum() / (len(outputs) - 1)


def test_a_mean_that_is_not_the_mean_over_examples_is_said_where_batches_are_not_full():
    with pytest.warns(RuntimeWarning, match=r"is not the mean over its examples .* reduction='none'"):
        check_task(task(loss=weighted))
    with pytest.raises(ConfigError, match="one example alone is nan"):
        check_task(task(loss=spread))
    even = Assignment(np.arange(8), np.array([0, 4, 8]))
    check_task(task(loss=weighted, clients=even), batch=2)
    check_task(task(loss=F.cross_entropy))


def test_models_that_do_not_fit():
    with pytest.raises(
        ConfigError, match=r"inputs of shape \[7, 4\] \(torch.float32\) of client 0: .*cannot be multiplied"
    ):
        check_task(task(model=nn.Linear(5, 3)))
    with pytest.raises(ConfigError, match=r"inputs of shape \[7, 4\] \(torch.float32\) of client 0: "):
        check_task(task(model=nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 3)), inputs=X.abs()))
    with pytest.raises(ConfigError, match=r"outputs of shape \[21\] for 7 examples"):
        check_task(task(model=nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))))
    broken = nn.Linear(4, 3)
    nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(ConfigError, match="weight 'weight' of the initial model is not finite"):
        check_task(task(model=broken))


def test_the_check_changes_neither_the_model_nor_the_generator():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check_task(task(model=model))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_batch_norm_over_positions_trains_on_one_example():
    single = Assignment(np.arange(4), np.array([0, 1, 4]))
    images = X.view(9, 1, 2, 2)
    check_task(task(images, model=nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)), clients=single))
    with pytest.raises(ConfigError, match=r"client 0 has one example, and batch norm \('0'\) needs two"):
        check_task(task(model=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), clients=single))


def test_a_softmax_before_cross_entropy_is_said_once_and_other_ends_are_not(recwarn):
    check_task(task(model=nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), test=as_examples((X, Y))))
    check_task(task(model=nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())))
    check_task(task(model=nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), loss=nn.NLLLoss()))
    check_task(task(targets=X[:, :3].softmax(1), model=nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), loss=mse))
    assert not recwarn.list
    for loss in (cross_entropy, nn.CrossEntropyLoss()):
        recwarn.clear()
        ended = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
        check_task(task(model=ended, test=as_examples((X, Y)), loss=loss))
        (line,) = (str(one.message) for one in recwarn.list)
        assert line.startswith("the model ends with softmax, and cross-entropy expects the scores before it: remove")
