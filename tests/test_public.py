"""The public page."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw


def test_every_public_name_resolves_and_is_known_to_type_checkers():
    source = ast.parse(Path(tw.__file__).read_text())
    typed = {
        alias.asname
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinwire")
        for alias in node.names
    }
    assert typed == set(tw.__all__)
    for name in tw.__all__:
        assert getattr(tw, name) is not None
    with pytest.raises(AttributeError):
        tw.nothing  # noqa: B018


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
        "import thinwire.models, thinwire.data, thinwire.testing\n"
    )
    subprocess.run([sys.executable, "-c", block], check=True)


def clients(n=4, rows=12):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows + i, 5, generator=generator), torch.randint(0, 3, (rows + i,), generator=generator))
        for i in range(n)
    ]


def test_simulate_trains_and_never_touches_the_users_model():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    before = {name: block.clone() for name, block in model.state_dict().items()}
    run = tw.simulate(model, clients(), tw.Method(), rounds=3, test=clients()[0])
    assert all(torch.equal(before[name], block) for name, block in model.state_dict().items())
    final = run.model()
    assert not torch.equal(final[0].weight, model[0].weight)
    assert not torch.equal(final[1].running_mean, model[1].running_mean)
    final.eval()
    inputs, targets = clients()[0]
    share = float((final(inputs).argmax(1) == targets).float().mean())
    assert run.accuracy == pytest.approx(share)


def test_simulate_takes_datasets_a_loss_and_a_name():
    data = [torch.utils.data.TensorDataset(x, x.sum(1)) for x, _ in clients()]
    run = tw.simulate(
        nn.Linear(5, 1), data, "fedavgm", rounds=5, cohort=2, loss=lambda o, y: ((o[:, 0] - y) ** 2).mean()
    )
    assert run.history[-1].loss < run.history[0].loss
    assert run.accuracy is None


def test_what_simulate_cannot_use_is_said_in_one_line():
    with pytest.raises(tw.ConfigError, match="client 1 has no examples"):
        tw.simulate(nn.Linear(5, 3), [*clients(1), (torch.zeros(0, 5), torch.zeros(0).long())])
    with pytest.raises(tw.ConfigError, match="no clients"):
        tw.simulate(nn.Linear(5, 3), [])
    with pytest.raises(tw.ConfigError, match="an nn"):
        tw.simulate("model", clients())
    with pytest.raises(tw.ConfigError, match="one target for each input"):
        tw.simulate(nn.Linear(5, 3), [(torch.zeros(3, 5), torch.zeros(2).long())])
    with pytest.raises(tw.ConfigError, match="one shape"):
        tw.simulate(nn.Linear(5, 3), [*clients(1), (torch.zeros(3, 4), torch.zeros(3).long())])
    with pytest.raises(tw.UnknownName, match="did you mean 'fedavg'"):
        tw.simulate(nn.Linear(5, 3), clients(), "fedvag")
    with pytest.raises(tw.ConfigError, match="no trainable weights"):
        tw.simulate(nn.Linear(5, 3).requires_grad_(False), clients())
    with pytest.raises(tw.ConfigError, match="cohort"):
        tw.simulate(nn.Linear(5, 3), clients(), cohort=9)


def test_simulate_writes_a_run_directory_that_can_be_reported_and_replaced(tmp_path):
    run = tw.simulate(nn.Linear(5, 3), clients(), "fedavgm", rounds=2, test=clients()[0], out=tmp_path / "a")
    assert {file.name for file in run.path.iterdir()} >= {"config.toml", "metrics.jsonl", "summary.json"}
    again = tw.simulate(nn.Linear(5, 3), clients(), tw.Method(), rounds=3, out=tmp_path / "a", name="mine")
    lines = tw.report([again], tmp_path / "page.html")
    assert [(line.label, len(line.runs[0].records)) for line in lines] == [("mine", 3)]
    assert lines[0].total("bytes_total").mean == again.bytes_total
    with pytest.raises(tw.ConfigError, match="out="):
        tw.report([tw.simulate(nn.Linear(5, 3), clients(), rounds=1)])


def test_simulate_overwrites_nothing_that_a_script_did_not_write(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/to-my-aunt.txt").write_text("Dear aunt")
    with pytest.raises(tw.CheckpointError, match="not a run directory"):
        tw.simulate(nn.Linear(5, 3), clients(), rounds=1, out=tmp_path / "letters")
    assert (tmp_path / "letters/to-my-aunt.txt").exists()
