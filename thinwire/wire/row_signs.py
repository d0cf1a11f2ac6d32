"""Signs of the sent values of matrices as bytes, shorter where rows have the same signs, or opposite ones.

A gradient of a matrix is a sum of few products of two vectors, so the signs of two rows agree in most columns, or
disagree in most. A matrix is narrow if its shorter side has 2 to 64 entries and its longer side at least 32; rows are
those of its shorter side. Narrow matrices with the same two sides are coded together, in the order of the first of
each pair of sides: row by row, the columns 0 to 31, 32 to 127, 128 to 511, ... of a row in one go, matrix by matrix.
A sign is guessed from the signs s of the 16 rows before (1, -1, or 0 if it was not sent), in the same column j,

    score = sum over rows i of c_i s_ij      c_i: the sum of s_j s_ij over earlier goes of the row

as negative if the score is below 0. Whether a guess is wrong is coded with the others of its group: the number of bits
of 64 |score| // (n + 4), at most 11, with n signs in earlier goes of the row. All signs that are not in narrow matrices
are in group 0, before the others.

    v number of signs, v length of the code, for each group from 0 to 11
      the wrong guesses of each group: a bit for each sign, packed and squeezed

>>> draw = np.random.default_rng(0)
>>> negative = (draw.normal(size=(16, 1)) * draw.normal(size=4000) < draw.normal(size=(16, 4000)) / 8).reshape(-1)
>>> data = encode(negative, np.arange(64000), [(16, 4000)])
>>> len(data) < 0.7 * 64000 / 8, bool((decode(data, np.arange(64000), [(16, 4000)]) == negative).all())
(True, True)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, pack, read_varint, unpack, varint, width
from thinwire.wire.entropy import expand, squeeze

Shapes = Sequence[tuple[int, int]]
GROUPS, CONTEXT, FIRST = 12, 16, 32
_UNSENT = -1


class Guess(NamedTuple):
    """Signs that are guessed in one go."""

    at: np.ndarray  # indices of the signs, in the order of their positions
    group: np.ndarray
    negative: np.ndarray


def pays(shapes: Shapes) -> bool:
    """Whether most entries are in narrow matrices, so that guessing may pay."""
    narrow = sum(r * c for r, c in shapes if _is_narrow(r, c))
    return 2 * narrow >= sum(r * c for r, c in shapes) > 0


def encode(negative: np.ndarray, at: np.ndarray, shapes: Shapes) -> bytes:
    """Encode the signs (bool: whether negative) of the values at these ascending positions. The inverse of `decode`."""
    wrong, numbers = [], []
    goes, signs = _guesses(at, shapes), None
    while (guess := _next(goes, signs)) is not None:
        signs = negative[guess.at]
        wrong.append(signs != guess.negative)
        numbers.append(guess.group)
    missed, group = np.concatenate(wrong), np.concatenate(numbers)
    parts = [missed[group == number] for number in range(GROUPS)]
    codes = [squeeze(pack(part.view(np.uint8), 1)) for part in parts]
    return b"".join((*(varint(len(p)) + varint(len(c)) for p, c in zip(parts, codes, strict=True)), *codes))


def decode(data: Bytes, at: np.ndarray, shapes: Shapes) -> np.ndarray:
    """Decode the signs of the values at these ascending positions from exactly these bytes."""
    wrong, read = _read_groups(data, len(at)), np.zeros(GROUPS, np.int64)
    negative = np.empty(len(at), bool)
    goes, signs = _guesses(at, shapes), None
    while (guess := _next(goes, signs)) is not None:
        ends = read + np.bincount(guess.group, minlength=GROUPS)
        if any(end > len(part) for end, part in zip(ends, wrong, strict=True)):
            raise WireError("a group of signs has more than the announced ones")
        missed = np.concatenate([part[a:b] for part, a, b in zip(wrong, read, ends, strict=True)])
        signs, read = guess.negative, ends
        signs[np.argsort(guess.group, kind="stable")] ^= missed
        negative[guess.at] = signs
    return negative


def _read_groups(data: Bytes, k: int) -> list[np.ndarray]:
    """The wrong guesses of each group, as bool."""
    counts, lengths, start = [], [], 0
    for _ in range(GROUPS):
        n, start = read_varint(data, start)
        length, start = read_varint(data, start)
        counts.append(n)
        lengths.append(length)
    if sum(counts) != k or sum(lengths) != len(data) - start:
        raise WireError(f"the groups of signs are not those of {k} values")
    ends = np.cumsum([start, *lengths]).tolist()
    return [
        unpack(expand(data[a:b], width(n, 1)), n, 1).astype(bool)
        for a, b, n in zip(ends[:-1], ends[1:], counts, strict=True)
    ]


def _next(goes: Generator[Guess, np.ndarray | None, None], signs: np.ndarray | None) -> Guess | None:
    """The guesses of the next go, after these are the signs of the last one; None at the end."""
    try:
        return goes.send(signs)
    except StopIteration:
        return None


def _guesses(at: np.ndarray, shapes: Shapes) -> Generator[Guess, np.ndarray | None, None]:
    """Guesses for all signs, go by go; it is sent the signs of each go."""
    batches, others = _layout(at, shapes)
    yield Guess(others, np.zeros(len(others), np.uint8), np.zeros(len(others), bool))
    for places in batches:
        batch, rows, columns = places.shape
        signs = np.zeros(places.shape, np.int8)
        for row in range(rows):
            before = slice(max(0, row - CONTEXT), row)
            agree = np.zeros((batch, 1, row - before.start), np.float32)
            seen = np.zeros(batch, np.int64)
            for go in _goes(columns):
                known, place = signs[:, before, go].astype(np.float32), places[:, row, go].reshape(-1)
                sent = np.flatnonzero(place != _UNSENT)
                own = np.zeros((batch, go.stop - go.start), np.float32)
                # sums of small integers: float32 is exact, and faster than integers
                score = np.matmul(agree, known).reshape(-1)[sent].astype(np.int64)
                size = np.abs(score) * 64 // (seen + 4)[sent // own.shape[1]]
                group = np.minimum(np.frexp(size)[1], GROUPS - 1).astype(np.uint8)
                found = yield Guess(place[sent], group, score < 0)
                if found is None:
                    raise AssertionError("the signs of the last go were not sent")
                own.reshape(-1)[sent] = np.where(found, np.float32(-1), np.float32(1))
                signs[:, row, go] = own
                agree += np.matmul(known, own[:, :, None]).transpose(0, 2, 1)
                seen += np.count_nonzero(own, axis=1)


def _layout(at: np.ndarray, shapes: Shapes) -> tuple[Iterator[np.ndarray], np.ndarray]:
    """For matrices of the same sides the index of the sign of each entry, (matrices, rows, columns); and the others."""
    alike: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    start = 0
    for r, c in shapes:
        if _is_narrow(r, c):
            alike.setdefault((min(r, c), max(r, c)), []).append((start, r, c))
        start += r * c
    other = np.ones(len(at), bool)
    for first, r, c in (matrix for matrices in alike.values() for matrix in matrices):
        other[slice(*np.searchsorted(at, (first, first + r * c)))] = False
    return (_places(at, sides, alike[sides]) for sides in alike), np.flatnonzero(other)


def _places(at: np.ndarray, sides: tuple[int, int], matrices: list[tuple[int, int, int]]) -> np.ndarray:
    """The index of the sign of each entry; -1 where none was sent."""
    out = np.full((len(matrices), *sides), _UNSENT, np.int32 if len(at) < 1 << 31 else np.int64)
    for number, (start, r, c) in enumerate(matrices):
        low, high = np.searchsorted(at, (start, start + r * c))
        entries = np.full(r * c, _UNSENT, out.dtype)
        entries[at[low:high] - start] = np.arange(low, high)
        matrix = entries.reshape(r, c)
        out[number] = matrix.T if r > c else matrix
    return out


def _goes(columns: int) -> Iterator[slice]:
    """Columns 0 to 31, 32 to 127, 128 to 511, ..."""
    start, end = 0, FIRST
    while start < columns:
        yield slice(start, min(end, columns))
        start, end = end, 4 * end


def _is_narrow(r: int, c: int) -> bool:
    return 2 <= min(r, c) <= 64 and max(r, c) >= 32
