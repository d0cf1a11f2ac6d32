"""Mistakes of a first user: one line that says what to write, exit code 2, a ThinwireError in Python, no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from tests.bad_input.refusal import refused
from thinwire.core import registry
from thinwire.data.examples import Arrays, Source
from thinwire.data.task import Task, pool_clients
from thinwire.errors import ThinwireError
from thinwire.federation.job import Job
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

RUN = ("run", "fedavg", "--on", "digits")
GENERATOR = torch.Generator().manual_seed(0)
CLIENTS = [(torch.randn(20, 4, generator=GENERATOR), torch.randint(0, 3, (20,), generator=GENERATOR)) for _ in range(3)]


def clients(change: Callable[[torch.Tensor, torch.Tensor], Any] | None = None, client: int = 1) -> list[Any]:
    """Three clients of 20 examples with four features and three classes; one of them is changed."""
    own: list[Any] = [(x.clone(), y.clone()) for x, y in CLIENTS]
    if change is not None:
        own[client] = change(*own[client])
    return own


def with_value(row: int, value: float, of: int = 0) -> Callable[..., Any]:
    """Put a value into a row of the inputs (0) or the targets (1)."""

    def change(*pair: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pair[of][row] = value
        return pair

    return change


def simulate(given: Any = None, model: nn.Module | None = None, method: Any = "fedavg", **options: Any) -> Any:
    """A run of two rounds in Python."""
    model = nn.Linear(4, 3) if model is None else model
    return tw.simulate(model, clients() if given is None else given, method, **{"rounds": 2, **options})


def job(**options: Any) -> Job:
    return Job(Task(nn.Linear(4, 3), *pool_clients(clients())), cohort=3, **options)


class Mistake(NamedTuple):
    """A mistake.

    Args:
        python: makes it in Python, given a folder; None where there is no such thing.
        words: makes it on the command line; empty where there is no such thing.
        message: a part of the line.
        on_command_line: the same on the command line, where it differs.
    """

    python: Callable[[], Any] | None
    words: tuple[str, ...]
    message: str
    on_command_line: str = ""


def float_labels(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, y.float()


class ThreeItems(TensorDataset):
    """A dataset whose items are not pairs."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x, y, y


MISTAKES = {
    # data
    "NaN in the inputs": Mistake(
        lambda: simulate(clients(with_value(3, float("nan")))),
        ("run", "fedavg", "--on", "with-nan"),
        "client 1, row 3: the input is nan at position [0]",
        ": the input is nan at position [0]",
    ),
    "infinity in the targets of a regression": Mistake(
        lambda: simulate(
            [(x, x[:, 0].clone() / (0.0 if i == 2 else 1.0)) for i, (x, _) in enumerate(CLIENTS)],
            nn.Linear(4, 1),
            loss="mse",
        ),
        (),
        "client 2, row 0 (and 19 more): the target is ",
    ),
    "a label that the model has no output for": Mistake(
        lambda: simulate(clients(with_value(5, 3, of=1))),
        ("run", "fedavg", "--on", "with-label-9"),
        "client 1, row 5: label 3, but the model has 3 outputs (labels 0 to 2)",
        ": label 9, but the model has 3 outputs (labels 0 to 2)",
    ),
    "a negative label": Mistake(
        lambda: simulate(clients(with_value(5, -1, of=1))), (), "label -1, but the model has 3 outputs"
    ),
    "float labels": Mistake(
        lambda: simulate([float_labels(*pair) for pair in CLIENTS]),
        ("run", "fedavg", "--on", "with-float-labels"),
        "targets of shape [5] (torch.float32) are no class labels for outputs of shape [5, 3]: give integers "
        "of shape [5], targets.long(), or write loss='bce' for labels of 0 and 1, loss='mse' for numbers",
    ),
    "one-hot labels": Mistake(
        lambda: simulate([(x, nn.functional.one_hot(y, 3)) for x, y in CLIENTS]),
        (),
        "give integers of shape [5], targets.argmax(1) if one-hot, or write loss='bce' for labels of 0 and 1",
    ),
    "one-hot labels for torch's loss": Mistake(
        lambda: simulate([(x, nn.functional.one_hot(y, 3)) for x, y in CLIENTS], loss=nn.CrossEntropyLoss()),
        (),
        "targets.argmax(1) if one-hot",
    ),
    "a model with one output for two classes": Mistake(
        lambda: simulate([(x, y % 2) for x, y in CLIENTS], nn.Linear(4, 1)),
        (),
        "give the last layer an output for each class, or write loss='bce' for labels of 0 and 1",
    ),
    "too few inputs for the forward pass": Mistake(
        lambda: simulate(model=nn.Bilinear(4, 4, 3)),
        (),
        "forward(input1, input2) of the model cannot be called with inputs of shape [7, 4] (torch.float32) of "
        "client 0: missing a required argument: 'input2'; write a client as ((input1, input2), targets), or its",
    ),
    "inputs of other names than those of the forward pass": Mistake(
        lambda: simulate([({"input1": x, "second": x}, y) for x, y in CLIENTS], nn.Bilinear(4, 4, 3)),
        (),
        "missing a required argument: 'input2'; write a client as ((input1, input2), targets)",
    ),
    "outputs without logits": Mistake(
        lambda: simulate(model=nn.MultiheadAttention(4, 1)), (), "forward(query, key, value,"
    ),
    "float64 inputs": Mistake(
        lambda: simulate([(x.double(), y) for x, y in CLIENTS]),
        (),
        "inputs of shape [7, 4] (torch.float64) of client 0",
    ),
    "integer targets of a regression": Mistake(
        lambda: simulate(None, nn.Linear(4, 1), loss="mse"), (), "give floats: targets.float()"
    ),
    "an empty client": Mistake(
        lambda: simulate([*clients(), (torch.zeros(0, 4), torch.zeros(0))]), (), "client 3 has no examples"
    ),
    "inputs and targets of different length": Mistake(
        lambda: simulate(clients(lambda x, y: (x, y[:-1]))), (), "client 1 has [20] inputs but 19 targets"
    ),
    "clients of different shape": Mistake(
        lambda: simulate(clients(lambda x, y: (x[:, :3], y))),
        (),
        "client 1 has inputs of shape [3], targets of shape [], client 0 inputs of shape [4]",
    ),
    "a test set of another shape": Mistake(
        lambda: simulate(test=(torch.zeros(9, 5), torch.zeros(9, dtype=torch.int64))), (), "of the test set"
    ),
    "a data loader of items that are no pairs": Mistake(
        lambda: simulate([DataLoader(ThreeItems(*pair)) for pair in CLIENTS]),
        (),
        "of several inputs ((a, b), targets): too many",
    ),
    "a client whose labels are all ignored": Mistake(
        lambda: simulate(clients(with_value(slice(None), -100, of=1))),
        (),
        "all labels of client 1 are -100",  # type: ignore[arg-type]
    ),
    # model and loss
    "a loss of another shape": Mistake(
        lambda: simulate(loss=lambda outputs, targets: outputs.sum(0)),
        (),
        "the loss returns values of shape [3] for 7 examples; return one value for each",
    ),
    "a loss without a gradient": Mistake(
        lambda: simulate(loss=lambda outputs, targets: (outputs.argmax(1) != targets).float()), (), "has no gradient"
    ),
    "a loss that broadcasts": Mistake(
        lambda: simulate([(x, x[:, 0]) for x, _ in CLIENTS], nn.Linear(4, 1), loss=nn.functional.mse_loss),
        (),
        "the loss broadcasts outputs of shape [5, 1] and targets of shape [5]",
    ),
    "a model without parameters": Mistake(lambda: simulate(model=nn.Flatten()), (), "no trainable weights"),
    "a model on another device": Mistake(
        lambda: simulate(model=nn.Linear(4, 3, device="meta")), (), "the model cannot be copied"
    ),
    "batch norm and a client with one example": Mistake(
        lambda: simulate(clients(lambda x, y: (x[:1], y[:1])), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))),
        (),
        "client 1 has one example, and batch norm ('0') needs two",
    ),
    "k above the number of weights": Mistake(
        lambda: simulate(method=tw.methods.mapo(k=1000)),
        ("run", "mapo", "--on", "digits", "--set", "method.space.k=1000000"),
        "k must be from 1 to the number of weights",
    ),
    # settings
    "text for a number of rounds": Mistake(
        lambda: simulate(rounds="10"), (*RUN, "--set", "rounds='10'"), "write rounds = 10", "rounds must be"
    ),
    "text for a learning rate": Mistake(
        lambda: tw.optimizers.SGD("0.1"),  # type: ignore[arg-type]
        (*RUN, "--set", "method.client_opt.lr='0.1'"),
        "lr must be a number, not the text '0.1'; write lr = 0.1",
        "lr must be",
    ),
    "negative rounds": Mistake(
        lambda: simulate(rounds=-1), (*RUN, "--rounds", "-1"), "rounds must be 1 or more, not -1"
    ),
    "a cohort above the number of clients": Mistake(
        lambda: simulate(cohort=9), (*RUN, "--cohort", "999"), "cohort must be from 1 to the number of clients"
    ),
    "an unknown method": Mistake(
        lambda: simulate(method="fedavgg"), ("run", "fedavgg"), "unknown method 'fedavgg': did you mean 'fedavg'?"
    ),
    "an unknown metric": Mistake(
        lambda: simulate(metrics=["f3"], test=CLIENTS[0]), (*RUN, "--set", "eval.metrics=['f3']"), "unknown metric 'f3'"
    ),
    "an unknown objective": Mistake(
        lambda: job(objective="auc"),
        (*RUN, "--set", "eval.objective=auc"),
        "unknown metric of the run 'auc'",
    ),
    "an unknown loss": Mistake(lambda: simulate(loss="ce"), (), "unknown loss 'ce'"),
    "a part of a plugin that was not imported": Mistake(
        lambda: simulate(metrics=["my-metric"], test=CLIENTS[0]),
        (*RUN, "--set", "method.up=my-codec"),
        "a part of your own is found after --import MODULE",
    ),
    "an unknown key": Mistake(None, (*RUN, "--set", "method.client_opt.learning_rate=0.1"), "learning_rate"),
    "a device that is not there": Mistake(lambda: simulate(device="cuda:77"), (*RUN, "--device", "cuda:77"), "cuda"),
    # files
    "a file that is missing": Mistake(lambda: simulate(method="missing.toml"), ("run", "missing.toml"), "missing.toml"),
    "a file that is not TOML": Mistake(None, ("run", "bad.toml"), "bad.toml is not valid TOML"),
    "a folder of another run": Mistake(None, (*RUN, "--rounds", "3", "--out", "other"), "other"),
    "a folder that cannot be written": Mistake(None, (*RUN, "--rounds", "1", "--out", "/proc/run"), "/proc/run"),
}


def test_there_are_more_than_twenty_of_each_kind():
    assert sum(mistake.python is not None for mistake in MISTAKES.values()) >= 20
    assert sum(bool(mistake.words) for mistake in MISTAKES.values()) >= 15


@pytest.fixture
def datasets():
    """Tasks with a mistake in the data, by name."""
    before = registry.foreign()
    preset = {"task": {"clients": 3, "partition": {"kind": "iid"}, "model": {"kind": "mlp"}}, "cohort": {"size": 2}}

    def add(name: str, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        def make(data_dir: Any = None) -> Source:
            """A task with a mistake."""
            return Source(Arrays(inputs, targets), Arrays(*CLIENTS[0]), classes=3, model={"inputs": 4})

        registry.register("dataset", name, preset=preset)(make)

    x, y = (torch.cat(parts) for parts in zip(*CLIENTS, strict=True))
    add("with-nan", torch.where(torch.arange(60)[:, None] == 30, float("nan"), x), y)
    add("with-label-9", x, torch.where(torch.arange(60) == 30, 9, y))
    add("with-float-labels", x, y.float())
    yield
    registry.unregister(registry.foreign() - before)


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.python])
def test_mistakes_in_python_are_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = MISTAKES[name]
    with pytest.raises(ThinwireError) as caught:
        mistake.python()
    line = str(caught.value)
    assert mistake.message in line
    assert "\n" not in line
    assert "learning rate" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.words])
def test_mistakes_on_the_command_line_are_one_line_and_exit_code_2(name, thinwire, tmp_path):
    (tmp_path / "bad.toml").write_text("rounds = [")
    if "other" in MISTAKES[name].words:
        execute(resolve("fedavg", "digits", {"rounds": 1, "local.steps": 1}), tmp_path / "other")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    mistake = MISTAKES[name]
    line = refused(thinwire(*mistake.words))
    assert (mistake.on_command_line or mistake.message) in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
