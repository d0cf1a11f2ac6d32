"""All pairs of parts train to a finite loss, or are refused before training."""

from __future__ import annotations

from functools import cache

import pytest

from tests import combinations as law

CI = 160  # random pairs in CI; `make test-slow` has all of them
pytestmark = pytest.mark.xdist_group("combinations")  # finding the pairs takes long: in one process


@cache
def pairs(one_in: int):
    return law.all_pairs(one_in=one_in)


def test_every_registered_part_and_every_slot_has_an_entry():
    assert not law.missing(), "\n".join(law.missing())


@pytest.mark.parametrize("one_in", [CI, pytest.param(1, marks=pytest.mark.slow)])
def test_all_pairs_train_or_are_refused(one_in):
    """Each row trains three rounds over real messages, and clients that missed rounds catch up."""
    rows, _ = pairs(one_in)
    for row in rows:
        try:
            assert law.refused(row) is None
            law.train(row)
        except Exception as error:
            differs = {slot: name for slot, name in row.items() if name != law.plain()[slot]}
            raise AssertionError(f"{type(error).__name__}: {error}; with {differs}") from error


def test_every_choice_occurs_in_a_row_that_trains():
    rows, _ = pairs(CI)
    for slot, known in law.choices().items():
        assert {row[slot] for row in rows} == set(known)


def test_refusals_are_one_line_with_what_to_write():
    _, refused = pairs(CI)
    assert refused
    for pair, why in refused.items():
        assert "\n" not in why, pair
        assert len(why) < 600, pair
        assert any(word in why for word in ("Write", "Use", "write", "the blocks are")), (pair, why)
