"""The page in a browser, at desktop and phone width: all figures visible, no overlapping text, no requests.

Needs Chromium (`apt-get install chromium`) and `pip install playwright`; skipped otherwise.
"""

from __future__ import annotations

import pytest

import thinwire as tw
from tests.browser import CHROMIUM, chromium, open_page, tables_fit
from thinwire.cli.app import app
from thinwire.cli.search import TOUR

pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (its path can be given in CHROMIUM)"),
    pytest.mark.xdist_group("browser"),  # pages are made once
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The page of `thinwire compare` without a method, with few rounds and two seeds."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["compare", "--rounds", "6", "--seeds", "2", "--set", "local.epochs=1", "--out", str(folder), "--quiet"]
    app(words, standalone_mode=False)
    return folder / "compare.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_demo_page(browser, demo, width):
    for scheme in ("light", "dark"):
        context, page = open_page(browser, demo, width, scheme)
        titles = " ".join(page.locator("figcaption").all_inner_texts())
        for words in ("accuracy against bytes", "accuracy against rounds", "Bytes to reach", "by layer"):
            assert words in titles
        methods = page.locator("table").first.locator("tbody th").all_inner_texts()
        assert methods == list(TOUR)
        context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_page_of_real_runs(browser, real_runs, tmp_path, width):
    tw.report([real_runs], tmp_path / "page.html")
    colors = []
    for scheme in ("light", "dark"):
        context, page = open_page(browser, tmp_path / "page.html", width, scheme)
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        if width == 1280:  # at desktop width no table of a plain comparison needs scrolling
            assert tables_fit(page)
        context.close()
    assert colors[0] != colors[1]


@pytest.mark.parametrize("width", [1280, 360])
def test_page_with_many_long_names(browser, write_run, tmp_path, width):
    layers = [{"layer": f"encoder.layer.{i}.attention.self.query", "bytes_up": 4**i, "syncs": 1} for i in range(12)]
    for i in range(9):
        name = "fedavg" if i == 0 else f"method-number-{i}+with-a-very-long-name+int8"
        for seed in (0, 1):
            options = {"best": 0.99 - 0.004 * i, "up": 10 ** (3 + i % 7), "catchup": 10 ** (2 + i % 7)}
            write_run(name, seed=seed, layers=layers if i < 2 else None, **options)
    tw.report([tmp_path / "runs"], tmp_path / "page.html", targets=[0.3, 0.9, 0.91, 0.96])
    context, page = open_page(browser, tmp_path / "page.html", width)
    assert width < 1280 or tables_fit(page)
    context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_page_with_every_column(browser, write_run, tmp_path, width):
    """Metrics, client quantiles, failed runs and settings of a sweep, in both modes."""
    clients = {"count": 20, "mean": 0.8, "worst_10": 0.31, "p10": 0.4, "p50": 0.85, "p90": 0.95}
    metrics = {"macro_f1": 0.7, "balanced_accuracy": 0.6, "a_metric_of_ones_own": 12345.0}
    for lr in (0.001, 0.01, 0.1, 1.0):
        for seed in (0, 1, 2):
            name = "fedavg" if lr < 1 else "another-method+with-a-long-name+int8"
            options = {"metrics": metrics, "clients_eval": clients, "best": 0.9 - lr / 4, "up": 12345678}
            write_run(name, seed=seed, lr=lr, folder=f"runs-{lr}", **options)
    tw.report(sorted(tmp_path.glob("runs-*")), tmp_path / "page.html")
    for scheme in ("light", "dark"):
        context, page = open_page(browser, tmp_path / "page.html", width, scheme)
        assert "Test accuracy against bytes" in " ".join(page.locator("figcaption").all_inner_texts())
        context.close()


@pytest.mark.parametrize(("rounds", "up"), [(1, 10**12), (1000, 3)], ids=["terabytes", "long"])
def test_page_of_extreme_runs(browser, write_run, tmp_path, rounds, up):
    tw.report([write_run("a", rounds=rounds, up=up)], tmp_path / "page.html", targets=[0.5])
    for width in (1280, 390):
        context, _ = open_page(browser, tmp_path / "page.html", width)
        context.close()
