"""Kinds of learning from a fresh project: the program of the page, and a page of its runs."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

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
