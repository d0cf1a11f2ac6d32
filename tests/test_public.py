"""The public interface."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.core.registry import KINDS, entries


def names_for_type_checkers():
    """The names that `__init__.py` imports under TYPE_CHECKING."""
    source = ast.parse(Path(tw.__file__).read_text())
    return {
        alias.asname
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "thinwire"
        for alias in node.names
    }


def test_every_public_name_resolves_and_is_known_to_type_checkers():
    assert names_for_type_checkers() == set(tw.__all__) - {"__version__"}
    assert len(tw.__all__) == len(set(tw.__all__))
    assert dir(tw) == sorted(tw.__all__)
    for name in tw.__all__:
        assert getattr(tw, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tw.nothing  # noqa: B018


def test_there_are_few_names_and_no_alias_of_a_part():
    own = set(tw.__all__) - set(tw._SUBMODULES)
    assert len(own) <= 60
    assert not own & {entry.make.__name__ for kind in KINDS for entry in entries(kind).values()}


def test_submodules_have_their_parts():
    assert tw.methods.fedavg() == tw.Method()
    assert callable(tw.testing.check_codec)
    assert callable(tw.models.build)
    assert tw.data.__name__ == "thinwire.data"
    assert tw.metrics.Metric is tw.Metric


def test_every_part_of_a_submodule_is_public():
    """Registered parts of a kind are attributes of the submodule of that kind."""
    for kind, module in (("space", tw.spaces), ("codec", tw.codecs), ("schedule", tw.schedules), ("mask", tw.masks)):
        for entry in entries(kind).values():
            if entry.make.__module__.startswith("thinwire."):
                assert getattr(module, entry.make.__name__) is entry.make


def test_contracts_and_errors_are_classes():
    for name in ("Aggregator", "Codec", "Correction", "Mask", "Optimizer", "Privacy", "Schedule", "Sketch", "Space"):
        assert isinstance(getattr(tw, name), type)
    for name, error in vars(importlib.import_module("thinwire.errors")).items():
        if isinstance(error, type) and issubclass(error, tw.ThinwireError):
            assert getattr(tw.errors, name) is error


def test_version_is_that_of_the_package():
    if tw.__version__ == "unknown":
        pytest.skip("the package is not installed: the tests run in a source tree")
    assert re.match(r"\d+\.\d+", tw.__version__)
    assert tw.__version__ == importlib.metadata.version("thinwire")


def test_import_loads_nothing_heavy():
    check = (
        "import sys, thinwire; assert not {'torch', 'numpy', 'importlib.metadata'} & set(sys.modules); dir(thinwire)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_importing_everything_public_needs_only_torch_numpy_and_safetensors():
    block = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'typer', 'rich', 'sklearn', 'PIL', 'datasets', 'transformers', 'flwr'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import thinwire as tw\n"
        "for name in tw.__all__: getattr(tw, name)\n"
    )
    subprocess.run([sys.executable, "-c", block], check=True)


def clients(n=4, rows=12):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows + i, 5, generator=generator), torch.randint(0, 3, (rows + i,), generator=generator))
        for i in range(n)
    ]


def test_simulate_trains_and_does_not_change_the_given_model():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    before = {name: block.clone() for name, block in model.state_dict().items()}
    run = tw.simulate(model, clients(), tw.Method(), rounds=3, test=clients()[0])
    assert all(torch.equal(before[name], block) for name, block in model.state_dict().items())
    final = run.model()
    assert not torch.equal(final[0].weight, model[0].weight)
    assert not torch.equal(final[1].running_mean, model[1].running_mean)
    final.eval()
    inputs, targets = clients()[0]
    accuracy = float((final(inputs).argmax(1) == targets).float().mean())
    assert run.accuracy == pytest.approx(accuracy)


def test_simulate_accepts_datasets_a_loss_and_the_name_of_a_method():
    data = [torch.utils.data.TensorDataset(x, x.sum(1)) for x, _ in clients()]
    run = tw.simulate(
        nn.Linear(5, 1), data, "fedavgm", rounds=5, cohort=2, loss=lambda o, y: ((o[:, 0] - y) ** 2).mean()
    )
    assert run.history[-1].loss < run.history[0].loss
    assert run.accuracy is None


def test_simulate_refuses_unusable_arguments_in_one_line():
    with pytest.raises(tw.ConfigError, match="client 1 has no examples"):
        tw.simulate(nn.Linear(5, 3), [*clients(1), (torch.zeros(0, 5), torch.zeros(0).long())])
    with pytest.raises(tw.ConfigError, match="no clients"):
        tw.simulate(nn.Linear(5, 3), [])
    with pytest.raises(tw.ConfigError, match="an nn"):
        tw.simulate("model", clients())
    with pytest.raises(tw.ConfigError, match="one target for each input"):
        tw.simulate(nn.Linear(5, 3), [(torch.zeros(3, 5), torch.zeros(2).long())])
    with pytest.raises(tw.ConfigError, match="shape"):
        tw.simulate(nn.Linear(5, 3), [*clients(1), (torch.zeros(3, 4), torch.zeros(3).long())])
    with pytest.raises(tw.errors.UnknownName, match="did you mean 'fedavg'"):
        tw.simulate(nn.Linear(5, 3), clients(), "fedvag")
    with pytest.raises(tw.ConfigError, match="no trainable weights"):
        tw.simulate(nn.Linear(5, 3).requires_grad_(False), clients())
    with pytest.raises(tw.ConfigError, match="cohort"):
        tw.simulate(nn.Linear(5, 3), clients(), cohort=9)


def test_simulate_writes_a_run_directory_that_can_be_reported_and_overwritten(tmp_path):
    run = tw.simulate(nn.Linear(5, 3), clients(), "fedavgm", rounds=2, test=clients()[0], out=tmp_path / "a")
    assert {file.name for file in run.path.iterdir()} >= {"config.toml", "metrics.jsonl", "summary.json"}
    where = {"out": tmp_path / "a", "overwrite": True}
    again = tw.simulate(nn.Linear(5, 3), clients(), tw.Method(), rounds=3, name="mine", **where)
    rows = tw.report([again], tmp_path / "page.html").rows
    assert [(row.label, len(row.runs[0].records)) for row in rows] == [("mine", 3)]
    assert rows[0].total("bytes_total") == again.bytes_total
    with pytest.raises(tw.ConfigError, match="out="):
        tw.report([tw.simulate(nn.Linear(5, 3), clients(), rounds=1)])
