"""The server refuses uploads that do not belong to the round."""

import pytest

from tests.federation import closed
from tests.protocol.messages import bodies_of, forged, value_bytes
from thinwire.errors import WireError
from thinwire.protocol.receive import request_full_state
from thinwire.wire import message as wire
from thinwire.wire.bits import varint
from thinwire.wire.message import pack_weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "client 0 trained version 0, the round is at 1"),
        ({"version": 2}, "trained version 2"),
        ({"kind": wire.STEPS}, "kind 'steps' came from a client"),
        ({"plan": frozenset({"0.weight"})}, "other blocks than the round requested"),
        ({"COORDS": None}, "fields .* expected"),
        ({"WEIGHT": None}, "fields .* expected"),
        ({"BUFFERS": None}, "fields .* expected"),
        ({"SHARED": b""}, "fields .* expected"),
        ({"REPORT": b"abcd"}, "fields .* expected"),
        ({"BASE": b"abcd"}, "fields .* expected"),
        ({"COORDS": b"abcd"}, "bytes of raw values"),
        ({"BUFFERS": b""}, "bytes of raw values"),
        ({"WEIGHT": pack_weight(0.0)}, "sent weight 0.0; expected above 0"),
        ({"WEIGHT": pack_weight(-3.0)}, "sent weight -3.0"),
        ({"WEIGHT": pack_weight(float("nan"))}, "sent weight nan"),
        ({"WEIGHT": pack_weight(float("inf"))}, "sent weight inf"),
        ({"WEIGHT": pack_weight(2.0**41)}, "sent weight 2199023255552.0"),
        ({"WEIGHT": varint((1 << 24) + 0x3F800000)}, "the weight 1 must be written as a count"),
        ({"WEIGHT": varint((1 << 24) + (1 << 32))}, "neither a count nor a float32"),
    ],
)
def test_uploads_that_do_not_fit_are_refused(opened, change, message):
    federation, plan, data = opened
    assert forged(federation, data) == data
    with pytest.raises(WireError, match=message):
        closed(federation.contract, federation.server, plan, {0: forged(federation, data, **change)}, 6)
    closed(federation.contract, federation.server, plan, {0: data}, 6)


@pytest.mark.parametrize("field", ["COORDS", "BUFFERS"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_refused(opened, field, value):
    federation, plan, data = opened
    payload = bodies_of(federation, data)[0].fields[getattr(wire, field)]
    bad = forged(federation, data, **{field: bytes(payload[:-4]) + value_bytes(value)})
    with pytest.raises(WireError, match="client 0 sent a value that is not finite"):
        closed(federation.contract, federation.server, plan, {0: bad}, 6)


def test_a_damaged_upload_is_refused_and_the_round_stays_open(opened):
    federation, plan, data = opened
    for at in range(0, len(data), 97):
        bad = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        with pytest.raises(WireError):
            closed(federation.contract, federation.server, plan, {0: bad}, 6)
    assert federation.server.public.version == 1


def test_a_round_without_uploads_is_refused(opened):
    federation, plan, _ = opened
    with pytest.raises(WireError, match="no client responded"):
        closed(federation.contract, federation.server, plan, {}, 6)


def test_a_full_state_is_sent_on_request_only(opened):
    federation, _, data = opened
    with pytest.raises(WireError, match="kind 'up' requests no state"):
        federation.opened.downloads.full_state(data, 0)
    with pytest.raises(WireError, match="lost at version 9, the server is at 1"):
        federation.opened.downloads.full_state(request_full_state(federation.contract, 9, 0), 0)
