"""Shares, frames and totals of secure aggregation: the parts that need no cryptography."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from thinwire.errors import WireError
from thinwire.secure import frames
from thinwire.secure.frames import Advert, Head, Reader, pack_totals, read_totals
from thinwire.secure.keys import PRIME, combine, recover, split

SECRET = bytes(range(32))
HEAD = Head(b"0123456789abcdef", 7)


def test_the_modulus_is_prime():
    """Miller-Rabin with 40 bases."""
    odd, power = PRIME - 1, 0
    while odd % 2 == 0:
        odd, power = odd // 2, power + 1
    for base in range(2, 42):
        x = pow(base, odd, PRIME)
        steps = [pow(x, 1 << i, PRIME) for i in range(power)]
        assert x == 1 or PRIME - 1 in steps


@pytest.mark.parametrize("threshold", [1, 2, 5, 8])
@pytest.mark.parametrize("secret", [SECRET, bytes(32), b"\xff" * 32], ids=["mixed", "zeros", "ones"])
def test_any_threshold_of_shares_recovers_the_secret(threshold, secret):
    shares = split(secret, range(1, 9), threshold)
    for seed in range(5):
        chosen = random.Random(seed).sample(range(1, 9), threshold)
        assert combine({x: shares[x] for x in chosen}) == secret


def test_one_share_fewer_fits_every_secret():
    """For any other secret there is a share of the missing point that gives it: fewer shares say nothing."""
    shares = split(SECRET, range(1, 9), 7)
    known = {x: shares[x] for x in range(1, 7)}
    for guess in (bytes(32), b"\x01" * 32, b"\xfe" * 32, SECRET):
        share = _share_for(known, 8, int.from_bytes(guess, "big"))
        assert combine({**known, 8: share}) == guess
        assert (share == shares[8]) == (guess == SECRET)


def _value_at_zero(shares):
    total = 0
    for x, y in shares.items():
        factor = 1
        for other in shares:
            if other != x:
                factor = factor * other * pow(other - x, -1, PRIME) % PRIME
        total += y * factor
    return total % PRIME


def _share_for(known, point, secret):
    """The share of the missing point with which all give this secret: the value at 0 is linear in it."""
    at_zero, at_one = (_value_at_zero({**known, point: y}) for y in (0, 1))
    return (secret - at_zero) * pow(at_one - at_zero, -1, PRIME) % PRIME


def test_wrong_shares_are_outvoted_and_too_few_are_refused():
    shares = split(SECRET, range(1, 9), 5)
    wrong = {**shares, 1: 5, 4: shares[4] + 1}
    assert recover(wrong, 5, SECRET.__eq__) == SECRET
    with pytest.raises(WireError, match="4 shares of a secret, 5 are needed"):
        recover({x: shares[x] for x in range(1, 5)}, 5, SECRET.__eq__)
    with pytest.raises(WireError, match="not those that its owner made"):
        recover({x: wrong[x] for x in range(1, 6)}, 5, SECRET.__eq__)


@pytest.mark.parametrize("losses", [(0.5, 2.25, 1e-3), (-3.5, 0.0, 7.0)])
def test_totals_are_the_mean_loss_and_all_examples(losses):
    counts = (17, 400, 70_000)
    words = [pack_totals(loss, count, 3) for loss, count in zip(losses, counts, strict=True)]
    mean, examples = read_totals(np.array(words).sum(0).astype(np.uint32))
    assert examples == sum(counts)
    assert mean == pytest.approx(np.average(losses, weights=counts), abs=1e-4)
    assert all(abs(word) < 1 << 31 for word in pack_totals(1e300, 1 << 60, 1))


def adverts(count: int = 3) -> dict[int, Advert]:
    keys = [bytes([i]) * 32 for i in range(3 * count)]
    return {i: Advert(*keys[3 * i : 3 * i + 3], b"s" * i) for i in range(count)}


FRAMES = {
    ("request", frames.SHARES): (2, adverts()),
    ("answer", frames.SHARES): ({i: bytes(82) for i in (0, 2)},),
    ("request", frames.CONFIRM): (dict.fromkeys((0, 1, 4), b""),),
    ("request", frames.UNMASK): (dict.fromkeys((0, 1, 4), b""), {1: b"abc"}),
    ("answer", frames.UNMASK): ({0: (1, 5), 3: (2, PRIME - 1)},),
}


def packed(name) -> tuple[bytes, Callable]:
    """A message, and a function that reads such messages."""
    kind, phase = name
    fields = frames.REQUESTS if kind == "request" else frames.ANSWERS
    return frames.pack(fields, phase, HEAD, *FRAMES[name]), partial(frames.read, fields, phase)


@pytest.mark.parametrize("name", FRAMES)
def test_frames_are_read_with_bounds(name):
    data, read = packed(name)
    assert read(data, 5) == (HEAD, FRAMES[name], b"")
    for length in range(len(data)):
        with pytest.raises(WireError):
            read(data[:length], 5)
    with pytest.raises(WireError, match="1 bytes too many"):
        read(data + b"x", 5)
    at = 26 if name == ("request", frames.SHARES) else 22  # after the head, and the threshold
    with pytest.raises(WireError, match="a list has 2147483648 entries"):
        read(data[:at] + (1 << 31).to_bytes(4, "little") + data[at + 4 :], 5)
    with pytest.raises(WireError):
        read(data, 1)  # a client that does not exist


@pytest.mark.parametrize("name", FRAMES)
def test_random_changes_of_frames_raise_wire_errors_only(name):
    data, read = packed(name)
    draw = random.Random(0)
    for _ in range(500):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        with contextlib.suppress(WireError):
            read(bytes(changed), 5)


def test_lists_are_ascending_and_keys_differ():
    with pytest.raises(WireError, match="client 0 follows client 1"):
        frames.CLIENTS.read(Reader(frames.number(2) + frames.number(1) + frames.number(0), 5))
    with pytest.raises(WireError, match="client 1 follows client 1"):
        frames.CLIENTS.read(Reader(frames.number(2) + frames.number(1) * 2, 5))
    same = adverts()
    same[2] = same[2]._replace(seal_key=same[0].mask_key)
    with pytest.raises(WireError, match="same key"):
        frames.ADVERTS.read(Reader(frames.ADVERTS.write(same), 5))


def test_the_bytes_of_a_message_are_those_of_the_page():
    assert frames.pack(frames.REQUESTS, frames.UNMASK, HEAD, {1: b""}, {1: b"ab"}) == (
        b"\x01\x04" + HEAD.session + b"\x07\0\0\0" + b"\x01\0\0\0" * 2 + b"\x01\0\0\0" * 2 + b"\x02ab"
    )


def test_heads_name_phase_and_format():
    data = frames.pack(frames.ANSWERS, frames.SHARES, HEAD, {})
    assert frames.read(frames.ANSWERS, frames.SHARES, data, 5)[0] == HEAD
    with pytest.raises(WireError, match="begins with 0101, expected 0104"):
        frames.read(frames.ANSWERS, frames.UNMASK, data, 5)
    with pytest.raises(WireError, match="begins with 0901"):
        frames.read(frames.ANSWERS, frames.SHARES, b"\x09" + data[1:], 5)
    with pytest.raises(WireError, match="unknown phase 'what'"):
        frames.read(frames.REQUESTS, "what", data, 5)
