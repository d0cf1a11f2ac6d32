"""Tests of CRC-32 of long messages and of concatenations."""

import os
import zlib

import numpy as np
import pytest

from thinwire.core import threads
from thinwire.core.threads import LEAST, each
from thinwire.wire import crc
from thinwire.wire.crc import _FAR, _LEAST, _NEAR, crc32, joined_crc


@pytest.mark.parametrize("first", [0, 1, 7, 1000])
@pytest.mark.parametrize("second", [0, 1, 255, 4096, 100_003])
def test_joined_crc_is_the_crc_of_the_concatenation(first, second):
    a, b = os.urandom(first), os.urandom(second)
    assert joined_crc(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@pytest.mark.parametrize("length", [0, 7, _LEAST - 1, _LEAST, _LEAST + 3, 4 * (_FAR + 5 * _NEAR), 3 * _LEAST + 1])
@pytest.mark.parametrize("value", [0, 1, 0xFFFFFFFF])
def test_the_crc_of_a_long_message_is_that_of_zlib(length, value):
    data = np.random.default_rng(length).bytes(length)
    assert crc32(data, value) == zlib.crc32(data, value)
    assert crc32(memoryview(data)[1:], value) == zlib.crc32(data[1:], value)
    if length >= _LEAST:
        assert crc._folded(data, value) == zlib.crc32(data, value)


def test_the_polynomial_divides_the_trinomial():
    power, powers = 1, {}
    for i in range(_FAR + 1):
        powers[i] = power
        power = power << 1 ^ (0x104C11DB7 if power >> 31 else 0)
    assert powers[_FAR] ^ powers[_FAR - _NEAR] ^ 1 == 0


def test_several_cores_find_the_same_crc(three_cores, monkeypatch):
    data = np.random.default_rng(1).bytes(3 * _LEAST + 5)
    monkeypatch.setattr(crc, "_PIECE", _LEAST)
    assert crc32(data, 7) == zlib.crc32(data, 7)
    for pays in (True, False):
        monkeypatch.setattr(crc, "_folding_pays", lambda pays=pays: pays)
        assert crc32(data[1:], 3) == zlib.crc32(data[1:], 3)
    parts = [memoryview(data)[i:] for i in range(12)]
    assert each(crc32, parts, LEAST) == [zlib.crc32(part) for part in parts]
    monkeypatch.setattr(threads, "FEW", 2)  # as if three threads were many
    assert each(crc32, parts, LEAST) == [zlib.crc32(part) for part in parts]
