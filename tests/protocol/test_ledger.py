"""The ledger: entries of each version, snapshots of past windows, and its size limit."""

import pytest
from hypothesis import given, strategies as st

from thinwire.protocol.ledger import Ledger

names = st.frozensets(st.sampled_from("abcd"))
rounds_of = st.lists(st.tuples(st.binary(min_size=1, max_size=9), names), max_size=14)


def filled(rounds, every, limit, longest, end):
    ledger = Ledger()
    for version, (body, planned) in enumerate(rounds, 1):
        closes = every and version % every == 0
        ledger = ledger.append(body, planned, limit=limit, longest=longest, end=end if closes else None)
    return ledger


@given(rounds_of, st.integers(0, 5), st.integers(0, 60), st.integers(0, 30), st.integers(1, 20))
def test_past_windows_are_sent_in_the_fewest_bytes(rounds, every, limit, longest, length):
    end = b"e" * length
    ledger = filled(rounds, every, limit, longest, end)
    now, opened = len(rounds), len(rounds) // every * every if every else 0
    assert (ledger.version, ledger.opened) == (now, opened)
    for version in range(opened):
        way = ledger.past_way(version)
        assert (way is None) == (version < ledger.first)
        if way is None:
            continue
        expected = 0
        for start in range(version // every * every, opened, every):
            missed = [body for body, _ in rounds[max(start, version) : start + every]]
            entries = sum(map(len, missed))
            expected += min(entries, length)
        spent = sum(map(len, way))
        # entries beyond the limit of the open window are dropped; then the snapshot is sent, even if it is longer
        assert spent == expected if longest >= length else spent >= expected
    for version in range(opened, now + 1):
        assert ledger.past_way(version) == ()
        since = ledger.since(version)
        missed = [body for body, _ in rounds[version:]]
        assert since is None or list(since) == missed
        if sum(map(len, missed)) <= longest or version >= now - 1:
            assert since is not None, "an entry within the limit was dropped"


@given(rounds_of, st.integers(0, 4), st.integers(0, 40), st.integers(1, 9))
def test_a_ledger_is_bounded_and_keeps_the_last_version_of_each_block(rounds, every, limit, length):
    ledger = filled(rounds, every, limit, 12, b"e" * length)
    for version in range(len(rounds) + 1):
        assert ledger.synced_since(version) == frozenset().union(*(planned for _, planned in rounds[version:]))
    kept = sum(window.size for window in ledger.past) + sum(map(len, ledger.entries))
    newest = 9 if ledger.entries else max((window.size for window in ledger.past[-1:]), default=0)
    assert kept <= max(limit, 12 + newest)
    assert kept <= limit or len(ledger.past) <= 1
    for one, two in zip(ledger.past, ledger.past[1:], strict=False):
        assert one.until == two.since
        assert not one.end or sum(map(len, one.entries)) < len(one.end)


def test_a_window_is_sent_as_its_snapshot_once_that_is_shorter():
    ledger = filled(
        [(b"one", frozenset("a")), (b"two", frozenset("a")), (b"three", frozenset("a"))], 3, 99, 99, b"total"
    )
    assert ledger.past_way(0) == (b"total",)
    assert ledger.past_way(1) == (b"total",)  # two + three are longer
    assert ledger.past_way(2) == (b"total",)  # equally long: the entry is not kept
    ledger = filled([(b"a", frozenset()), (b"b", frozenset()), (b"c", frozenset())], 3, 99, 99, b"total")
    assert [ledger.past_way(v) for v in range(3)] == [(b"a", b"b", b"c"), (b"b", b"c"), (b"c",)]
    assert ledger.past[0].end == b""


def test_the_newest_entry_is_kept_at_any_length():
    ledger = Ledger().append(b"long entry", frozenset("a"), limit=3, longest=3)
    assert ledger.since(0) == (b"long entry",)
    ledger = ledger.append(b"another long entry", frozenset("b"), limit=3, longest=3)
    assert ledger.since(0) is None
    assert ledger.since(1) == (b"another long entry",)


def test_append_does_not_change_the_old_ledger():
    first = Ledger().append(b"x", frozenset("a"), limit=9, longest=9)
    first.append(b"y", frozenset("b"), limit=9, longest=9, end=b"xy")
    assert (first.entries, first.past, dict(first.synced), first.opened) == ((b"x",), (), {"a": 1}, 0)


@pytest.mark.parametrize("first", [0, 5])
def test_the_current_version_has_missed_nothing(first):
    ledger = Ledger(first, first)
    assert ledger.since(first) == ledger.past_way(first) == ()
    assert ledger.synced_since(first) == frozenset()
    assert ledger.past_way(first - 1) is None
