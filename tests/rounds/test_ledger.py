"""What each version added, and what is no longer kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.rounds.ledger import Ledger

names = st.frozensets(st.sampled_from("abcd"))


@given(st.lists(st.tuples(st.binary(max_size=9), names, st.booleans()), max_size=12), st.integers(0, 40))
def test_a_ledger_keeps_the_newest_entries_and_the_time_of_each_block(rounds, limit):
    ledger = Ledger()
    for body, planned, merge in rounds:
        ledger = ledger.append(body, planned, limit=limit, merge=merge)
    now = len(rounds)
    assert ledger.version == now
    for version in range(now + 1):
        since = ledger.since(version)
        missed = [body for body, _, _ in rounds[version:]]
        assert since is None or list(since) == missed
        if sum(map(len, missed)) <= limit or version >= now - 1:
            assert since is not None, "an entry within the limit was dropped"
        assert ledger.touched(version) == frozenset().union(*(planned for _, planned, _ in rounds[version:]))
    kept = sum(map(len, ledger.entries))
    assert kept <= limit or len(ledger.entries) == 1
    assert ledger.merged == max((i + 1 for i, (_, _, merge) in enumerate(rounds) if merge), default=0)


def test_the_newest_entry_stays_however_long_it_is():
    ledger = Ledger().append(b"long entry", frozenset("a"), limit=3)
    assert ledger.since(0) == (b"long entry",)
    ledger = ledger.append(b"another long entry", frozenset("b"), limit=3)
    assert ledger.since(0) is None
    assert ledger.since(1) == (b"another long entry",)


def test_append_leaves_the_old_ledger_as_it_was():
    first = Ledger().append(b"x", frozenset("a"), limit=9)
    first.append(b"y", frozenset("b"), limit=9, merge=True)
    assert (first.entries, dict(first.synced), first.merged) == ((b"x",), {"a": 1}, 0)


@pytest.mark.parametrize("first", [0, 5])
def test_a_client_that_is_up_to_date_misses_nothing(first):
    ledger = Ledger(first=first)
    assert ledger.since(first) == ()
    assert ledger.touched(first) == frozenset()
    assert ledger.since(first - 1) is None
