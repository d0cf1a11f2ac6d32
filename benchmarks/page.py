"""Write one section of a documentation page, and leave the rest of the page unchanged.

    <!-- begin codecs: python benchmarks/bytes/codecs.py --docs docs -->
    the output of the command
    <!-- end codecs -->

The section is found by its name; the command in the mark writes it again. A new section is added at the end of the
page.
"""

from __future__ import annotations

import re
from pathlib import Path


def write_part(page: Path, name: str, text: str, command: str) -> None:
    """Replace the text between the marks of this name.

    >>> import tempfile
    >>> page = Path(tempfile.mkdtemp()) / "page.md"
    >>> _ = page.write_text("# Page\\n\\n<!-- begin a: old -->\\nold\\n<!-- end a -->\\n\\nEnd.\\n")
    >>> write_part(page, "a", "new", "make a")
    >>> page.read_text()
    '# Page\\n\\n<!-- begin a: make a -->\\nnew\\n<!-- end a -->\\n\\nEnd.\\n'
    """
    part = f"<!-- begin {name}: {command} -->\n{text.strip()}\n<!-- end {name} -->"
    before = page.read_text() if page.exists() else ""
    marks = re.compile(rf"<!-- begin {re.escape(name)}: .*? -->.*?<!-- end {re.escape(name)} -->", re.S)
    found = len(marks.findall(before))
    if found > 1 or (f"<!-- begin {name}:" in before and not found):
        raise SystemExit(f"{page} has a section {name!r} without an end, or twice; repair its marks by hand")
    after = marks.sub(lambda _: part, before) if found else f"{before.rstrip()}\n\n{part}\n".lstrip()
    page.write_text(after)
