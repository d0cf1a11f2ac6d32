"""Messages in Flower's records: packing is inverted by unpacking, and other records are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thinwire.errors import WireError
from thinwire.flower.client_store import Response
from thinwire.flower.grid_transport import INLINE, MOST_METRICS, _response, pack, response_fields, unpack
from thinwire.training.evaluation import Evaluation

flwr = pytest.importorskip("flwr.app")


@pytest.mark.parametrize("size", [0, 1, 1000, INLINE, INLINE + 1])
def test_unpack_inverts_pack(size):
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    (client, error), got = unpack(pack({"client": 3, "error": ""}, data), client=int, error=str)
    assert (client, error, got) == (3, "", data)


def test_long_messages_are_in_an_array():
    assert "thinwire-data" in pack({}, b"x" * (INLINE + 1))
    assert "thinwire-data" not in pack({}, b"x" * INLINE)


@pytest.mark.parametrize(
    "records",
    [
        flwr.RecordDict(),
        flwr.RecordDict({"thinwire": flwr.MetricRecord({"client": 1})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"client": "1"})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"client": True})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"client": 1, "data": "text"})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"data": b"no client"})}),
    ],
)
def test_other_records_are_refused(records):
    with pytest.raises(WireError):
        unpack(records, client=int)


def reply(fields: dict, data: bytes = b""):
    """The part of Flower's message that is read."""
    return SimpleNamespace(content=pack(fields, data))


@pytest.mark.parametrize(
    "evaluation",
    [None, Evaluation(0.5, 0.25, {"f1": 0.75, "auc": float("inf")}, 9), Evaluation(2.0, None, {}, 1)],
)
def test_a_response_is_what_was_sent(evaluation):
    sent = Response(b"upload", 0.5, 12, evaluation=evaluation)
    assert _response(3, reply(response_fields(3, sent), sent.data)) == sent


@pytest.mark.parametrize(
    "wrong",
    [
        {"eval-examples": 1.5},
        {"eval-loss": "low"},
        {"metric-names": ["f1"], "metric-values": [1.0, 2.0]},
        {"metric-names": ["f1"], "metric-values": ["high"]},
        {"metric-names": "f1"},
        {"metric-names": [str(i) for i in range(MOST_METRICS + 1)], "metric-values": [0.5] * (MOST_METRICS + 1)},
    ],
)
def test_an_evaluation_of_another_form_is_refused(wrong):
    fields = response_fields(3, Response(b"", 0.5, 12, evaluation=Evaluation(0.5, 0.5, {}, 9)))
    with pytest.raises(WireError):
        _response(3, reply({**fields, **wrong}))
