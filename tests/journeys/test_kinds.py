"""Kinds of learning from a fresh project: the program of the page, a page of its runs; any form of forward pass."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.utils.data import Dataset

import thinwire as tw

PAGE = Path(__file__).parents[2] / "docs/metrics.md"

BEFORE = """
import torch
from torch import nn
import thinwire as tw
torch.manual_seed(0)
"""

AFTER = """
import json
from sklearn.datasets import load_diabetes

x, y = load_diabetes(return_X_y=True)
x = torch.tensor(x / x.std(0), dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
patients = [(x[a : a + 40], y[a : a + 40]) for a in range(0, 320, 40)]
for method in ("fedavg", "mapo"):
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    run = tw.simulate(net, patients, method, rounds=12, test=(x[320:], y[320:]), loss="mse", out=f"runs/{method}")
    print(json.dumps([method, run.status, run.history[-1].accuracy, run.history[-1].metrics["r2"]]))
bad = x.clone()
bad[53, 2] = float("nan")
try:
    tw.simulate(net, [(bad[a : a + 40], y[a : a + 40]) for a in range(0, 320, 40)], loss="mse", out="runs/bad")
except tw.ThinwireError as error:
    print(error)
"""


def test_a_ranking_a_regression_and_a_mistake_in_the_data(tmp_path, thinwire, capsys):
    """The command line shows what the program wrote."""
    section = re.search(r"## Kinds of learning\n(.*?)\n## ", PAGE.read_text(), re.S)
    blocks = re.findall(r"^```python\n(.*?)^```", section[1], re.S | re.M)
    assert len(blocks) == 2
    (tmp_path / "kinds.py").write_text(BEFORE + "\n".join(blocks) + AFTER)
    runpy.run_path("kinds.py")
    regression, ranking, *learned, refusal = capsys.readouterr().out.splitlines()
    assert len(regression.split()) == len(ranking.split()) == 2
    for line in learned:
        method, status, accuracy, r2 = json.loads(line)
        assert (status, accuracy) == ("finished", None), method
        assert r2 > 0.2
    assert refusal.startswith("client 1, row 13: the input is nan at position [2]")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"fedavg", "mapo"}
    summary = json.loads((tmp_path / "runs/mapo/summary.json").read_text())
    assert summary["objective"]["name"] == "r2"
    assert summary["objective"]["best"] > 0.2
    code, _, err = thinwire("report", "runs", "--html", "page.html")
    assert code == 0, err
    assert "r2" in (tmp_path / "page.html").read_text()


DIGITS, LABELS = (torch.tensor(values) for values in load_digits(return_X_y=True))
FAST = tw.Method(client_opt=tw.optimizers.SGD(0.3))
IMAGES = (DIGITS / 16).float().view(-1, 1, 8, 8)


def clients_of(inputs, targets):
    """Four clients of 200 examples."""
    return [(tuple(x[i:800:4] for x in inputs), targets[i:800:4]) for i in range(4)]


class Segment(nn.Module):
    """The classes of pixels on axis 1, as torch has them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))

    def forward(self, image):
        return self.layers(image)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8])
def test_segmentation_has_the_loss_accuracy_and_f1_of_torch_and_scikit_learn(kind):
    """Paper, edge and ink of a pixel from an image with noise; labels as class indices or as bytes of a mask."""
    masks = ((DIGITS > 0).long() + (DIGITS > 8)).view(-1, 8, 8)
    noisy = IMAGES + 0.1 * torch.randn(IMAGES.shape)
    clients = [(x, y.to(kind)) for (x,), y in clients_of((noisy,), masks)]
    test = noisy[1000:], masks[1000:]
    settings = {"method": FAST, "rounds": 3, "metrics": ["f1"], "local": tw.Local(steps=10, batch=32)}
    run = tw.simulate(Segment(), clients, test=(test[0], test[1].to(kind)), **settings)
    with torch.no_grad():
        outputs = run.model().eval()(test[0])
    true, predicted = test[1].flatten(), outputs.argmax(1).flatten()
    last = run.history[-1]
    assert last.test_loss == pytest.approx(float(F.cross_entropy(outputs, test[1])), rel=1e-5)
    assert last.accuracy == pytest.approx(accuracy_score(true, predicted))
    assert last.metrics["f1"] == pytest.approx(f1_score(true, predicted, average="macro"))
    assert last.accuracy > 0.7 > float((true == 0).double().mean())
    if kind is torch.int64:
        torchs = tw.simulate(Segment(), clients, test=test, loss=nn.CrossEntropyLoss(), **settings).history[-1]
        assert (torchs.accuracy, torchs.metrics["f1"]) == pytest.approx((last.accuracy, last.metrics["f1"]), abs=0.2)


def test_several_labels_of_a_digit():
    digit = torch.stack((LABELS % 2 == 0, LABELS > 4, (LABELS == 0) | (LABELS == 8)), 1)
    flat = IMAGES.flatten(1)
    clients = [(x, y) for (x,), y in clients_of((flat,), digit.float())]
    test = flat[1000:], digit[1000:].float()
    run = tw.simulate(nn.Linear(64, 3), clients, FAST, rounds=6, test=test, loss="bce", metrics=["multilabel-f1"])
    with torch.no_grad():
        predicted = run.model()(test[0]) > 0
    assert run.history[-1].accuracy == pytest.approx(float((predicted == digit[1000:]).double().mean()))
    assert run.history[-1].accuracy > 0.75
    assert run.history[-1].metrics["multilabel-f1"] == pytest.approx(f1_score(digit[1000:], predicted, average="micro"))


class Halves(nn.Module):
    """The upper and the lower half of a digit, each with a tower of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, upper, lower):
        return self.head(torch.relu(self.a(upper) + self.b(lower)))


class WholeBatch(Halves):
    def forward(self, batch):
        return super().forward(batch["upper"], batch["lower"]), batch


class Keywords(Halves):
    def forward(self, **batch):
        return [super().forward(**batch)]


class Record(Halves):
    def forward(self, upper, lower=None):
        return SimpleNamespace(loss=None, logits=super().forward(upper, lower))


class Named(Halves):
    def forward(self, lower, upper):
        return {"loss": None, "logits": super().forward(upper, lower)}


class Items(Dataset):
    """A dataset of single examples with named or numbered inputs."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        if isinstance(self.inputs, dict):
            return {name: values[i] for name, values in self.inputs.items()}, self.targets[i]
        return tuple(values[i] for values in self.inputs), self.targets[i]


def by_name(inputs):
    return dict(zip(("upper", "lower"), inputs, strict=True))


FORMS = {
    "tuple, record with logits": (Record, lambda inputs, y: (inputs, y)),
    "list of numpy arrays, record": (Record, lambda inputs, y: ([x.numpy() for x in inputs], y.numpy())),
    "dictionary by name, dictionary with logits": (Named, lambda inputs, y: (by_name(inputs), y)),
    "dictionary as one argument, tuple": (WholeBatch, lambda inputs, y: (by_name(inputs), y)),
    "dictionary as keywords, list": (Keywords, lambda inputs, y: (by_name(inputs), y)),
    "dataset of tuples": (Halves, Items),
    "dataset of dictionaries": (WholeBatch, lambda inputs, y: Items(by_name(inputs), y)),
}


@pytest.fixture(scope="module")
def halves():
    """Clients, a test set and the run that all forms must repeat."""
    parts = IMAGES.flatten(1)[:, :32], IMAGES.flatten(1)[:, 32:]
    clients, test = clients_of(parts, LABELS), (tuple(x[1000:] for x in parts), LABELS[1000:])
    return clients, test, trained(Halves, clients, test)


def trained(make, clients, test, **settings):
    torch.manual_seed(0)
    local = tw.Local(steps=15, batch=32)
    return tw.simulate(make(), clients, FAST, rounds=6, local=local, test=test, backend="vmap", **settings)


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_inputs_and_outputs_trains_to_the_same_bits(halves, form):
    clients, test, expected = halves
    make, given = FORMS[form]
    run = trained(make, [given(*client) for client in clients], given(*test))
    assert run.accuracy == expected.accuracy > 0.7
    for name, block in expected.weights.items():
        assert torch.equal(run.weights[name], block), name
