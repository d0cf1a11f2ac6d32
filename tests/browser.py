"""The page in Chromium: what must hold for every page, at any width, in light and dark mode.

Needs Chromium (`apt-get install chromium`; its path can be given in `CHROMIUM`) and `pip install playwright`.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

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
# Tables that cannot be read to their last column: neither fit nor scroll, or whose first column hides the others.
TABLES = """() => [...document.querySelectorAll('.table')].flatMap(t => {
  const name = t.querySelector('caption').textContent, bad = [];
  const scrolls = ['auto', 'scroll'].includes(getComputedStyle(t).overflowX);
  if (t.scrollWidth > t.clientWidth && !scrolls) bad.push(`${name}: cut`);
  t.scrollLeft = t.scrollWidth;
  const box = t.getBoundingClientRect();
  for (const row of t.querySelectorAll('tr')) {
    const first = row.firstElementChild.getBoundingClientRect(), last = row.lastElementChild.getBoundingClientRect();
    if (last.right > box.right + 1 || (row.children.length > 1 && first.right > last.left + 1))
      bad.push(`${name}: '${row.lastElementChild.textContent}' cannot be seen`);
  }
  for (const cell of t.querySelectorAll('th, td'))
    if (cell.scrollWidth > cell.clientWidth + 1) bad.push(`${name}: '${cell.textContent}' is cut`);
  t.scrollLeft = 0;
  return bad;
})"""
# The size of the smallest text outside charts.
SMALLEST = """() => Math.min(...[...document.querySelectorAll('p, li, th, td, caption, figcaption, code, h1, h2')]
  .filter(e => e.checkVisibility()).map(e => parseFloat(getComputedStyle(e).fontSize)))"""


@contextmanager
def chromium():
    """Chromium for the length of a `with` block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as starter:
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
    assert not (found := page.evaluate(CLASHES)), found
    assert not (found := page.evaluate(TABLES)), found
    assert page.evaluate(SMALLEST) >= 11
    figures = page.evaluate(FIGURES)
    assert figures
    for visible, wide, smallest in figures:
        assert visible == 1
        assert wide >= min(0.7 * width, 480)
        assert smallest >= 11
    return context, page


def tables_fit(page):
    """Whether no table needs scrolling."""
    return page.evaluate("[...document.querySelectorAll('.table')].every(t => t.scrollWidth <= t.clientWidth)")
