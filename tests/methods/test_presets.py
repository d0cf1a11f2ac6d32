"""Methods as presets: tables on every task, and methods that other packages register."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import thinwire as tw
from thinwire.cli.app import app
from thinwire.core import registry
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.methods.fedavg import arguments_on_tasks, on
from thinwire.runs.config import from_table, resolve, to_table, update
from thinwire.runs.presets import catalog, filled, preset, presets
from thinwire.runs.toml import dumps, loads

METHODS = sorted(presets("methods"))
TASKS = sorted(presets("tasks"))


@pytest.mark.parametrize("method", METHODS)
def test_method_resolves_on_its_tasks_and_can_be_written(method):
    """On every task for FedAvg and MAPO; for others where the preset differs, and on one more."""
    make = registry.lookup("method", method).make
    assert update(tw.Method(), filled(make())) == make()
    for task in TASKS if method in ("fedavg", "mapo") else {*arguments_on_tasks(make), "digits"}:
        experiment = resolve(method, on=task, recipe="paper")
        assert from_table(loads(dumps(to_table(experiment)), "test")) == experiment
        expected = make(**arguments_on_tasks(make).get(task, {}))
        if expected.client_opt is tw.Method.client_opt:  # not filled: the task sets it
            expected = expected.replace(client_opt=experiment.method.client_opt)
        assert experiment.method == expected.replace(space=expected.space.over(experiment.rounds))


def test_preset_has_name_first_line_paper_and_tables():
    found = preset("methods", "mapo")
    assert (found.name, found.paper) == ("mapo", "MAPO: Reshape-then-factorize")
    assert found.about == tw.methods.mapo.__doc__.splitlines()[0]
    assert set(found.table["method"]) == {"space"}
    assert found.on_task("fashion-mnist")["method"]["space"].redraw_every == 10
    assert found.on_task("digits") == found.on_task(None) == found.table
    paper = preset("methods", "mapo-paper")
    assert set(paper.table["method"]) == {"space", "client_opt"}
    assert paper.on_task("cifar10")["method"]["space"].k == 1024


def test_learning_rate_of_a_method_has_priority_over_the_task():
    assert resolve("fedavg", on="digits", recipe="paper").method.client_opt == tw.optimizers.SGD(0.3)
    assert resolve("lowrank", on="digits", recipe="paper").method.client_opt == tw.optimizers.SGD(
        0.1
    )  # equal to the default of Method
    for name in ("mapo", "mapa", "mapax", "lora", "ffa-lora", "fedsa-lora", "fedloru", "fedpara"):
        assert resolve(name, on="digits", recipe="paper").method.client_opt == tw.optimizers.SGD(0.3)
    for name, lr in (("mapo-paper", 0.02), ("mapa-paper", 0.0006), ("mapax-paper", 0.0006)):
        assert resolve(name, on="digits", recipe="paper").method.client_opt == tw.optimizers.SGD(lr)


@pytest.mark.parametrize("name", ["mapo-paper", "mapa-paper", "mapax-paper"])
def test_the_papers_basis_is_gaussian_as_drawn_contiguous_and_new_in_every_round(name):
    space = resolve(name, on="mnist").method.space
    assert (space.entries, space.normalize, space.layout, space.redraw_every) == ("gaussian", "none", "contiguous", 1)
    spec = Spec.of({"w": torch.zeros(20_000)})
    basis = space.basis(spec, Key(1), "cpu")
    assert set(basis) == {"a"}
    assert float(basis["a"].std()) == pytest.approx(1, rel=0.2 if name == "mapo-paper" else 0.02)


def test_settings_outside_of_the_method_are_part_of_the_preset():
    assert preset("methods", "fedsgd").table == {"method": {}, "local": {"epochs": 1, "batch": 0, "steps": 1}}
    assert resolve("fedsgd", on="cifar10").local == tw.Local(epochs=1, batch=0, steps=1)


@pytest.fixture
def table(monkeypatch):
    """The registry, restored after the test."""
    registry.entries("method")
    monkeypatch.setattr(registry, "_TABLE", {kind: dict(parts) for kind, parts in registry._TABLE.items()})


@pytest.fixture
def tiny(table):
    """A method that another package registers."""

    @tw.register("method", "tiny", paper="Example, 2026")
    @on("cifar10", k=32)
    def tiny(k: int = 16) -> tw.Method:
        """MAPO with very few parameters."""
        return tw.methods.mapo(k=k)


@pytest.mark.usefixtures("tiny")
def test_registered_method_is_listed_shown_resolved_and_joined():
    assert {"name": "tiny", "about": "MAPO with very few parameters.", "paper": "Example, 2026"} in catalog("methods")
    assert "k = 16" in CliRunner().invoke(app, ["show", "tiny"]).output
    assert resolve("tiny", on="cifar10").method.space == tw.spaces.MAPO(k=32)
    assert resolve("tiny+int8").method.up == tw.codecs.Quantize(8)
    with pytest.raises(IncompatibleParts, match=r"'tiny' and 'lora' both fill method\.space"):
        resolve("tiny+lora")


@pytest.mark.usefixtures("tiny")
def test_experiment_file_builds_on_a_registered_method(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[method]\nkind = "tiny+int8"\nspace = { k = 7 }\n')
    method = resolve(str(file)).method
    assert (method.space, method.up) == (tw.spaces.MAPO(k=7), tw.codecs.Quantize(8))


@pytest.mark.usefixtures("table")
def test_function_that_cannot_be_a_preset_is_refused_in_one_line():
    @tw.register("method", "needs-k")
    def needs_k(k: int) -> tw.Method:
        """A method without a default."""
        return tw.methods.mapo(k=k)

    @tw.register("method", "no-method")
    def no_method() -> tw.Method:
        """A function that returns something else."""
        return None

    for name, message in (
        ("needs-k", "give every argument a default"),
        ("no-method", "must return a Method, not None"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            resolve(name)
        assert "\n" not in str(error.value)


@pytest.mark.usefixtures("table")
def test_unregistered_part_in_a_registered_method_is_not_written():
    class Odd(tw.codecs.Raw):
        """A codec that is not registered."""

    @tw.register("method", "odd")
    def odd() -> tw.Method:
        """A method with a codec that is not registered."""
        return tw.Method(up=Odd())

    with pytest.raises(ConfigError, match="not a registered codec"):
        to_table(resolve("odd"))
