"""Tests of CRC-32 of concatenations."""

import os
import zlib

import pytest

from thinwire.wire.crc import joined_crc


@pytest.mark.parametrize("first", [0, 1, 7, 1000])
@pytest.mark.parametrize("second", [0, 1, 255, 4096, 100_003])
def test_joined_crc_is_the_crc_of_the_concatenation(first, second):
    a, b = os.urandom(first), os.urandom(second)
    assert joined_crc(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
