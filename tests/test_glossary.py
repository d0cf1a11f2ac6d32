"""The glossary: its terms are used, and the first pages explain or link each of them where it first appears."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
TERMS = re.findall(r"^### (.+)$", GLOSSARY.read_text(), re.M)
OTHERS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != GLOSSARY]


def pattern(term: str) -> str:
    """The term with any ending of the plural; a space may be a line break."""
    return r"\b" + re.escape(term.lower()).replace(r"\ ", r"\s+") + r"(?:s|es)?\b"


def prose(page: Path) -> str:
    """The text of a page in lower case, without code, names of pages, and targets of links to other pages."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\((?![^)]*glossary\.md#)[^)]*\)", "]", text).lower()
    return re.sub(r"\[[\w-]+\.md\]", "", text)


def anchor(term: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", term.lower())


@pytest.mark.parametrize("term", TERMS)
def test_terms_are_used_and_say_where(term):
    entry = re.split(r"^#{2,3} ", GLOSSARY.read_text().split(f"### {term}\n")[1], flags=re.M)[0]
    assert "Used in:" in entry
    (link, *_) = re.findall(r"\]\(([^)#]+)", entry.partition("Used in:")[2])
    assert re.search(pattern(term), (ROOT / "docs" / link).read_text().lower()), f"{link} does not use {term!r}"
    assert any(re.search(pattern(term), prose(page)) for page in OTHERS), f"{term!r} is used nowhere"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/quickstart.md"], ids=lambda page: page.name)
def test_terms_are_explained_or_linked_where_they_first_appear(page):
    """In bold, where the sentence explains it, or as a link to its entry."""
    text, unexplained = prose(page), []
    for term in TERMS:
        first = re.search(pattern(term), text)
        if first is None:
            continue
        before, after = text[: first.start()], text[first.end() :]
        bold = before.endswith("**") and after.startswith("**")
        linked = before.endswith("[") and re.match(rf"\]\([^)]*glossary\.md#{anchor(term)}\)", after)
        if not (bold or linked):
            unexplained.append(f"{term}: ...{' '.join((before[-40:] + first[0] + after[:30]).split())}...")
    assert not unexplained, "\n".join(unexplained)
