"""Untrusted text (names, paths, errors of clients) made safe to print: on one line, bounded, no escape codes."""

from __future__ import annotations

from html import escape

LONGEST = 2000  # characters of an error message or a line of a log
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`|*[]"} | {"<": "&lt;"})


def visible(text: str, most: int = LONGEST) -> str:
    """The text on one line: characters that cannot be printed are escaped, long text is shortened in the middle.

    >>> visible("red: \\x1b[31m, two\\nlines, \\u202eturned"), visible("a" * 5000 + "z", 40)
    ('red: \\\\x1b[31m, two\\\\nlines, \\\\u202eturned', 'aaaaaaaa ... (5,001 characters) ... aaaz')
    """
    if len(text) > most:
        middle = f" ... ({len(text):,} characters) ... "
        end = max(0, most - len(middle)) * 2 // 5
        text = text[: max(0, most - len(middle) - end)] + middle + (text[-end:] if end else "")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown_text(text: str) -> str:
    """Escape text for Markdown, also in a table cell: no markup, no HTML, no end of cell or line.

    >>> markdown_text("a|b `c` <script> [x](y)")
    'a\\\\|b \\\\`c\\\\` &lt;script> \\\\[x\\\\](y)'
    """
    return visible(text, len(text)).translate(_MARKDOWN)


def html_text(text: str) -> str:
    """Escape text for HTML and SVG, including characters that HTML does not allow.

    >>> html_text("<b>\\x07")
    '&lt;b&gt;\\\\x07'
    """
    return escape(visible(text, len(text)))


def unfit_for_a_name(name: str, most: int) -> str:
    """Why a text cannot be used as a name, which is printed and becomes part of a file name; "" if it can.

    Args:
        name: the text.
        most: the largest number of bytes in UTF-8.

    >>> unfit_for_a_name("mapo+int8", 80), unfit_for_a_name("../x", 80), unfit_for_a_name("a\\x1b[0m", 80)
    ('', 'it begins with a dot', "it holds '\\\\x1b'")
    """
    if not name.strip():
        return "it is empty"
    if name.startswith("."):
        return "it begins with a dot"
    for character in name:
        if character in "/\\" or not character.isprintable():
            return f"it holds {character!r}"
    if (size := len(name.encode())) > most:
        return f"it has {size:,} bytes, more than {most}"
    return ""
