"""Hostile clients between real processes: the run ends as the honest one, and each is named once per round."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from benchmarks.faults.hostile import compare

pytestmark = pytest.mark.slow


def test_hostile_clients_cost_neither_accuracy_nor_memory(tmp_path):
    found = compare(tmp_path, rounds=4)
    assert abs(found["hostile"] - found["honest"]) < 0.02
    assert found["rise"] < 50_000_000
    for client, one in found["clients"].items():
        assert one["refused"] == (2 if client == 10 else 4), one
        assert one["log"] == one["record"] == one["refused"], one
