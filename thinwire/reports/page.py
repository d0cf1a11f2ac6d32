"""A page of chapters, as one HTML file without scripts or external resources, or as Markdown without figures.

It is light or dark as the browser is. Every figure is drawn wide and narrow, and the style sheet shows the one that
fits. Texts and series have a contrast of at least 4.5 to 1, and figures never rely on color alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from thinwire.core.text import html_text as escape, markdown_text as plain
from thinwire.reports import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONG_NAME = 14  # characters of a name above which it may wrap


class Cells(NamedTuple):
    """A table of text: the first `left` columns, aligned to the left, name the row. A folded one opens on a click."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    left: int = 1


class Drawing(NamedTuple):
    """A figure as a function of its width, and its title and note."""

    title: str
    note: str
    draw: Callable[..., Figure]  # width=...


class Headline(NamedTuple):
    """The main result, in one sentence."""

    text: str


Piece = Cells | Drawing | Headline | str


class Chapter(NamedTuple):
    """A heading and its contents; a text that starts with `Note: ` is highlighted."""

    heading: str
    pieces: Sequence[Piece]


def as_html(title: str, chapters: Sequence[Chapter], about: str = "Accuracy") -> str:
    """The page as one HTML file; `about` is what is compared, apart from bytes."""
    body = "\n".join(
        f"<section><h2>{escape(chapter.heading)}</h2>\n"
        + "\n".join(_html(piece, f"{i}-{j}") for j, piece in enumerate(chapter.pieces))
        + "\n</section>"
        for i, chapter in enumerate(chapters)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<header><h1>{escape(title)}</h1><p>{escape(about)} and communication cost.</p></header>\n"
        f"<main>\n{body}\n</main>\n<footer><p>Written by <code>thinwire report</code>.</p></footer>\n</body>\n</html>\n"
    )


def _html(piece: Piece, name: str) -> str:
    if isinstance(piece, str):
        kind = ' class="note"' if piece.startswith("Note: ") else ""
        return f"<p{kind}>{escape(piece)}</p>"
    if isinstance(piece, Headline):
        return f'<p class="lead">{escape(piece.text)}</p>'
    if isinstance(piece, Cells):
        table = table_html(piece)
        return f"<details><summary>{escape(piece.caption)}</summary>{table}</details>" if piece.folded else table
    drawn = (
        f'<div class="{size}">{figures.svg(piece.draw(width=width), piece.title, f"{name}-{size}")}</div>'
        for size, width in (("wide", figures.WIDE), ("narrow", figures.NARROW))
    )
    note = f" <span>{escape(piece.note)}</span>" if piece.note else ""
    return f"<figure><figcaption><b>{escape(piece.title)}.</b>{note}</figcaption>{''.join(drawn)}</figure>"


def table_html(table: Cells) -> str:
    """A table as HTML."""
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
    """The texts and tables of the page, without figures."""
    parts = [f"# {plain(title)}"]
    for chapter in chapters:
        parts.append(f"## {plain(chapter.heading)}")
        parts += [_markdown(piece) for piece in chapter.pieces if not isinstance(piece, Drawing)]
    return "\n\n".join(parts) + "\n"


def _markdown(piece: Cells | Headline | str) -> str:
    if isinstance(piece, str | Headline):
        return plain(piece if isinstance(piece, str) else piece.text)
    cells = [piece.heads, ["---"] * len(piece.heads), *piece.rows]
    table = "\n".join("| " + " | ".join(plain(str(cell)) for cell in row) + " |" for row in cells)
    return f"{plain(piece.caption)}:\n\n{table}"


STYLE = (
    ":root{color-scheme:light dark}"
    + figures.STYLE
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Liberation Sans","DejaVu Sans",sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:1142px;margin:0 auto;padding:0 16px}
header{padding-top:32px}
h1{font-size:1.7rem;line-height:1.2;margin:0}
header p,footer p{color:var(--soft);margin:.25rem 0 0}
footer{padding-bottom:32px}
section{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:20px 24px;margin:20px 0}
h2{font-size:1.2rem;margin:0 0 .5rem}
p{margin:.5rem 0;max-width:75ch}
.note{background:var(--note);padding:8px 12px;border-radius:8px}
figure{margin:16px 0}
figcaption{margin-bottom:6px}
figcaption span{color:var(--soft)}
.lead{font-size:1.15rem;font-weight:600}
svg{display:block;max-width:100%;height:auto}
.narrow{display:none}
.table{overflow-x:auto;margin:16px 0;border:1px solid var(--edge);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;font-weight:600;border-bottom:1px solid var(--edge)}
caption span{display:inline-block;position:sticky;left:0;padding:10px;max-width:min(1000px,calc(100vw - 48px))}
th,td{padding:6px 7px;text-align:right;vertical-align:top}
td{white-space:nowrap}
.words td,.words th{white-space:normal;text-align:left}
.words td{overflow-wrap:anywhere;width:100%}
summary{cursor:pointer;font-weight:600;padding:4px 0}
thead th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--edge);vertical-align:bottom}
tbody tr+tr>*{border-top:1px solid var(--grid)}
th:first-child{text-align:left;white-space:nowrap;position:sticky;left:0;background:var(--card)}
.long-names th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:13em}
.words th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:min(17em,38vw)}
h2+figure{margin-top:8px}
code{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.wide svg{width:100%}
.table{--shade:#0003;background:linear-gradient(to left,var(--card) 40%,transparent) right/48px 100% no-repeat local,
linear-gradient(to left,var(--shade),transparent) right/18px 100% no-repeat scroll}
@media(prefers-color-scheme:dark){.table{--shade:#000b}}
@media(max-width:820px){
.wide{display:none}.narrow{display:block;max-width:480px}.narrow svg{width:100%}
header,main,footer{padding-left:10px;padding-right:10px}header{padding-top:20px}
section{padding:14px 12px;border-radius:10px;margin:12px 0}h1{font-size:1.35rem}
th,td{padding:6px 8px}
.long-names th:first-child{min-width:42vw}
}
@media print{body{background:none}section{break-inside:avoid;border:0;padding:0}}
"""
)
