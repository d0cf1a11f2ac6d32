"""The documentation site: built in strict mode, every link leads somewhere, and code is rendered as code."""

from __future__ import annotations

import logging
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import thinwire as tw
from tools.api_reference import api_pages, signature
from tools.docstrings import to_markdown

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """The links and the anchors of a page, and what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links, self.ids, self.loaded = [], set(), []
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        self.loaded += [given[key] for key in ("src", "href") if key in given and tag in ("script", "img", "link")]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    mkdocs = pytest.importorskip("mkdocs.commands.build", reason="the extra docs is not installed")
    pytest.importorskip("material", reason="the extra docs is not installed")
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site") / "site"
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    modules = set(sys.modules)
    try:
        mkdocs.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
        for name in set(sys.modules) - modules:  # the hooks, which other tests do not expect
            if name.startswith("tools.mkdocs"):
                del sys.modules[name]
    (folder / "warnings").write_text("\n".join(warned))
    return folder


def test_the_site_builds_without_a_warning(site):
    assert (site / "warnings").read_text() == ""
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")}
    assert pages - {"README"} <= built
    assert {f"api/{name}" for name in ("index", "thinwire", "codecs", "methods", "testing")} <= built


def test_every_link_leads_to_a_page_and_an_anchor_and_nothing_is_loaded_from_other_hosts(site):
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    for file, page in pages.items():
        assert not [url for url in page.loaded if urlsplit(url).netloc], file
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or file.name == "404.html":
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path not in ("", ".") else file
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{file.name} links to {link}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].ids, f"{file.name} links to {link}"


def test_the_reference_has_every_public_name():
    pages = api_pages()
    index = pages["api/index.md"]
    for name in tw.__all__:
        assert name == "__version__" or f"[`{name}`](" in index, name
    for target, anchor in re.findall(r"\]\((\w+\.md)#([\w.]+)\)", index):
        assert f"{{#{anchor}}}" in pages[f"api/{target}"], anchor
    assert all(line.strip() != "None" for page in pages.values() for line in page.splitlines())


def test_docstrings_become_markdown():
    text = to_markdown(tw.Method.__doc__)
    assert "- `space`: the coordinates that clients train" in text
    found = to_markdown(
        "One *a*.\n\n    y = x_1\n\n      more\n\nArgs:\n    x: is\n        long.\n    **y: rest.\n\n>>> 1\n1\n"
    )
    lines = ["One \\*a\\*.", "```text\ny = x_1\n\n  more\n```", "- `x`: is\n  long.\n- `**y`: rest."]
    assert found.split("\n\n```pycon\n") == ["\n\n".join(lines), ">>> 1\n1\n```"]
    assert signature("f", lambda a, *, b=1: a) == "f(a, *, b=1)"
