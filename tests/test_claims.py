"""Numbers in the prose of the documentation come from somewhere, and are what that says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.claims import Table, claims, paragraphs

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#]*(?:results/[a-z0-9-]+|reproduction)\.md)")
SOURCE = re.compile(r"`(thinwire|python) |tests/\w+|paper's")  # the command, the test or the paper a number is from


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/methods").glob("*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_number_in_prose_can_be_traced(page):
    """Accuracies and bytes are found in the tables that their paragraph links to; others name where they are from."""
    beside = page.with_suffix(".json").exists()  # its tables are those of that file, which another test holds
    for words in paragraphs(page.read_text()):
        named = re.match(r"\||#|!\[|\*\*.*?\*\* \(\d+ rounds", words)  # a table, or what one is of
        made = [] if beside and named else claims(words)
        tables = [page.parent / target for target in re.findall(LINK, words)]
        if made and tables:
            known = Table(tables)
            lost = [" ".join(claim) for claim in made if not known.holds(*claim)]
            assert not lost, f"{page.name}: no run of {[t.stem for t in tables]} gives {lost}: {words[:90]}..."
        elif made:
            assert SOURCE.search(words), f"{page.name}: where are {made} from? {words[:90]}..."


def test_a_number_that_no_run_gives_is_found_out():
    table = Table([ROOT / "docs/results/bytes-fashion.md"])
    assert table.holds("1.37", "MB")
    assert not table.holds("1.38", "MB")
    assert not table.holds("1.37", "kB")
    assert table.holds("80.50", "%")
    assert not table.holds("80.52", "%")
    ratios = Table([ROOT / "docs/results/mapo-fashion.md"])
    assert ratios.holds("95.3", "%")
    assert not ratios.holds("95.4", "%")
    assert claims("grew to 12.5 s; see `x = 80 %` and [a](b.md)") == []
    assert claims("81.7 ± 1.3 against 79.1 ± 0.3, then 80 % and 102 MB") == [
        ("80", "%"),
        ("102", "MB"),
        ("81.7", "%"),
        ("79.1", "%"),
    ]
