"""Text from outside (names, paths, errors of clients), made safe to show: on one line, bounded, no escape codes."""

from __future__ import annotations

from html import escape

LONGEST = 2000  # characters of an error or a line of a log
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`|*[]"} | {"<": "&lt;"})


def visible(text: str, most: int = LONGEST) -> str:
    """The text on one line: what cannot be printed is written as an escape, what is too long is cut in the middle.

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
    """The text as Markdown that shows it, in a cell of a table too: no markup, no HTML, no end of a cell or line.

    >>> markdown_text("a|b `c` <script> [x](y)")
    'a\\\\|b \\\\`c\\\\` &lt;script> \\\\[x\\\\](y)'
    """
    return visible(text, len(text)).translate(_MARKDOWN)


def html_text(text: str) -> str:
    """The text as HTML and SVG that show it; characters that no page may hold stand as escapes.

    >>> html_text("<b>\\x07")
    '&lt;b&gt;\\\\x07'
    """
    return escape(visible(text, len(text)))


def unfit_for_a_name(name: str, most: int) -> str:
    """Why a text cannot name something that is shown and becomes part of a file's name; "" if it can.

    Args:
        name: the text.
        most: how many bytes it may have in UTF-8.

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
