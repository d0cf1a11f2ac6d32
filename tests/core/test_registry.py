"""Tests of the registry of parts."""

import pytest

from thinwire.core import registry
from thinwire.core.registry import entries, lookup, name_of, register
from thinwire.errors import ConfigError, UnknownName
from thinwire.spaces import Full


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(registry, "_TABLE", {kind: dict(part) for kind, part in registry._TABLE.items()})


@pytest.mark.parametrize(
    "kind",
    ["space", "sketch", "schedule", "codec", "optimizer", "correction", "privacy", "client_weight", "aggregator"],
)
def test_all_parts_have_a_one_line_summary(kind):
    parts = entries(kind)
    assert parts
    assert list(parts) == sorted(parts)
    for name, entry in parts.items():
        assert (entry.kind, entry.name) == (kind, name)
        assert entry.doc, f"{kind} {name} has no docstring"
        assert "\n" not in entry.doc


def test_lookup_and_name_of_are_inverse():
    assert lookup("space", "full").make is Full
    assert name_of("space", Full()) == "full"
    assert name_of("space", object()) is None


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownName, match=r"unknown space 'fulll': did you mean 'full'\? Known: .*full"):
        lookup("space", "fulll")
    with pytest.raises(ConfigError, match="unknown kind of part 'spaces': did you mean 'space'"):
        entries("spaces")


def test_a_part_registered_twice_is_refused(table):
    @register("space", "mine")
    class Mine:
        """First."""

    with pytest.raises(ValueError, match="space 'mine' is already registered"):

        @register("space", "mine")
        class Other:
            """Second."""

    assert lookup("space", "mine").make is Mine


def test_a_part_of_the_same_class_name_in_another_module_is_refused(table):
    first, second = (type("Mine", (), {"__module__": module}) for module in ("one", "two"))
    register("space", "mine")(first)
    with pytest.raises(ValueError, match="already registered"):
        register("space", "mine")(second)


def test_a_reloaded_module_may_register_its_parts_again(table):
    first, second = (type("Mine", (), {"__module__": "one", "__doc__": "Line one.\nLine two."}) for _ in range(2))
    register("space", "mine")(first)
    register("space", "mine", paper="Someone, 2020")(second)
    entry = lookup("space", "mine")
    assert entry.make is second
    assert (entry.doc, entry.paper) == ("Line one.", "Someone, 2020")
