"""Compressed tasks and results in NVFlare: a job in its simulator, in which a client sends damaged results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare")

CLIENT = """
import torch
import nvflare.client as flare
from model import goal

flare.init()
while flare.is_running():
    params = flare.receive().params
    new = {name: one + 0.5 * (goal()[name] - torch.as_tensor(one)).numpy() for name, one in params.items()}
    flare.send(flare.FLModel(params=new, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""

MODEL = """
import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.fuel.utils import fobs
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(100, 100)

def goal():
    generator = torch.Generator().manual_seed(1)
    return {"weight": torch.randn(100, 100, generator=generator), "bias": torch.ones(100)}

class Last(Filter):
    def __init__(self, folder, spoil=False):
        super().__init__()
        self.folder, self.spoil, self.count = folder, spoil, 0

    def process(self, shareable, fl_ctx):
        name = fl_ctx.get_identity_name()
        with open(f"{self.folder}/sizes/{name}", "a") as file:
            file.write(f"{len(fobs.dumps(shareable))}\\n")
        self.count += 1
        if self.spoil and name == "site-1":
            dxo = from_shareable(shareable)
            if self.count == 2:
                dxo.data["thinwire"] = dxo.data["thinwire"][:-1]
            if self.count == 3:
                dxo.data["thinwire"] = b"garbage"
            if self.count == 4:
                dxo.meta["thinwire"] = 5
            if self.count == 5:
                dxo.data = {}
            shareable = dxo.update_shareable(shareable)
        return shareable
"""

JOB = """
import sys
from pathlib import Path
from model import Last, Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from thinwire.nvflare import compressed

folder = sys.argv[1]
Path(folder, "sizes").mkdir()
recipe = FedAvgRecipe(name="own", model=Net(), min_clients=2, num_rounds=6, train_script="client.py")
compressed(recipe, up="int4", down="int4")
recipe.add_server_output_filter(Last(folder), tasks=["train"])
recipe.add_client_output_filter(Last(folder, spoil=True), tasks=["train"])
recipe.execute(SimEnv(num_clients=2, workspace_root=folder + "/runs"))
"""


@pytest.mark.slow
def test_a_job_goes_on_though_a_client_sends_damaged_results(tmp_path):
    for name, text in (("client", CLIENT), ("model", MODEL), ("job", JOB)):
        (tmp_path / f"{name}.py").write_text(text)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "job.py", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-5000:]
    lines = [line for line in log.splitlines() if "is refused" in line]
    assert len(lines) == 4, lines
    assert all("the result of site-1 is refused: " in line for line in lines)
    (model,) = tmp_path.rglob("FL_global_model.pt")
    found = torch.load(model, weights_only=True)["model"]
    assert (found["weight"] - torch.randn(100, 100, generator=torch.Generator().manual_seed(1))).abs().max() < 0.3
    assert (found["bias"] - 1).abs().max() < 0.02  # six halvings: no refused result counted
    sizes = {file.name: [int(n) for n in file.read_text().split()] for file in (tmp_path / "sizes").iterdir()}
    (tasks,) = (sizes[name] for name in sizes if "site" not in name)
    assert [len(sizes["site-1"]), len(sizes["site-2"]), len(tasks)] == [6, 6, 12]
    assert 5 * max(sizes["site-2"]) < 40_400  # the length of the weights
    assert max(tasks[2:]) < 8_000 < min(tasks[:2]) < 15_000  # steps of 4 bits, after the first tasks of 8
