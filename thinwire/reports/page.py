"""A page of chapters, as one HTML file without external resources, or as Markdown without charts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from thinwire.core.text import html_text as escape
from thinwire.core.text import markdown_text as plain
from thinwire.core.text import visible
from thinwire.reports.style import STYLE

LONG_NAME = 14  # characters of a name above which it may wrap


class Table(NamedTuple):
    """Caption, column heads and rows of a table; the first column names the row. A folded table opens on a click."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


class Figure(NamedTuple):
    """A chart in both widths, its title and note, and its legend: pairs of a swatch and a label."""

    title: str
    note: str
    wide: str
    narrow: str
    legend: Sequence[tuple[str, str]] = ()


class Lead(NamedTuple):
    """The main result, in one sentence."""

    text: str


class Command(NamedTuple):
    """Shell commands."""

    text: str


Piece = Table | Figure | Command | Lead | str


class Chapter(NamedTuple):
    """A heading and its contents; a text that starts with `Note: ` is highlighted."""

    heading: str
    pieces: Sequence[Piece]


def as_html(title: str, chapters: Sequence[Chapter], about: str = "Accuracy", refresh: int = 0) -> str:
    """The page as one HTML file.

    Args:
        title: its title.
        chapters: its contents.
        about: what is compared, apart from bytes.
        refresh: seconds after which a browser loads it again; 0 for never. Such a page is that of `thinwire watch`.
    """
    body = "\n".join(
        f"<section><h2>{escape(chapter.heading)}</h2>\n" + "\n".join(map(_html, chapter.pieces)) + "\n</section>"
        for chapter in chapters
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n'
        + (f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else "")
        + f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<header><h1>{escape(title)}</h1><p>{escape(about)} and communication cost.</p></header>\n"
        f"<main>\n{body}\n</main>\n"
        f"<footer><p>Written by <code>thinwire {'watch' if refresh else 'report'}</code>.</p></footer>\n"
        "</body>\n</html>\n"
    )


def _html(piece: Piece) -> str:
    if isinstance(piece, str):
        kind = ' class="note"' if piece.startswith("Note: ") else ""
        return f"<p{kind}>{escape(piece)}</p>"
    if isinstance(piece, Lead):
        return f'<p class="lead">{escape(piece.text)}</p>'
    if isinstance(piece, Command):
        lines = "\n".join(f"<code>{escape(line)}</code>" for line in piece.text.splitlines())
        return f'<pre tabindex="0">{lines}</pre>'
    if isinstance(piece, Table) and piece.folded:
        return f"<details><summary>{escape(piece.caption)}</summary>{_html(piece._replace(folded=False))}</details>"
    if isinstance(piece, Table):
        return _table_html(piece)
    legend = "".join(f"<li>{swatch}{escape(label)}</li>" for swatch, label in piece.legend)
    note = f" <span>{escape(piece.note)}</span>" if piece.note else ""
    return (
        f"<figure><figcaption><b>{escape(piece.title)}.</b>{note}</figcaption>"
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + f'<div class="wide">{piece.wide}</div><div class="narrow">{piece.narrow}</div></figure>'
    )


def _table_html(table: Table) -> str:
    kind = ' class="words"' if len(table.heads) == 2 else ""
    kind = kind or (' class="long-names"' if any(len(row[0]) > LONG_NAME for row in table.rows) else "")
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.heads)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(table.caption)}"><table{kind}>'
        f"<caption><span>{escape(table.caption)}</span></caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def as_markdown(title: str, chapters: Sequence[Chapter], about: str = "") -> str:
    """The texts and tables of the page, without charts."""
    parts = [f"# {plain(title)}"]
    for chapter in chapters:
        parts.append(f"## {plain(chapter.heading)}")
        parts += [_markdown(piece) for piece in chapter.pieces if not isinstance(piece, Figure)]
    return "\n\n".join(parts) + "\n"


def _markdown(piece: Table | Command | Lead | str) -> str:
    if isinstance(piece, str):
        return plain(piece)
    if isinstance(piece, Lead):
        return plain(piece.text)
    if isinstance(piece, Command):
        lines = (visible(line, len(line)) for line in piece.text.split("\n"))
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", piece.text)), default=0))
        return "\n".join((fence, *lines, fence))
    cells = [piece.heads, ["---"] * len(piece.heads), *piece.rows]
    table = "\n".join("| " + " | ".join(plain(str(cell)) for cell in row) + " |" for row in cells)
    return f"{plain(piece.caption)}:\n\n{table}"
