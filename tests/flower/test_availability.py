"""Ten sites of which most are offline and one is slow, as real processes: every round finishes without it."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from benchmarks.faults.availability import LEAVING, OFFLINE, SLOW, availability

pytestmark = pytest.mark.slow


def test_rounds_finish_with_most_sites_offline_and_one_slow(tmp_path):
    found = availability(tmp_path, rounds=8, leave=4)
    assert found["rounds"] == found["exchanges"] == 8, "no round was asked twice"
    assert not any(OFFLINE & set(asked) for asked in found["asked"])
    assert all(len(accepted) >= 2 for accepted in found["accepted"])
    assert not any(LEAVING & set(accepted) for accepted in found["accepted"][5:])
    assert any(SLOW in late for late in found["late"])
    assert not any(SLOW in accepted for accepted in found["accepted"])
    assert max(found["seconds after the quorum"]) < 15, "3 seconds, and what a busy machine adds; not 25"
    assert found["replay is identical"]
