"""Signs of the sent values of matrices as bytes, shorter where rows have the same signs, or opposite ones.

A gradient of a matrix is a sum of few products of two vectors, so the signs of two rows agree in most columns, or
disagree in most. A matrix is narrow if its shorter side has 2 to 64 entries and its longer side 32 to 2^20; rows are
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
>>> data = encode(negative, np.ones(64000, bool), [(16, 4000)])
>>> len(data) < 0.7 * 64000 / 8, bool((decode(data, np.ones(64000, bool), [(16, 4000)]) == negative).all())
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, pack, read_varint, unpack, varint, width
from thinwire.wire.entropy import expand, squeeze

Shapes = Sequence[tuple[int, int]]
GROUPS, CONTEXT, FIRST = 12, 16, 32
_LONGEST = 1 << 20  # a side up to which float32 is exact: scores are at most 16 times as large, and integers
_EXPONENT, _HALF = 23, 126  # of float32: where the bits of the exponent begin, and those of a number from 1/2 to 1

Code = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class _Matrix(NamedTuple):
    """Where the entries of a narrow matrix are."""

    start: int
    rows: int
    columns: int

    def view(self, entries: np.ndarray) -> np.ndarray:
        """Its entries; rows are those of the shorter side."""
        part = entries[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)
        return part.T if self.rows > self.columns else part


def pays(shapes: Shapes) -> bool:
    """Whether most entries are in narrow matrices, so that guessing may pay."""
    narrow = sum(r * c for r, c in shapes if _is_narrow(r, c))
    return 2 * narrow >= sum(r * c for r, c in shapes) > 0


def encode(negative: np.ndarray, sent: np.ndarray, shapes: Shapes) -> bytes:
    """Encode the signs of the sent entries. The inverse of `decode`.

    Args:
        negative: bool for each entry of all matrices, whether it is negative; those that are not sent do not matter.
        sent: bool for each entry, whether it is sent.
        shapes: of the matrices, which follow each other.
    """
    wrong, numbers = [], []

    def record(group: np.ndarray, guess: np.ndarray, signs: np.ndarray) -> np.ndarray:
        wrong.append(signs != guess)
        numbers.append(group)
        return signs

    _visit(negative.copy(), sent, shapes, record)
    group, missed = np.concatenate(numbers), np.concatenate(wrong)
    parts = [missed[group == number] for number in range(GROUPS)]  # less memory than sorting
    codes = [squeeze(pack(part.view(np.uint8), 1)) for part in parts]
    return b"".join((*(varint(len(p)) + varint(len(c)) for p, c in zip(parts, codes, strict=True)), *codes))


def decode(data: Bytes, sent: np.ndarray, shapes: Shapes) -> np.ndarray:
    """Decode the signs of the sent entries from exactly these bytes: whether each is negative; False for all others."""
    wrong, read = _read_groups(data, int(np.count_nonzero(sent))), [0] * GROUPS

    def reveal(group: np.ndarray, guess: np.ndarray, _: np.ndarray) -> np.ndarray:
        missed = []
        for number, count in enumerate(np.bincount(group, minlength=GROUPS).tolist()):
            missed.append(wrong[number][read[number] : read[number] + count])
            read[number] += count
            if read[number] > len(wrong[number]):
                raise WireError(f"group {number} of signs has more than the announced {len(wrong[number])}")
        flip = np.empty(len(group), bool)
        flip[np.argsort(group, kind="stable")] = np.concatenate(missed)
        return guess ^ flip

    negative = np.zeros(len(sent), bool)
    _visit(negative, sent, shapes, reveal)
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
        unpack(expand(data[a:b], width(n, 1)), n, 1).view(bool)
        for a, b, n in zip(ends[:-1], ends[1:], counts, strict=True)
    ]


def _visit(negative: np.ndarray, sent: np.ndarray, shapes: Shapes, code: Code) -> None:
    """Call `code` with the groups, guesses and signs of each go, and set `negative` to the signs that it returns.

    An encoder fills `negative` before; a decoder cannot.
    """
    alike: dict[tuple[int, int], list[_Matrix]] = {}
    start, other = 0, sent.copy()
    for r, c in shapes:
        if _is_narrow(r, c):
            alike.setdefault((min(r, c), max(r, c)), []).append(_Matrix(start, r, c))
            other[start : start + r * c] = False
        start += r * c
    at = np.flatnonzero(other)
    negative[at] = code(np.zeros(len(at), np.uint8), np.zeros(len(at), bool), negative[at])
    del at, other
    for matrices in alike.values():
        signs = _stack(matrices, negative)
        _visit_alike(signs, _stack(matrices, sent), code)
        for matrix, found in zip(matrices, signs, strict=True):
            matrix.view(negative)[:] = found


def _stack(matrices: list[_Matrix], entries: np.ndarray) -> np.ndarray:
    """The entries of matrices of the same sides, (matrices, rows, columns)."""
    views = [matrix.view(entries) for matrix in matrices]
    return np.stack(views, out=np.empty((len(views), *views[0].shape), bool))  # contiguous, also if all are transposed


def _visit_alike(negative: np.ndarray, sent: np.ndarray, code: Code) -> None:
    """The same for matrices of the same sides, (matrices, rows, columns)."""
    batch, rows, columns = sent.shape
    last = np.zeros((batch, min(rows, CONTEXT), columns), np.float32)  # signs of row i in place i % 16
    goes = _goes(columns)
    counts = [np.count_nonzero(sent[:, :, go], axis=2) for go in goes]
    for row in range(rows):
        agree = np.zeros((batch, 1, min(row, CONTEXT)), np.float32)
        seen = np.full((batch, 1), 4, np.float32)
        for go, count in zip(goes, counts, strict=True):
            known, at = last[:, : agree.shape[2], go], np.flatnonzero(sent[:, row, go])
            score = np.matmul(agree, known).reshape(batch, -1)  # float32 is faster than integers
            guess = score.reshape(-1)[at] < 0
            np.abs(score, out=score)
            score /= seen / 64
            bits = (score.reshape(-1)[at].view(np.int32) >> _EXPONENT) - _HALF
            group = np.minimum(np.maximum(bits, 0), GROUPS - 1).astype(np.uint8)
            signs = code(group, guess, negative[:, row, go].reshape(-1)[at])
            own = np.zeros(score.shape, np.float32)
            own.reshape(-1)[at] = np.where(signs, np.float32(-1), np.float32(1))
            agree += np.matmul(known, own[:, :, None]).transpose(0, 2, 1)
            seen += count[:, row, None]
            last[:, row % CONTEXT, go] = own
            negative[:, row, go] = own < 0


def _goes(columns: int) -> list[slice]:
    """Columns 0 to 31, 32 to 127, 128 to 511, ..."""
    out, start, end = [], 0, FIRST
    while start < columns:
        out.append(slice(start, min(end, columns)))
        start, end = end, 4 * end
    return out


def _is_narrow(r: int, c: int) -> bool:
    return 2 <= min(r, c) <= 64 and FIRST <= max(r, c) <= _LONGEST
