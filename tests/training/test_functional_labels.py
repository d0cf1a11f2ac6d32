"""Labels of -100 are ignored in training and evaluation; labels in a column are labels."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thinwire as tw
from thinwire.data.losses import cross_entropy
from thinwire.data.task import as_examples, pool_clients
from thinwire.errors import ConfigError
from thinwire.federation.sampler import Sampler
from thinwire.metrics.classification import correct_labels
from thinwire.training.evaluation import evaluate
from thinwire.training.functional import Functional

LENGTH, CLASSES = 5, 4


def sentences(n, seed=0):
    """Inputs and labels of sequences; some labels are -100, among them all of the second example."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, LENGTH, 3, generator=generator), torch.randint(0, CLASSES, (n, LENGTH), generator=generator)
    y[torch.rand(n, LENGTH, generator=generator) < 0.4] = -100
    y[1] = -100
    return x, y


def by_torch(outputs, targets):
    """torch's mean over all labels but -100."""
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def each_label(outputs, targets):
    """One loss for each label, 0 for those of -100."""
    return F.cross_entropy(outputs.mT, targets, reduction="none")


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("loss", [cross_entropy, by_torch, each_label])
def test_training_steps_equal_those_of_torch(backend, loss):
    """Clients of 7 and 4 examples in batches of 3: short batches are padded under vmap."""
    torch.manual_seed(0)
    net = nn.Linear(3, CLASSES)
    clients = [sentences(7), sentences(4, seed=1)]
    method, local = tw.Method(client_opt=tw.optimizers.SGD(0.5)), tw.Local(epochs=3, batch=3)
    run = tw.simulate(net, clients, method, rounds=1, local=local, loss=loss, backend=backend)
    expected = [torch.zeros_like(p) for p in net.parameters()]
    pool, assignment = pool_clients(clients)
    work = Sampler(tw.Key(0), [0, 1], 2, local, pool, assignment, torch.device("cpu")).workload(0, (0, 1))
    for i, share in enumerate((7 / 11, 4 / 11)):
        own = nn.Linear(3, CLASSES)
        own.load_state_dict(net.state_dict())
        for step, rows in enumerate(work.rows[i].tolist()):
            x, y = pool.gather(work.index[i, step, :rows]) if rows else (None, None)
            if rows and (y != -100).any():
                own.zero_grad()
                by_torch(own(x), y).backward()
                with torch.no_grad():
                    for p in own.parameters():
                        p -= 0.5 * p.grad
        expected = [total + share * p.detach() for total, p in zip(expected, own.parameters(), strict=True)]
    for block, right in zip(run.weights.values(), expected, strict=True):
        torch.testing.assert_close(block, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 4, 11])
@pytest.mark.parametrize("loss", [cross_entropy, by_torch, each_label])
def test_evaluation_counts_labels_for_any_batch_size(batch, loss):
    torch.manual_seed(0)
    net, (x, y) = nn.Linear(3, CLASSES), sentences(11)
    model = Functional.of(net, loss)
    value, accuracy = evaluate(model, model.weights(), {}, as_examples((x, y)), batch=batch)[:2]
    with torch.no_grad():
        outputs = net(x)
    assert value == pytest.approx(float(by_torch(outputs, y)), rel=1e-6)
    known = y != -100
    assert accuracy == pytest.approx(float((outputs.argmax(-1) == y)[known].double().mean()), abs=1e-12)


def test_examples_without_a_label_are_ignored():
    model = Functional.of(nn.Linear(3, CLASSES))
    x, y = torch.randn(6, 3), torch.tensor([0, -100, 2, -100, 3, 1])
    labeled, all_of_them = (
        evaluate(model, model.weights(), {}, as_examples((x, y)), index, batch=4)
        for index in (np.flatnonzero((y != -100).numpy()), None)
    )
    assert labeled[0] == pytest.approx(all_of_them[0], rel=1e-6)
    assert labeled[1] == all_of_them[1]
    with pytest.raises(ConfigError, match=r"all labels of the 2 examples to evaluate are -100"):
        evaluate(model, model.weights(), {}, as_examples((x, y)), np.array([1, 3]))


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_labels_in_a_column_are_labels(backend):
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, CLASSES), torch.randn(9, 3), torch.arange(9) % CLASSES
    runs = [
        tw.simulate(net, [(x, y)], rounds=2, local=tw.Local(batch=4), test=(x, y), backend=backend)
        for y in (y, y[:, None])
    ]
    assert runs[0].history[-1].accuracy == runs[1].history[-1].accuracy is not None
    assert runs[0].history[-1].test_loss == pytest.approx(runs[1].history[-1].test_loss, rel=1e-6)
    assert all(torch.equal(runs[0].weights[name], block) for name, block in runs[1].weights.items())


def test_labels_of_another_shape_are_an_error_in_one_line():
    net, x, y = nn.Linear(3, CLASSES), torch.randn(6, LENGTH, 3), torch.zeros(6, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"targets of shape \[5, 1\] .* outputs of shape \[5, 5, 4\]"):
        tw.simulate(net, [(x, y)], rounds=1)


def test_there_is_no_accuracy_where_a_sequence_has_one_label():
    """A custom loss may accept such targets; an accuracy would compare every position with the one label."""
    model = Functional.of(nn.Linear(3, CLASSES), lambda outputs, targets: outputs.square().mean((1, 2)))
    examples = as_examples((torch.randn(6, LENGTH, 3), torch.zeros(6, 1, dtype=torch.int64)))
    assert evaluate(model, model.weights(), {}, examples)[1] is None


def test_classes_are_last_where_both_readings_fit_and_a_warning_says_so():
    """Four classes at four positions; without the rule, loss and accuracy could read different axes."""
    outputs, labels = torch.randn(6, 4, 4), torch.randint(0, 4, (6, 4))
    expected = F.cross_entropy(outputs.mT, labels, reduction="none").mean(1)
    torch.testing.assert_close(cross_entropy(outputs, labels), expected)
    assert float(correct_labels(outputs, labels)[0]) == int((outputs.argmax(2) == labels).sum())
    with pytest.warns(RuntimeWarning, match=r"read the last: let forward return outputs.movedim\(1, -1\)"):
        tw.simulate(nn.Linear(3, 4), [(torch.randn(6, 4, 3), labels)], rounds=1)
