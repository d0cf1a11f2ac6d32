"""A model and data of one's own in a fresh folder: killed, watched, resumed to the same bits, and stopped early."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import thinwire as tw

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, signal, sys
import torch
from sklearn.datasets import load_digits
from torch import nn
import thinwire as tw

out, kill_at = sys.argv[1], int(sys.argv[2])
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 8, 8), torch.tensor(y)
clients = [(x[i:300:12], y[i:300:12]) for i in range(12)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 16, 3, padding=1), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(1))


def killed(record):
    print("round", record.round, flush=True)
    if record.round == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
run = tw.simulate(
    Net(), clients, tw.Method(client_opt=tw.optimizers.SGD(0.3)), rounds=40, cohort=3, test=(x[600:800], y[600:800]),
    seed=1, validation_fraction=0.2, patience=2, checkpoint_every=2, out=out, resume=True, on_round=killed,
)
print(run)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
def test_a_script_killed_in_simulate_resumes_to_the_same_bits_and_the_same_best_model(
    tmp_path, monkeypatch, thinwire, capsys
):
    (tmp_path / "mine.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "mine.py", "cut", "5"], env=env, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    code, out, _ = thinwire("watch", "cut")
    assert code == 1
    assert "round 5/40" in out
    assert "stopped: its process is gone; run `python mine.py` again, with resume=True" in out
    for name in ("cut", "whole"):
        monkeypatch.setattr(sys, "argv", ["mine.py", name, "0"])
        runpy.run_path("mine.py")
        assert capsys.readouterr().err == "", "no progress without a terminal"
    for name in ("model.safetensors", "best.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    cut, full = tw.load_run(tmp_path / "cut"), tw.load_run(tmp_path / "whole")
    assert [r._replace(seconds=0) for r in cut.history] == [r._replace(seconds=0) for r in full.history]
    assert cut.ended_by == "patience"
    assert len(cut.history) == cut.best.round + 2 < 40
    assert load_file(tmp_path / "cut/best.safetensors").keys() == cut.weights.keys()
    assert tw.load_run(tmp_path / "cut").summary["best"]["chosen_by"] == "validation accuracy"
