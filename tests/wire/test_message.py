"""Tests of the wire format: round trips, unique encodings, and refusal of all other bytes."""

import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import WireError
from thinwire.wire.bits import read_varint, varint
from thinwire.wire.message import (
    BUFFERS,
    COORDS,
    FROM_CLIENTS,
    LOST,
    STATE,
    STEPS,
    UP,
    WEIGHT,
    Body,
    Schema,
    join_pieces,
    pack,
    pack_body,
    pack_pieces,
    unpack,
    unpack_body,
)

BLOCKS = tuple(f"block{i}" for i in range(11))
SCHEMA = Schema(bytes(range(1, 9)), BLOCKS)
GOLDEN = "5457020101020304ac02010502010301020302040000803f1f503beb"

plans = st.one_of(st.none(), st.frozensets(st.sampled_from(BLOCKS)))
fields = st.dictionaries(st.integers(0, 255), st.binary(max_size=300), max_size=6)
bodies = st.builds(Body, plans, fields)


def of(kind: int) -> Schema:
    """The schema of a message of this kind: messages of clients include the client id in the checksum."""
    return SCHEMA.sent_by(5) if kind in FROM_CLIENTS else SCHEMA


def sealed(data: bytes, schema: Schema = SCHEMA) -> bytes:
    """The same bytes with a valid checksum, as an attacker could send."""
    return data + zlib.crc32(data, zlib.crc32(schema.digest + schema.sender)).to_bytes(4, "little")


def example() -> bytes:
    entries = [
        pack_body(Body(frozenset(BLOCKS[:3]), {COORDS: b"abcdef", BUFFERS: b"xyz"}), SCHEMA),
        pack_body(Body(None, {COORDS: b"", WEIGHT: b"1234"}), SCHEMA),
    ]
    return pack(STEPS, 1000, entries, SCHEMA, behind=7)


@given(bodies)
def test_body_round_trip(body):
    back = unpack_body(pack_body(body, SCHEMA), SCHEMA)
    everything = body.plan is None or body.plan == frozenset(BLOCKS)
    assert back.plan == (None if everything else body.plan)
    assert back.fields == body.fields


@given(st.lists(bodies, max_size=4), st.integers(4, (1 << 35) - 1), st.integers(0, 4))
def test_message_round_trip(content, version, behind):
    packed = [pack_body(body, SCHEMA) for body in content]
    for kind, least, most in ((UP, 1, 1), (STEPS, min(behind, 1) + 1, behind + 1), (STATE, 2, 2), (LOST, 0, 0)):
        if least <= len(packed) <= most:
            data = pack(kind, version, packed, of(kind), behind)
            message = unpack(data, of(kind))
            assert (message.kind, message.version, list(message.bodies)) == (kind, version, packed)
            assert message.behind == (behind if kind in (STEPS, STATE) else 0)


@given(st.lists(bodies, min_size=1, max_size=3), st.integers(0, 1 << 20), st.data())
@settings(max_examples=200)
def test_each_message_has_exactly_one_encoding(content, version, data):
    """A mutation that still unpacks must pack to the same bytes: no two byte strings have the same meaning."""
    packed = [pack_body(body, SCHEMA) for body in content]
    payload = bytearray(pack(STEPS, version + 5, packed, SCHEMA, behind=5)[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(8, len(payload) - 1))] = data.draw(st.integers(0, 255))
    forged = sealed(bytes(payload))
    try:
        message = unpack(forged, SCHEMA)
    except WireError:
        return
    again = [pack_body(unpack_body(body, SCHEMA), SCHEMA) for body in message.bodies]
    assert pack(message.kind, message.version, again, SCHEMA, message.behind) == forged


def test_the_order_of_fields_does_not_matter():
    forward = pack_body(Body(None, {COORDS: b"a", WEIGHT: b"b"}), SCHEMA)
    assert forward == pack_body(Body(None, {WEIGHT: b"b", COORDS: b"a"}), SCHEMA)


def test_a_plan_of_all_blocks_is_encoded_as_all():
    assert pack_body(Body(frozenset(BLOCKS)), SCHEMA) == pack_body(Body(None), SCHEMA)


def test_bytes_of_a_message_are_fixed():
    schema = Schema(bytes(range(1, 9)), ("a", "b", "c")).sent_by(3)
    body = Body(frozenset({"a", "c"}), {COORDS: b"\x01\x02\x03", WEIGHT: b"\x00\x00\x80\x3f"})
    data = pack(UP, 300, [pack_body(body, schema)], schema)
    assert data.hex() == GOLDEN
    message = unpack(bytes.fromhex(GOLDEN), schema)
    assert (message.kind, message.version) == (UP, 300)
    assert unpack_body(message.bodies[0], schema) == body


def test_a_change_of_any_byte_is_refused():
    data = example()
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF, 0x10):
            broken = bytearray(data)
            broken[at] ^= flip
            with pytest.raises(WireError):
                unpack(bytes(broken), SCHEMA)


def test_every_truncation_is_refused():
    data = example()
    for n in range(len(data)):
        with pytest.raises(WireError):
            unpack(data[:n], SCHEMA)
    for n in range(len(data) - 4):  # also with a valid checksum
        with pytest.raises(WireError):
            unpack(sealed(data[:n]), SCHEMA)


def test_trailing_bytes_are_refused():
    data = example()
    with pytest.raises(WireError, match="checksum"):
        unpack(data + b"\0", SCHEMA)
    with pytest.raises(WireError, match="end inside a length"):
        unpack(sealed(data[:-4] + b"\0"), SCHEMA)
    with pytest.raises(WireError, match="has 1 bodies, this one has 2"):
        unpack(sealed(pack(UP, 0, [pack_body(Body(), SCHEMA)], of(UP))[:-4] + b"\0\0", of(UP)), of(UP))
    with pytest.raises(WireError, match="2 bytes follow the end of a body"):
        unpack_body(pack_body(Body(None, {COORDS: b"a"}), SCHEMA) + b"\0\0", SCHEMA)


def test_splices_of_two_messages_are_refused():
    first, second = example(), pack(UP, 7, [pack_body(Body(None, {COORDS: b"other bytes"}), SCHEMA)], of(UP))
    for cut in range(1, min(len(first), len(second))):
        for spliced in (first[:cut] + second[cut:], second[:cut] + first[cut:]):
            if spliced not in (first, second):
                with pytest.raises(WireError):
                    unpack(spliced, SCHEMA)
    with pytest.raises(WireError):
        unpack(first + second, SCHEMA)


@given(st.binary(max_size=80))
def test_random_bytes_are_refused(data):
    for bad in (data, b"TW\x02\x02\x01\x02\x03\x04" + data, sealed(b"TW\x02\x02\x01\x02\x03\x04" + data)):
        try:
            unpack(bad, SCHEMA)
        except WireError:
            continue
        assert (
            bad[8:] == data + bad[-4:]
        )  # only a message with a valid checksum may pass, if its content is well formed by chance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"XX" + d[2:], "not a thinwire message"),
        (lambda d: d[:2] + b"\x03" + d[3:], "message format 3 is not known"),
        (lambda d: d[:3] + b"\x09" + d[4:], "message kind 9 is not known"),
        (lambda d: d[:4] + b"\0\0\0\0" + d[8:], "another method or model"),
        (lambda d: d[:10], "10 bytes are too few"),
    ],
)
def test_a_wrong_header_is_named_in_the_error_message(change, message):
    with pytest.raises(WireError, match=message):
        unpack(sealed(change(example()[:-4])) if message[:2] != "10" else change(example()), SCHEMA)


@pytest.mark.parametrize("kind", [UP, LOST])
def test_a_message_of_another_client_is_refused(kind):
    bodies = [pack_body(Body(None, {COORDS: b"abcd"}), SCHEMA)] if kind == UP else []
    data = pack(kind, 7, bodies, SCHEMA.sent_by(1))
    assert unpack(data, SCHEMA.sent_by(1)).version == 7
    with pytest.raises(WireError, match="was sent by another client"):
        unpack(data, SCHEMA.sent_by(2))


@pytest.mark.parametrize("kind", [UP, STEPS, STATE, LOST])
def test_the_kind_is_checked_before_the_bodies(kind):
    """A message sent in the wrong direction is refused by its kind, before its bodies are read."""
    wrong = SCHEMA if kind in FROM_CLIENTS else SCHEMA.sent_by(0)
    data = sealed(b"TW\x02" + bytes([kind]) + SCHEMA.digest[:4] + b"\xff" * 50, wrong)
    with pytest.raises(WireError, match="which never sends it"):
        unpack(data, wrong)


def test_another_schema_with_the_same_first_half_is_refused():
    other = Schema(SCHEMA.digest[:4] + b"else", BLOCKS)
    with pytest.raises(WireError, match="checksum"):
        unpack(example(), other)


@pytest.mark.parametrize(
    ("kind", "behind", "count"),
    [(UP, 0, 0), (UP, 0, 2), (STATE, 0, 1), (STATE, 9, 3), (STEPS, 0, 0), (STEPS, 0, 2), (STEPS, 2, 1), (STEPS, 2, 4)]
    + [(LOST, 0, 1)],
)
def test_a_wrong_number_of_bodies_is_refused(kind, behind, count):
    body = pack_body(Body(), SCHEMA)
    with pytest.raises(WireError, match=f"bodies, this one has {count}"):
        unpack(pack(kind, 9, [body] * count, of(kind), behind), of(kind))


@pytest.mark.parametrize(("behind", "most"), [(3, "4"), (1 << 20, "513")])
def test_too_many_bodies_are_refused_in_little_memory(behind, most):
    data = pack(STEPS, 1 << 20, [pack_body(Body(), SCHEMA)] * 50_000, SCHEMA, behind)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=f"has 2 to {most} bodies, this one has {int(most) + 1} or more"):
            unpack(data, SCHEMA)
        assert tracemalloc.get_traced_memory()[1] < len(data)
    finally:
        tracemalloc.stop()


def test_the_length_is_checked_before_the_content():
    with pytest.raises(WireError, match="has 24 bytes, expected at most 20"):
        unpack(b"TW\x01\x01" + bytes(20), SCHEMA, longest=20)


def test_a_message_behind_version_0_is_refused():
    with pytest.raises(WireError, match="to version 3 cannot start 4 versions before it"):
        unpack(pack(STEPS, 3, [pack_body(Body(), SCHEMA)] * 2, SCHEMA, behind=4), SCHEMA)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16383, 16384, (1 << 32) - 1, (1 << 35) - 1])
def test_varint_round_trip_in_shortest_form(value):
    data = varint(value)
    assert read_varint(data, 0) == (value, len(data))
    assert len(data) == max(1, -(-value.bit_length() // 7))
    if len(data) < 5:
        longer = data[:-1] + bytes([data[-1] | 0x80, 0])
        with pytest.raises(WireError, match="shortest form"):
            read_varint(longer, 0)


def test_overlong_varints_are_refused():
    with pytest.raises(WireError, match="longer than five bytes"):
        read_varint(b"\x80\x80\x80\x80\x80\x01", 0)
    with pytest.raises(WireError, match="end inside a length"):
        read_varint(b"\x80\x80", 0)
    for value in (-1, 1 << 35):
        with pytest.raises(WireError, match="does not fit"):
            varint(value)
    overlong = example()[:8] + b"\xe8\x87\x00" + example()[10:-4]  # version 1000 with a zero at its end
    with pytest.raises(WireError, match="shortest form"):
        unpack(sealed(overlong), SCHEMA)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body should begin"),
        (b"\x02\x00", "plan flag 2"),
        (b"\x01\x05", "ends inside the plan"),
        (b"\x01\xff\x07\x00", "plan of all blocks"),
        (b"\x01\x00\x08\x00", "block that does not exist"),
        (b"\x00\x01", "field should begin"),
        (b"\x00\x02\x05\x00\x05\x00", "fields must ascend"),
        (b"\x00\x02\x05\x00\x01\x00", "fields must ascend"),
        (b"\x00\x01\x01\x05abc", "announces 5 bytes, 3 are left"),
        (b"\x00\x01\x01\xff\xff\xff\xff\x7f", "announces 34359738367 bytes"),
    ],
)
def test_malformed_bodies_are_refused(body, message):
    with pytest.raises(WireError, match=message):
        unpack_body(body, SCHEMA)
    with pytest.raises(WireError):
        unpack(sealed(example()[:8] + b"\x01\x01" + (body or b"\x00")), SCHEMA)


def test_a_model_without_blocks_has_one_encoding_of_its_plan():
    empty = Schema(SCHEMA.digest, ())
    assert unpack_body(pack_body(Body(frozenset()), empty), empty).plan is None
    with pytest.raises(WireError, match="plan of all blocks"):
        unpack_body(b"\x01\x00", empty)


@pytest.mark.parametrize("first", [1, 5000])
def test_values_of_a_long_message_are_aligned_and_not_copied(first):
    payload = np.arange(10_000, dtype="<f4")
    body = Body(None, {COORDS: payload.tobytes(), WEIGHT: b"abcd", 200: b"x" * first})
    pieces = pack_pieces(UP, 300, [pack_body(body, SCHEMA)[:7], pack_body(body, SCHEMA)[7:]], SCHEMA)
    assert len(pieces) < 5, "short pieces are joined"
    joined = join_pieces(pieces, lambda size: np.empty(size, np.uint8))
    assert bytes(joined) == b"".join(pieces) == pack(UP, 300, [pack_body(body, SCHEMA)], SCHEMA)
    parts = (b"short", memoryview(payload).cast("B"), b"end")
    for allocate in (lambda size: np.empty(size, np.uint8), None):
        joined = join_pieces(parts, allocate)
        assert bytes(joined) == b"".join(parts)
        values = np.frombuffer(joined, np.uint8)[5:]
        assert values.ctypes.data % 8 == 0
        assert values.flags.writeable, "torch needs writable memory"
    field = unpack_body(unpack(pack(UP, 0, [pack_body(body, SCHEMA)], of(UP)), of(UP)).bodies[0], SCHEMA).fields[COORDS]
    assert isinstance(field, memoryview), "fields are views, not copies"
