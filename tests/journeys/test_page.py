"""Regression from an own script to a page: scikit-learn's diabetes data, three methods, two seeds."""

from __future__ import annotations

import contextlib
import json
import re
import runpy

import pytest

from tests.browser import CHROMIUM, chromium, open_page, tables_fit

SCRIPT = """
import torch
import thinwire as tw
from sklearn.datasets import load_diabetes

x, y = load_diabetes(return_X_y=True)
inputs = torch.tensor(x, dtype=torch.float32) * 20
targets = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
test, clients = (inputs[:92], targets[:92]), [(inputs[i::10], targets[i::10]) for i in range(92, 102)]
local = tw.Local(epochs=1, batch=8)
for seed in (0, 1):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for method in ("fedavg", "topk", "int8"):
        tw.simulate(
            model, clients, method, rounds=8, test=test, seed=seed, loss="mse", metrics=["r2", "mae"], local=local,
            out=f"runs/{method}-{seed}",
        )
tw.report(["runs"], html="page.html", md="page.md")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The folder of the script after it ran."""
    folder = tmp_path_factory.mktemp("regression")
    (folder / "diabetes.py").write_text(SCRIPT)
    with contextlib.chdir(folder):
        runpy.run_path("diabetes.py")
    return folder


def test_regression_page_speaks_of_r2(project):
    html, text = (project / "page.html").read_text(), (project / "page.md").read_text()
    assert re.search(r"Fewest bytes to reach r2 -?[\d.]+: \w+, [\d.]+ kB in total", html)
    assert "| method | final r2 | best r2 | 95 % interval | mae |" in text
    assert "R2 against bytes, own data" in html
    assert "final %" not in html
    assert "accuracy" not in re.sub("<style>.*?</style>|eval.target_accuracy", "", html, flags=re.S)
    finals = [json.loads(file.read_text())["objective"] for file in sorted(project.glob("runs/fedavg-*/summary.json"))]
    mean = sum(entry["final"] for entry in finals) / 2
    assert f"| fedavg | {mean:.4g} ±" in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (its path can be given in CHROMIUM)")
def test_regression_page_in_a_browser(project):
    pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with chromium() as browser:
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
            context, page = open_page(browser, project / "page.html", width, scheme)
            titles = " ".join(page.locator("figcaption").all_inner_texts())
            assert "R2 against bytes" in titles
            assert "Bytes to reach r2" in titles
            assert width < 1280 or tables_fit(page)
            context.close()
