"""A page of chapters, written as one file of HTML that loads nothing, or as Markdown without its charts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from thinwire.core.text import html_text as escape
from thinwire.core.text import markdown_text as plain
from thinwire.core.text import visible
from thinwire.reports.style import STYLE


class Grid(NamedTuple):
    """A table: its caption, its heads, its rows; the first column names the row. A folded one opens on a click."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


class Figure(NamedTuple):
    """A chart in both widths, what it shows, and its legend: (picture, words)."""

    title: str
    note: str
    wide: str
    narrow: str
    legend: Sequence[tuple[str, str]] = ()


class Command(NamedTuple):
    """Something to type."""

    text: str


Piece = Grid | Figure | Command | str


class Chapter(NamedTuple):
    """A heading and what stands under it."""

    heading: str
    pieces: Sequence[Piece]


def as_html(title: str, chapters: Sequence[Chapter]) -> str:
    """One page that loads nothing."""
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
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<header><h1>{escape(title)}</h1><p>Accuracy, and what it cost to send.</p></header>\n"
        f"<main>\n{body}\n</main>\n"
        "<footer><p>Written by <code>thinwire report</code>.</p></footer>\n</body>\n</html>\n"
    )


def _html(piece: Piece) -> str:
    if isinstance(piece, str):
        kind = "note" if piece.startswith("Note: ") else "lead" if piece.startswith("Cheapest") else ""
        return f'<p class="{kind}">{escape(piece)}</p>' if kind else f"<p>{escape(piece)}</p>"
    if isinstance(piece, Command):
        lines = "\n".join(f"<code>{escape(line)}</code>" for line in piece.text.splitlines())
        return f'<pre tabindex="0">{lines}</pre>'
    if isinstance(piece, Grid) and piece.folded:
        return f"<details><summary>{escape(piece.caption)}</summary>{_html(piece._replace(folded=False))}</details>"
    if isinstance(piece, Grid):
        kind = ' class="words"' if len(piece.heads) == 2 else ""
        kind = kind or (' class="long-names"' if any(len(row[0]) > 14 for row in piece.rows) else "")
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in piece.heads)
        rows = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in piece.rows
        )
        return (
            f'<div class="table" role="region" tabindex="0" aria-label="{escape(piece.caption)}"><table{kind}>'
            f"<caption><span>{escape(piece.caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )
    legend = "".join(f"<li>{picture}{escape(words)}</li>" for picture, words in piece.legend)
    note = f" <span>{escape(piece.note)}</span>" if piece.note else ""
    return (
        f"<figure><figcaption><b>{escape(piece.title)}.</b>{note}</figcaption>"
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + f'<div class="wide">{piece.wide}</div><div class="narrow">{piece.narrow}</div></figure>'
    )


def as_markdown(title: str, chapters: Sequence[Chapter]) -> str:
    """The same words and tables, without charts."""
    out = [f"# {plain(title)}"]
    for chapter in chapters:
        out.append(f"## {plain(chapter.heading)}")
        for piece in chapter.pieces:
            if isinstance(piece, str):
                out.append(plain(piece))
            elif isinstance(piece, Command):
                lines = (visible(line, len(line)) for line in piece.text.split("\n"))
                fence = "`" * max(3, 1 + max(map(len, re.findall("`+", piece.text)), default=0))
                out.append("\n".join((fence, *lines, fence)))
            elif isinstance(piece, Grid):
                cells = [piece.heads, ["---"] * len(piece.heads), *piece.rows]
                table = "\n".join("| " + " | ".join(plain(str(cell)) for cell in row) + " |" for row in cells)
                out.append(f"{plain(piece.caption)}:\n\n{table}")
    return "\n\n".join(out) + "\n"
