"""Tests of the wire format: round trips, unique encodings, and refusal of all other bytes."""

import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from thinwire.errors import WireError
from thinwire.wire import message
from thinwire.wire.bits import read_varint, varint
from thinwire.wire.message import (
    BASE,
    BUFFERS,
    COORDS,
    DRIFT_CHECK,
    FIELDS,
    FORMAT,
    FROM_CLIENTS,
    LOST,
    STATE,
    STEPS,
    UP,
    WEIGHT,
    Body,
    Schema,
    pack,
    pack_body,
    unpack,
    unpack_body,
)

BLOCKS = tuple(f"block{i}" for i in range(11))
SCHEMA = Schema(bytes(range(1, 9)), BLOCKS)
GOLDEN = "3101ac02070503010203d804"  # and the checksum

plans = st.one_of(st.none(), st.frozensets(st.sampled_from(BLOCKS)))
payloads = {number: st.binary(max_size=300) for number in FIELDS}
payloads |= {WEIGHT: st.integers(0, (1 << 35) - 1).map(varint), DRIFT_CHECK: st.binary(min_size=4, max_size=4)}
fields = st.fixed_dictionaries({}, optional=payloads)
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
        pack_body(Body(None, {COORDS: b"", WEIGHT: varint(600), DRIFT_CHECK: b"1234", BASE: b"5"}), SCHEMA),
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
        payload[data.draw(st.integers(2, len(payload) - 1))] = data.draw(st.integers(0, 255))
    forged = sealed(bytes(payload))
    try:
        message = unpack(forged, SCHEMA)
    except WireError:
        return
    again = [pack_body(unpack_body(body, SCHEMA), SCHEMA) for body in message.bodies]
    assert pack(message.kind, message.version, again, SCHEMA, message.behind) == forged


def test_the_order_of_fields_does_not_matter():
    forward = pack_body(Body(None, {COORDS: b"a", WEIGHT: b"\1"}), SCHEMA)
    assert forward == pack_body(Body(None, {WEIGHT: b"\1", COORDS: b"a"}), SCHEMA)


def test_a_plan_of_all_blocks_is_encoded_as_all():
    assert pack_body(Body(frozenset(BLOCKS)), SCHEMA) == pack_body(Body(None), SCHEMA)


def test_bytes_of_a_message_are_fixed():
    schema = Schema(bytes(range(1, 9)), ("a", "b", "c")).sent_by(3)
    body = Body(frozenset({"a", "c"}), {COORDS: b"\x01\x02\x03", WEIGHT: varint(600)})
    data = pack(UP, 300, [pack_body(body, schema)], schema)
    assert data == sealed(bytes.fromhex(GOLDEN), schema)
    message = unpack(data, schema)
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
        unpack(sealed(data[:-4] + b"\x80"), SCHEMA)
    with pytest.raises(WireError, match="has 1 bodies, this one has 2"):
        unpack(sealed(pack(UP, 0, [pack_body(Body(), SCHEMA)], of(UP))[:-4] + b"\0", of(UP)), of(UP))
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
    for bad in (data, b"\x32\x01" + data, sealed(b"\x32\x01" + data)):
        try:
            unpack(bad, SCHEMA)
        except WireError:
            continue
        assert (
            bad[2:] == data + bad[-4:]
        )  # only a message with a valid checksum may pass, if its content is well formed by chance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"XX" + d[2:], "not a message of format 3: its first byte is 58, expected 31 to 34"),
        (lambda d: b"\x42" + d[1:], "not a message of format 3: its first byte is 42"),
        (lambda d: b"\x39" + d[1:], "message kind 9 is not known"),
        (lambda d: b"\x30" + d[1:], "message kind 0 is not known"),
        (lambda d: d[:1] + b"\0" + d[2:], "another method or model: schema 00, ours 01"),
        (lambda d: d[:2], "6 bytes are too few for a message .at least 7"),
    ],
)
def test_a_wrong_header_is_named_in_the_error_message(change, message):
    with pytest.raises(WireError, match=message):
        unpack(sealed(change(example()[:-4])), SCHEMA)


@pytest.mark.parametrize("kind", [UP, LOST])
def test_a_message_of_another_client_is_refused(kind):
    bodies = [pack_body(Body(None, {COORDS: b"abcd"}), SCHEMA)] if kind == UP else []
    data = pack(kind, 7, bodies, SCHEMA.sent_by(1))
    assert unpack(data, SCHEMA.sent_by(1)).version == 7
    for other in (0, 2, 1 << 31, -1):
        with pytest.raises(WireError, match="checksum does not match: damaged, by another client"):
            unpack(data, SCHEMA.sent_by(other))


@pytest.mark.parametrize("kind", [UP, STEPS, STATE, LOST])
def test_the_kind_is_checked_before_the_bodies(kind):
    """A message sent in the wrong direction is refused by its kind, before its bodies are read."""
    wrong = SCHEMA if kind in FROM_CLIENTS else SCHEMA.sent_by(0)
    data = sealed(bytes([FORMAT << 4 | kind]) + SCHEMA.digest[:1] + b"\xff" * 50, wrong)
    with pytest.raises(WireError, match="which never sends it"):
        unpack(data, wrong)


@given(st.binary(min_size=7, max_size=7))
def test_another_schema_with_the_same_first_byte_is_refused(rest):
    """The checksum covers all eight bytes of the digest."""
    if rest != SCHEMA.digest[1:]:
        with pytest.raises(WireError, match="checksum does not match: damaged, or for another method or model"):
            unpack(example(), Schema(SCHEMA.digest[:1] + rest, BLOCKS))


def test_every_other_schema_that_differs_in_32_bits_is_refused():
    """A CRC-32 detects all differences within 32 consecutive bits: here, some of up to four bytes."""
    data = example()
    for at in range(8, 64):
        for change in (1, 0b11, 0b101, 0xFFFFFFFF, 0x80000001, 0xEDB88320):
            digest = int.from_bytes(SCHEMA.digest, "little") ^ change << min(at, 64 - change.bit_length())
            with pytest.raises(WireError, match="checksum"):
                unpack(data, Schema(digest.to_bytes(8, "little"), BLOCKS))


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
    data = pack(STEPS, 1 << 20, [pack_body(Body(), SCHEMA)] * 200_000, SCHEMA, behind)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=f"has 2 to {most} bodies, this one has {int(most) + 1} or more"):
            unpack(data, SCHEMA)
        assert tracemalloc.get_traced_memory()[1] < len(data)
    finally:
        tracemalloc.stop()


def test_the_length_is_checked_before_the_content():
    with pytest.raises(WireError, match="has 24 bytes, expected at most 20"):
        unpack(b"TW\x02\x01" + bytes(20), SCHEMA, longest=20)


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
    overlong = example()[:2] + b"\xe8\x87\x00" + example()[4:-4]  # version 1000 with a zero at its end
    with pytest.raises(WireError, match="shortest form"):
        unpack(sealed(overlong), SCHEMA)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body should begin"),
        (b"\x80", "end inside a length"),
        (b"\x82\x00\x00", "shortest form"),
        (b"\x80\x10", "field 11 is not known"),
        (b"\xff\xff\xff\xff\x7f", "field 34 is not known"),
        (b"\x01\x05", "11 values of 1 bits take 2 bytes, got 1"),
        (b"\x01\xff\x07", "plan of all blocks"),
        (b"\x01\x00\x08", "bits are set after the last value"),
        (b"\x02", "end inside a length"),
        (b"\x02\x05abc", "field 1 announces 5 bytes, 3 are left"),
        (b"\x02\xff\xff\xff\xff\x7f", "announces 34359738367 bytes"),
        (b"\x04", "end inside a length"),
        (b"\x04\x80\x00", "shortest form"),
        (b"\x10abc", "field 4 announces 4 bytes, 3 are left"),
    ],
)
def test_malformed_bodies_are_refused(body, message):
    with pytest.raises(WireError, match=message):
        unpack_body(body, SCHEMA)
    with pytest.raises(WireError):
        unpack(sealed(example()[:2] + b"\x01\x01" + (body or b"\x00")), SCHEMA)


def test_a_model_without_blocks_has_one_encoding_of_its_plan():
    empty = Schema(SCHEMA.digest, ())
    assert unpack_body(pack_body(Body(frozenset()), empty), empty).plan is None
    with pytest.raises(WireError, match="plan of all blocks"):
        unpack_body(b"\x01", empty)


def test_the_checksum_is_that_of_zlib():
    for size in (0, 7, 3 << 20):
        data = np.random.default_rng(size).bytes(size)
        assert message.crc32(memoryview(data)[1:], 7) == zlib.crc32(data[1:], 7)
