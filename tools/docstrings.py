"""Docstrings of this project as Markdown: sections as lists, indented blocks and examples as code."""

from __future__ import annotations

import inspect
import re

SECTION = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Examples?|Notes?):$")
ENTRY = re.compile(r"(\*{0,2}[\w., ]+?)(?: \(.*?\))?: (.*)")  # `name: text`, the first line of an entry of a section


def to_markdown(docstring: str | None) -> str:
    """Convert a docstring to Markdown.

    >>> print(to_markdown("Add one.\\n\\n    y = x + 1\\n\\nArgs:\\n    x: a value.\\n\\n>>> add(1)\\n2"))
    Add one.
    <BLANKLINE>
    ```text
    y = x + 1
    ```
    <BLANKLINE>
    - `x`: a value.
    <BLANKLINE>
    ```pycon
    >>> add(1)
    2
    ```
    """
    parts, rest = [], inspect.cleandoc(docstring or "").splitlines()
    while rest:
        if not rest[0].strip():
            rest.pop(0)
        elif SECTION.match(rest[0]):
            parts.append(_section(_take(rest, 1, lambda line: not line or line.startswith("    "))))
        elif rest[0].startswith(">>>"):
            parts.append(_fenced("pycon", _take(rest, 0, bool)))
        elif rest[0].startswith("    "):
            block = _take(rest, 0, lambda line: not line or line.startswith("    "))
            parts.append(_fenced("text", inspect.cleandoc("\n" + "\n".join(block)).splitlines()))
        else:
            lines = _take(rest, 0, lambda line: bool(line) and not line.startswith((">>>", "    ")))
            parts.append("\n".join(escaped(line) for line in lines))
    return "\n\n".join(part for part in parts if part)


def first_sentence(docstring: str | None) -> str:
    """The first paragraph of a docstring up to its first period, as Markdown on one line.

    >>> first_sentence("A mean of *all* values. More.")
    'A mean of \\\\*all\\\\* values.'
    """
    paragraph = " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())
    return escaped(re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0])


def escaped(line: str) -> str:
    """Text with the characters of Markdown and HTML escaped outside of code."""
    spans = re.split(r"(`[^`]*`)", line)
    return "".join(span if span.startswith("`") else re.sub(r"([\\*_<>\[\]|])", r"\\\1", span) for span in spans)


def _take(lines: list[str], skip: int, wanted) -> list[str]:
    """Remove the first lines that are wanted, and those before them that are skipped; return the wanted ones."""
    del lines[:skip]
    taken = []
    while lines and wanted(lines[0]):
        taken.append(lines.pop(0))
    return taken


def _fenced(language: str, lines: list[str]) -> str:
    """A fenced block; blank lines at its end are removed."""
    return "\n".join([f"```{language}", *"\n".join(lines).rstrip().splitlines(), "```"])


def _section(lines: list[str]) -> str:
    """A section: its entries as a list, any other text as a docstring of its own."""
    text = inspect.cleandoc("\n" + "\n".join(lines))
    if text and not all(ENTRY.match(line) for line in text.splitlines() if line and not line.startswith(" ")):
        return to_markdown(text)
    items = []
    for line in filter(None, text.splitlines()):
        if found := ENTRY.match(line):
            items.append(f"- `{found[1]}`: {escaped(found[2])}")
        else:
            items.append(f"  {escaped(line.strip())}")
    return "\n".join(items)
