"""Messages in Flower's records: packing is inverted by unpacking, and other records are refused."""

from __future__ import annotations

import pytest

from thinwire.errors import WireError
from thinwire.flower.grid_transport import INLINE, pack, unpack

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
