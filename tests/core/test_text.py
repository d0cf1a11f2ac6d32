"""Tests of escaping untrusted text and of names."""

from __future__ import annotations

import unicodedata

import pytest

from thinwire.core.text import html_text, markdown_text, unfit_for_a_name, visible

HOSTILE = ["\x1b[31mred\x1b[0m", "two\nlines", "\r\x07", "\x9b31m", "\u202eturned", "\u2028", "\ud800", "\x7f", "\0"]


@pytest.mark.parametrize("text", HOSTILE)
def test_unprintable_characters_are_escaped(text):
    for shown in (visible(text), markdown_text(text), html_text(text)):
        assert shown.isprintable()
        assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
        shown.encode()
    assert visible(visible(text)) == visible(text)


def test_printable_text_is_unchanged():
    for text in ("mapo+int8", "Größe 10 µ", "日本", "5 % ± 1", ""):
        assert visible(text) == text


def test_long_text_is_shortened_in_the_middle():
    shown = visible("begin" + "x" * 100_000 + "end")
    assert len(shown) == 2000
    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "(100,008 characters)" in shown


@pytest.mark.parametrize("text", ["a|b", "`x`", "<script>", "![x](http://y)", "a\n| b |", "**b**"])
def test_markdown_markup_is_escaped(text):
    shown = markdown_text(text)
    assert "\n" not in shown
    bare = shown.replace("\\\\", "")
    for character in "|`*[]":
        assert bare.count(character) == bare.count(f"\\{character}")
    assert "<" not in shown


@pytest.mark.parametrize("name", ["mapo+int8", "FedAvg (lr 0.1)", "[bold] mine", "a|b", "x" * 120, "日本"])
def test_valid_names_are_accepted(name):
    assert unfit_for_a_name(name, 120) == ""


@pytest.mark.parametrize("name", ["", " ", ".", "..", "../x", "/abs", "a/b", "a\\b", "x" * 121, "日" * 41, *HOSTILE])
def test_invalid_names_are_refused(name):
    assert unfit_for_a_name(name, 120)
