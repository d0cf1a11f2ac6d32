"""Tables as plain text, for `repr`, and as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.core.text import html_text, visible


class Cells(NamedTuple):
    """Heads and rows of a table; the first `left` columns are aligned to the left.

    >>> print(Cells(("method", "total"), [("fedavg", "4 MB"), ("mapo", "370 kB")]).text())
    method   total
    fedavg    4 MB
    mapo    370 kB
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def text(self) -> str:
        """The table as lines of text."""
        lines = [self.heads, *([visible(cell, 200) for cell in row] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.heads))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < self.left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def html(self) -> str:
        """The table as HTML without a style."""
        heads = "".join(f"<th>{html_text(head)}</th>" for head in self.heads)
        rows = ("".join(f"<td>{html_text(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
