"""The page in a browser, at desktop and phone width: all figures visible, no overlapping text, no requests.

Needs Chromium (`apt-get install chromium`) and `pip install playwright`; skipped otherwise.
"""

from __future__ import annotations

import os
import shutil

import pytest

import thinwire as tw
from thinwire.cli.app import TOUR, app

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (its path can be given in CHROMIUM)")

# Texts of each visible chart that overlap another text, or are partly outside the chart.
CLASHES = """() => {
  const bad = [];
  for (const svg of document.querySelectorAll('svg[role=img]')) {
    const chart = svg.getBoundingClientRect();
    if (chart.width === 0) continue;
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([words, a], i) => {
      if (a.left < chart.left - 1 || a.right > chart.right + 1 || a.top < chart.top - 1 || a.bottom > chart.bottom + 1)
        bad.push(`${svg.querySelector('title').textContent}: '${words}' is partly outside`);
      for (const [other, b] of texts.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
          bad.push(`${svg.querySelector('title').textContent}: '${words}' over '${other}'`);
    });
  }
  return bad;
}"""
# For each figure: number of visible drawings (of two), width of the visible one, and size of its smallest text.
FIGURES = """() => [...document.querySelectorAll('figure')].map(f => {
  const visible = [...f.querySelectorAll('svg[role=img]')].filter(s => s.checkVisibility());
  const sizes = visible.flatMap(s => [...s.querySelectorAll('text')].map(t =>
    parseFloat(getComputedStyle(t).fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width));
  return [visible.length, visible[0]?.getBoundingClientRect().width, Math.min(...sizes)];
})"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, file, width, scheme="light"):
    """Open the page and check what must hold for every page."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, errors, requests = context.new_page(), [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert errors == []
    assert requests == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLASHES) == []
    figures = page.evaluate(FIGURES)
    assert figures
    for visible, wide, smallest in figures:
        assert visible == 1
        assert wide >= min(0.7 * width, 480)
        assert smallest >= 11
    return context, page


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
        for words in ("accuracy against bytes", "accuracy against rounds", "Bytes to reach", "Time to", "by layer"):
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
            assert page.evaluate("[...document.querySelectorAll('.table')].every(t => t.scrollWidth <= t.clientWidth)")
        context.close()
    assert colors[0] != colors[1]


@pytest.mark.parametrize("width", [1280, 820, 390, 360])
def test_page_with_many_long_names(browser, write_run, tmp_path, width):
    layers = [{"layer": f"encoder.layer.{i}.attention.self.query", "bytes_up": 4**i, "syncs": 1} for i in range(12)]
    for i in range(9):
        name = "fedavg" if i == 0 else f"method-number-{i}+with-a-very-long-name+int8"
        for seed in (0, 1):
            options = {"best": 0.99 - 0.004 * i, "up": 10 ** (3 + i % 7), "catchup": 10 ** (2 + i % 7)}
            write_run(name, seed=seed, layers=layers if i < 2 else None, **options)
    tw.report([tmp_path / "runs"], tmp_path / "page.html", targets=[0.3, 0.9, 0.91, 0.96])
    context, _ = open_page(browser, tmp_path / "page.html", width)
    context.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("rounds", "up"), [(1, 1), (2, 10**12), (1000, 3)], ids=["one-round", "terabytes", "long"])
def test_page_of_extreme_runs(browser, write_run, tmp_path, width, rounds, up):
    tw.report([write_run("a", rounds=rounds, up=up)], tmp_path / "page.html", targets=[0.5])
    context, _ = open_page(browser, tmp_path / "page.html", width)
    context.close()
