"""Hooks of mkdocs: the API reference, and pages for files of the repository that the documentation links to."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")  # a relative link that leaves the folder of its page
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}

sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from tools.api_reference import api_pages  # noqa: E402


def on_config(config):
    """Make the navigation from the list of pages in `docs/README.md`."""
    config.nav = navigation((ROOT / "docs/README.md").read_text())
    return config


def on_files(files, config):
    """Add the generated pages."""
    for path, text in {**api_pages(), **source_pages(ROOT / "docs")}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links to files outside of `docs` point to their pages."""

    def replaced(match):
        target = _outside(ROOT / "docs" / page.file.src_uri, match[1])
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{_page_of(target)}" if target else match[0]

    return LINK.sub(replaced, markdown)


def navigation(index):
    """The navigation of the site: the sections and pages of the index, then tables of results and the API reference.

    >>> navigation("**Start**\\n\\n- [One](one.md): first.")[1]
    {'Start': [{'One': 'one.md'}]}
    """
    sections = [{"Home": "README.md"}]
    for title, entries in re.findall(r"^\*\*(.+?)\*\*.*\n\n((?:- .*\n?)+)", index, re.M):
        pages = [{name: page} for name, page in re.findall(r"^- \[(.+?)\]\((.+?)\)", entries, re.M)]
        sections.append({title: pages})
    tables = sorted(page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs/results").glob("*.md"))
    modules = sorted(path for path in api_pages() if path != "api/index.md")
    return [*sections, {"Tables of results": tables}, {"Python API": ["api/index.md", *modules]}]


def source_pages(docs):
    """A page with the text of each file outside of `docs` that some page links to."""
    pages = {}
    for page in docs.rglob("*.md"):
        for match in LINK.finditer(page.read_text()):
            if target := _outside(page, match[1]):
                pages[_page_of(target)] = _source_page(target)
    return pages


def _outside(page, link):
    """The file that a link of a page names, if it exists and is not below `docs`."""
    target = (page.parent / link).resolve()
    return target if target.is_file() and ROOT in target.parents and ROOT / "docs" not in target.parents else None


def _page_of(target):
    return f"source/{target.relative_to(ROOT).as_posix()}.md"


def _source_page(target):
    """The text of a file in a fence that is longer than any in it; a page in Markdown as its source."""
    text = target.read_text()
    fence = "`" * (max(map(len, re.findall("`+", text)), default=2) + 1)
    language = LANGUAGES.get(target.suffix, "text")
    title = target.relative_to(ROOT).as_posix()
    return f"---\nsearch:\n  exclude: true\n---\n# {title}\n\n{fence}{language}\n{text}{fence}\n"
