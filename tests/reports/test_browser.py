"""The page in a real browser, on a desk and on a phone: all figures there, no text over text, nothing loaded.

Needs Chromium (`apt-get install chromium`) and `pip install playwright`; skipped without.
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
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium on this machine (or name it in CHROMIUM)"
)

# Texts of each visible chart whose boxes overlap, or that reach out of their chart.
CLASHES = """() => {
  const bad = [];
  for (const svg of document.querySelectorAll('svg[role=img]')) {
    const basis = svg.getBoundingClientRect();
    if (basis.width === 0) continue;
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([words, a], i) => {
      if (a.left < basis.left - 1 || a.right > basis.right + 1 || a.top < basis.top - 1 || a.bottom > basis.bottom + 1)
        bad.push(`${svg.querySelector('title').textContent}: '${words}' reaches out`);
      for (const [other, b] of texts.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
          bad.push(`${svg.querySelector('title').textContent}: '${words}' over '${other}'`);
    });
  }
  return bad;
}"""
# For each figure: how many of its two drawings are seen, how wide that one is, and how large its smallest text.
FIGURES = """() => [...document.querySelectorAll('figure')].map(f => {
  const seen = [...f.querySelectorAll('svg[role=img]')].filter(s => s.checkVisibility());
  const sizes = seen.flatMap(s => [...s.querySelectorAll('text')].map(t =>
    parseFloat(getComputedStyle(t).fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width));
  return [seen.length, seen[0]?.getBoundingClientRect().width, Math.min(...sizes)];
})"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def look(browser, file, width, scheme="light"):
    """Open the page, gather what went wrong, and check what must hold for any page."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, troubles, requests = context.new_page(), [], []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert troubles == []
    assert requests == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLASHES) == []
    figures = page.evaluate(FIGURES)
    assert figures
    for seen, wide, smallest in figures:
        assert seen == 1
        assert wide >= min(0.7 * width, 480)
        assert smallest >= 11
    return context, page


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The page that `thinwire compare` writes when it is given no method, of fewer rounds and two seeds."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["compare", "--rounds", "6", "--seeds", "2", "--set", "local.epochs=1", "--out", str(folder), "--quiet"]
    app(words, standalone_mode=False)
    return folder / "compare.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_demo_looks_right(browser, demo, width):
    for scheme in ("light", "dark"):
        context, page = look(browser, demo, width, scheme)
        titles = " ".join(page.locator("figcaption").all_inner_texts())
        for words in ("accuracy against bytes", "accuracy against rounds", "Bytes to reach", "Time to", "by layer"):
            assert words in titles
        named = page.locator("table").first.locator("tbody th").all_inner_texts()
        assert named == list(TOUR)
        context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_real_runs_look_right(browser, real_runs, tmp_path, width):
    tw.report([real_runs], tmp_path / "page.html")
    colours = []
    for scheme in ("light", "dark"):
        context, page = look(browser, tmp_path / "page.html", width, scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        if width == 1280:  # on a desk no table of a plain comparison has to be pushed sideways
            assert page.evaluate("[...document.querySelectorAll('.table')].every(t => t.scrollWidth <= t.clientWidth)")
        context.close()
    assert colours[0] != colours[1]


@pytest.mark.parametrize("width", [1280, 820, 390, 360])
def test_many_lines_with_long_names_look_right(browser, write_run, tmp_path, width):
    layers = [{"layer": f"encoder.layer.{i}.attention.self.query", "bytes_up": 4**i, "syncs": 1} for i in range(12)]
    for i in range(9):
        name = "fedavg" if i == 0 else f"method-number-{i}+with-a-very-long-name+int8"
        for seed in (0, 1):
            options = {"best": 0.99 - 0.004 * i, "up": 10 ** (3 + i % 7), "catchup": 10 ** (2 + i % 7)}
            write_run(name, seed=seed, layers=layers if i < 2 else None, **options)
    tw.report([tmp_path / "runs"], tmp_path / "page.html", targets=[0.3, 0.9, 0.91, 0.96])
    context, _ = look(browser, tmp_path / "page.html", width)
    context.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("rounds", "up"), [(1, 1), (2, 10**12), (1000, 3)], ids=["one-round", "terabytes", "long"])
def test_extreme_runs_look_right(browser, write_run, tmp_path, width, rounds, up):
    tw.report([write_run("a", rounds=rounds, up=up)], tmp_path / "page.html", targets=[0.5])
    context, _ = look(browser, tmp_path / "page.html", width)
    context.close()
