"""An independent reader of the wire format, written from docs/wire.md: it imports neither thinwire, numpy nor torch.

It proves that the page is complete. It is slow, and it refuses fewer invalid messages than thinwire does.
"""

import itertools
import math
import struct
import zlib
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache

from tests.wire_randomness import drift_check as drift_check, fold, philox, philox64

MAX = {"f2": 65504.0, "b2": 255 * 2.0**120, "f4": (2 - 2.0**-23) * 2.0**127, "f8": (2 - 2.0**-52) * 2.0**1023}
SIZE = {"f4": 4, "f8": 8, "f2": 2, "b2": 2, "i8": 8, "i4": 4, "i2": 2, "i1": 1, "u1": 1, "t1": 1}
LETTER = {"f4": "f", "f8": "d", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u1": "B", "t1": "?"}


class Cursor:
    """Bytes and a read position."""

    def __init__(self, data):
        self.data, self.at = bytes(data), 0

    def take(self, n=None):
        n = len(self.data) - self.at if n is None else n
        assert 0 <= n <= len(self.data) - self.at, "the bytes end too early"
        self.at += n
        return self.data[self.at - n : self.at]

    def byte(self):
        return self.take(1)[0]

    def v(self):
        value = 0
        for i in range(5):
            byte = self.byte()
            value |= (byte & 127) << 7 * i
            if byte < 128:
                assert byte or i == 0, "not the shortest form"
                return value
        raise AssertionError("longer than five bytes")

    def end(self):
        assert self.at == len(self.data), "trailing bytes"


# -- messages ----------------------------------------------------------------------------------------------------------


def read_message(data, digest, blocks, client=0):
    """Kind, version, behind, and bodies; a body is its plan (names of blocks) and its fields (payload by id)."""
    kind = {1: "up", 2: "steps", 3: "state", 4: "lost"}[data[0] % 16]
    sender = client.to_bytes(8, "little") if kind in ("up", "lost") else b""
    assert zlib.crc32(digest + sender + data[:-4]) == struct.unpack("<I", data[-4:])[0], "checksum"
    c = Cursor(data[:-4])
    assert c.byte() // 16 == 3
    assert c.byte() == digest[0]
    version, bodies = c.v(), []
    behind = c.v() if kind in ("steps", "state") else 0
    while c.at < len(c.data):
        plan, bits = list(blocks), c.v()
        if bits & 1:
            bitmap = c.take(-(-len(blocks) // 8))
            plan = [name for i, name in enumerate(blocks) if bitmap[i // 8] >> i % 8 & 1]
        assert bits < 1 << 11, "an unknown field"
        bodies.append((plan, {i: read_field(c, i) for i in range(1, 11) if bits >> i & 1}))
    return kind, version, behind, bodies


def read_stack(data, weights, rank, codec, key):
    """How many adapters are stacked, and the blocks of the stack; `weights` are the matrices with an adapter."""
    c, blocks = Cursor(data), []
    count = c.v()
    for name, (outputs, inputs), kind in weights if count else ():
        n = count * min(rank, outputs, inputs)
        if n * (outputs + inputs) >= outputs * inputs:
            blocks.append((name + "/w", (outputs, inputs), kind))
        else:
            blocks += [(name + "/b", (outputs, n), kind), (name + "/a", (n, inputs), kind)]
    return count, read_codec(codec, c.take(), blocks, key) if blocks else {}, blocks


def read_field(c, number):
    """The payload of a field; the weight as a number."""
    if number == 2:
        return read_weight(c.v())
    return c.take(4 if number == 4 else c.v())


def read_weight(u):
    """A number of examples, or else the bits of a float32."""
    if u <= 1 << 24:
        return float(u)
    weight = struct.unpack("<f", struct.pack("<I", u - (1 << 24)))[0]
    assert not (weight.is_integer() and 0 <= weight <= 1 << 24), "a number of examples in the long form"
    return weight


# -- sections ----------------------------------------------------------------------------------------------------------


def width(count, bits):
    return -(-count * bits // 8)


def unpack(data, count, bits):
    """Integers of a few bits each: all bytes are one little-endian integer."""
    assert len(data) == width(count, bits)
    whole = int.from_bytes(data, "little")
    assert whole >> count * bits == 0
    return [whole >> i * bits & ((1 << bits) - 1) for i in range(count)]


def expand(data, length):
    if len(data) == length:
        return data
    inflate = zlib.decompressobj(-15)
    out = inflate.decompress(data)
    assert len(data) < length == len(out)
    assert inflate.eof
    assert not inflate.unused_data
    return out


def read_levels(data, count, bits):
    if bits > 8:
        middle = width(count, bits - 8)
        low, top = unpack(data[:middle], count, bits - 8), expand(data[middle:], count)
        return [high << bits - 8 | rest for high, rest in zip(top, low, strict=True)]
    if bits in (2, 4) and len(data) < width(count, bits) and data[0] == 7:
        return unpack(read_regions(data[1:], width(count, bits)), count, bits)
    if bits in (1, 2, 4, 8):
        return unpack(expand(data, width(count, bits)), count, bits)
    if len(data) == width(count, bits):
        return unpack(data, count, bits)
    if bits > 3:
        return list(expand(data, count))
    pairs = expand(data, -(-count // 2))
    return [level for byte in pairs for level in (byte & 7, byte >> 3)][:count]


def read_positions(data, n, k, shapes=()):
    if k in (0, n):
        assert not data
        return list(range(k))
    c = Cursor(data)
    form = c.byte()
    if form == 1:
        bitmap = unpack(expand(c.take(), width(n, 1)), n, 1)
        out = [i for i, bit in enumerate(bitmap) if bit]
    elif form == 0:
        r = max(0, (n // k).bit_length() - 1 - 4)
        escapes = c.v()
        low = unpack(c.take(width(k, r)), k, r)
        wide = (n >> r).bit_length()
        long = iter(unpack(c.take(width(escapes, wide)), escapes, wide))
        high = [next(long) if byte == 255 else byte for byte in expand(c.take(), k)]
        out = _from_gaps([h << r | rest for h, rest in zip(high, low, strict=True)])
    elif form == 3:
        out = [i for i, bit in enumerate(_read_rows(c, n, shapes or ((n, 1),))) if bit]
    else:
        assert form == 2
        r = c.byte()
        low = unpack(c.take(width(k, r)), k, r)
        unary, high = int.from_bytes(c.take(), "little"), []
        for _ in range(k):
            zeros = (unary & -unary).bit_length() - 1
            high.append(zeros)
            unary >>= zeros + 1
        assert unary == 0
        out = _from_gaps([h << r | rest for h, rest in zip(high, low, strict=True)])
    assert len(out) == k
    assert out[-1] < n
    return out


def _read_rows(c, n, shapes):
    """The bits of matrices, each read along its shorter side."""
    places, start = [], 0
    for r, s in shapes:
        short, long = sorted((r, s))
        order = range(short)
        if 8 <= short <= 64 and long >= 8 * short:
            size = (short - 1).bit_length()
            order = unpack(c.take(width(short, size)), short, size)
            assert sorted(order) == list(range(short))
        places += [start + (j * long + i if 1 < r < s else i * short + j) for i in range(long) for j in order]
        start += r * s
    assert start == n
    count = -(-n // 8)
    even = read_regions(c.take(c.v()), -(-count // 2))
    lengths = [c.v() for _ in range(7)]
    group = [min(byte.bit_count(), 7) for byte in even][: count // 2]
    codes = [c.take(length) for length in lengths] + [c.take()]
    streams = [iter(expand(code, group.count(i))) for i, code in enumerate(codes)]
    odd = [next(streams[g]) for g in group]
    data = bytes(byte for pair in zip(even, [*odd, 0], strict=False) for byte in pair)[:count]
    out = [0] * n
    for place, bit in zip(places, unpack(data, n, 1), strict=True):
        out[place] = bit
    return out


def read_signs(data, at, shapes):
    """Whether the values at these positions are negative, in the order of the positions."""
    c = Cursor(data)
    counts, lengths = zip(*((c.v(), c.v()) for _ in range(12)), strict=True)
    assert sum(counts) == len(at)
    streams = [iter(unpack(expand(c.take(b), width(n, 1)), n, 1)) for n, b in zip(counts, lengths, strict=True)]
    c.end()
    start, alike, others = 0, {}, []
    for r, s in shapes:
        if 2 <= min(r, s) <= 64 and 32 <= max(r, s) <= 1 << 20:
            alike.setdefault((min(r, s), max(r, s)), []).append((start, r, s))
        else:
            others += range(start, start + r * s)
        start += r * s
    sent = set(at)
    sign = {place: 1 - 2 * next(streams[0]) for place in others if place in sent}
    for (short, long), matrices in alike.items():
        ends = [min(32 * 4**i, long) for i in range(11) if i == 0 or 32 * 4 ** (i - 1) < long]
        for row, (first, end) in itertools.product(range(short), itertools.pairwise([0, *ends])):
            for begin, r, s in matrices:
                place = [[begin + (j * s + i if r > s else i * s + j) for j in range(end)] for i in range(row + 1)]
                earlier = [[sign.get(p, 0) for p in one] for one in place[max(0, row - 16) : row]]
                own = [sign.get(p, 0) for p in place[row][:first]]
                weight = [sum(x * y for x, y in zip(own, one, strict=False)) for one in earlier]
                for j in range(first, end):
                    if place[row][j] in sent:
                        score = sum(w * one[j] for w, one in zip(weight, earlier, strict=True))
                        group = min(11, (64 * abs(score) // (sum(map(abs, own)) + 4)).bit_length())
                        sign[place[row][j]] = (-1 if score < 0 else 1) * (1 - 2 * next(streams[group]))
    return [sign[place] < 0 for place in at]


def read_regions(data, length):
    """Bytes in four classes of regions of 128 bytes."""
    c = Cursor(data)
    regions = -(-length // 128)
    classes = unpack(c.take(width(regions, 2)), regions, 2)
    lengths = [c.v() for _ in range(3)]
    codes = [c.take(size) for size in lengths] + [c.take()]
    of = [classes[i // 128] for i in range(length)]
    streams = [iter(expand(code, of.count(i))) for i, code in enumerate(codes)]
    return bytes(next(streams[one]) for one in of)


def _from_gaps(gaps):
    out, at = [], -1
    for gap in gaps:
        at += gap + 1
        out.append(at)
    return out


# -- codecs ------------------------------------------------------------------------------------------------------------


def read_codec(codec, data, blocks, key):
    """The values of each block, row-major. Blocks are (name, shape, type).

    key: the key of the peer, the key of all clients and, for `masked`, the masks of the round by block.
    """
    codec = {"kind": codec} if isinstance(codec, str) else codec
    return globals()["_read_" + codec["kind"].replace("-", "_")](codec, data, blocks, key)


def count_of(blocks):
    return sum(math.prod(shape) for _, shape, _ in blocks)


def _read_raw(codec, data, blocks, key):
    c = Cursor(data)
    out = {name: _raw(c.take(math.prod(shape) * SIZE[kind]), kind) for name, shape, kind in blocks}
    c.end()
    return out


def _raw(data, kind):
    if kind == "b2":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    return list(struct.unpack(f"<{len(data) // SIZE[kind]}{LETTER[kind]}", data))


def _read_error_feedback(codec, data, blocks, key):
    return read_codec(codec.get("inner", "raw"), data, blocks, key)


def _read_chain(codec, data, blocks, key):
    *outer, inner = codec["parts"]
    for part in reversed(outer):
        inner = {**({"kind": part} if isinstance(part, str) else part), "inner": inner}
    return read_codec(inner, data, blocks, key)


def _read_route(codec, data, blocks, key):
    groups = {}
    for block in blocks:
        first = next(i for i, rule in enumerate(codec["rules"]) if _matches(block[0], rule["on"]))
        groups.setdefault(first, []).append(block)
    c, out = Cursor(data), {}
    for i in sorted(groups):
        part = c.take(c.v()) if i != max(groups) else c.take()
        own = (fold(key[0], "rule", i), *key[1:]) if i else key
        out |= read_codec(codec["rules"][i]["codec"], part, groups[i], own)
    return {name: out[name] for name, _, _ in blocks}


def _matches(name, patterns):
    hits = [p for p in patterns if fnmatchcase(name, p.removeprefix("!"))]
    return bool(hits) and not hits[-1].startswith("!")


def _read_rank_slice(codec, data, blocks, key):
    sliced = []
    for name, shape, kind in blocks:
        if len(shape) == 2 and _matches(name, codec["rows"]):
            shape = (min(codec["rank"], shape[0]), shape[1])
        elif len(shape) == 2 and _matches(name, codec["columns"]):
            shape = (shape[0], min(codec["rank"], shape[1]))
        sliced.append((name, shape, kind))
    decoded, out = read_codec(codec.get("inner", "raw"), data, sliced, key), {}
    for (name, whole, _), (_, part, _) in zip(blocks, sliced, strict=True):
        out[name] = decoded[name]
        if part != whole:
            rows = [[0.0] * whole[1] for _ in range(whole[0])]
            for i, value in enumerate(decoded[name]):
                rows[i // part[1]][i % part[1]] = value
            out[name] = [value for row in rows for value in row]
    return out


def _read_topk(codec, data, blocks, key):
    parts = [[block] for block in blocks] if codec.get("by") == "block" else [blocks]
    up, sizes = codec.get("rounding") == "up", [count_of(part) for part in parts]
    if codec.get("by") == "chunk":
        n, chunk = count_of(blocks), codec.get("chunk", 4096)
        sizes = [min(chunk, n - start) for start in range(0, n, chunk)]
    return _sparse(codec, Cursor(data), sum(kept(codec["density"], size, up) for size in sizes), blocks, key)


def _read_threshold(codec, data, blocks, key):
    c = Cursor(data)
    return _sparse(codec, c, c.v(), blocks, key)


def _sparse(codec, c, k, blocks, key):
    n = count_of(blocks)
    shapes = [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape)) for _, shape, _ in blocks]
    positions = Cursor(c.take(c.v()))
    has_signs = positions.data[:1] == b"\4"
    assert k >= 4096 or not has_signs
    signs = positions.take(1) and positions.take(positions.v()) if has_signs else b""
    at = read_positions(positions.take(), n, k, shapes)
    values = _inner(codec, c.take(), k, blocks, key)
    if has_signs:
        values = [-v if minus else v for v, minus in zip(values, read_signs(signs, at, shapes), strict=True)]
    return _scatter(at, values, blocks)


def _read_randomk(codec, data, blocks, key):
    n = count_of(blocks)
    k = kept(codec["density"], n)
    at = subset(fold(key[1] if codec.get("shared") else key[0], "randomk"), n, k)
    values = _inner(codec, data, k, blocks, key)
    if codec.get("unbiased", True):
        values = [_as(common(blocks), value * (n / k)) for value in values]
    return _scatter(at, values, blocks)


def subset(key, n, k):
    """Positions of a random subset of k of n."""
    if 2 * k > n:
        out = set(subset(key, n, n - k))
        return [i for i in range(n) if i not in out]
    draws = 64 if k < 32 else k + k * k // n + 8
    while True:
        drawn = [w * n >> 32 for w in philox64(key, draws) if w * n % 2**32 >= 2**32 % n]
        found = list(dict.fromkeys(drawn))
        if len(found) >= k:
            break
        draws += draws if k < 32 else draws // 8
    if k < 32:
        return sorted(found[:k])
    found.sort()
    out = set(subset(fold(key, "subset"), len(found), len(found) - k))
    return [position for i, position in enumerate(found) if i not in out]


def _read_masked(codec, data, blocks, key):
    masks, at, n = key[2], [], 0
    for name, shape, _ in blocks:
        size = math.prod(shape)
        at += [n + i for i in range(size) if name not in masks or masks[name][i]]
        n += size
    return _scatter(at, _inner(codec, data, len(at), blocks, key), blocks)


def kept(density, n, up=False):
    exact = round(density * n, 6)
    return min(n, max(1, math.ceil(exact) if up else math.floor(exact)))


def _inner(codec, data, k, blocks, key):
    return read_codec(codec.get("inner", "raw"), data, [("values", (k,), common(blocks))], key)["values"]


def common(blocks):
    kinds = {kind for _, _, kind in blocks}
    if not kinds:
        return "f4"
    if len(kinds) == 1:
        return kinds.pop()
    return "f8" if "f8" in kinds else "f4"


def _scatter(at, values, blocks):
    vector = [0.0] * count_of(blocks)
    for i, value in zip(at, values, strict=True):
        vector[i] = value
    return _split(vector, blocks)


def _split(vector, blocks):
    out, at = {}, 0
    for name, shape, kind in blocks:
        count = math.prod(shape)
        out[name] = [_as(kind, value) for value in vector[at : at + count]]
        at += count
    return out


def _as(kind, value):
    """A value rounded to a type, ties to even, and clamped to its range."""
    value = max(-MAX[kind], min(MAX[kind], value))
    if kind == "b2":  # struct has no bfloat16; codecs convert by way of float32
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return struct.unpack("<" + LETTER[kind], struct.pack("<" + LETTER[kind], value))[0]


def _read_quantize(codec, data, blocks, key):
    n, scheme, bits = count_of(blocks), codec.get("scheme", "block"), codec.get("bits", 8)
    c = Cursor(data)
    if n == 0:
        c.end()
        return _split([], blocks)
    if scheme in ("fp16", "bf16"):
        length = c.v()
        lower, high, low = expand(c.take(length), n), expand(c.take(), n), [0] * n
        for byte, i in zip(lower, sorted(range(n), key=lambda i: high[i]), strict=True):
            low[i] = byte
        rotated = [h << 8 | rest for h, rest in zip(high, low, strict=True)]
        words = b"".join(struct.pack("<H", t >> 1 | (t & 1) << 15) for t in rotated)
        return _split(_raw(words, "f2" if scheme == "fp16" else "b2"), blocks)
    if scheme == "uniform":
        least, most = struct.unpack("<ff", c.take(8))
        step = (most - least) / ((1 << bits) - 1)
        return _split([least + step * level for level in read_levels(c.take(), n, bits)], blocks)
    length = n if codec.get("per") == "tree" else min(codec.get("block", 256), n)
    if scheme == "sign-magnitude":
        zeros = c.v()
        where = set(read_positions(c.take(c.v()), n, zeros)) if zeros else set()
        groups = -(-(n - zeros) // length)
        sizes = _raw(c.take(4 * groups), "b2")
        found = read_levels(c.take(), n - zeros, 2) if groups else []
        signed = (
            (1 if level >> 1 else -1) * sizes[i // length + groups * (level & 1)] for i, level in enumerate(found)
        )
        return _split([0.0 if i in where else next(signed) for i in range(n)], blocks)
    scales = _raw(c.take(2 * -(-n // length)), "b2")
    if scheme == "sign":
        zeros = c.v()
        where = set(read_positions(c.take(c.v()), n, zeros)) if zeros else set()
        bits_of = iter(read_levels(c.take(), n - zeros, 1))
        levels = [0 if i in where else 2 * next(bits_of) - 1 for i in range(n)]
    else:
        bits = c.byte() if scheme == "qsgd" else bits
        highest = (1 << bits - 1) - 1
        levels = [level - highest for level in read_levels(c.take(), n, bits)]
    return _split([level * scales[i // length] for i, level in enumerate(levels)], blocks)


MODELS = [
    *(253, 1579, 5384, 12261, 21293, 30833, 39523, 46685, 52201, 56262, 59161, 61189, 62587, 63543, 64193, 64632),
    *(1311, 1966, 2949, 4260, 5898, 7864, 10486, 13763, 17695, 21627, 26214, 31457, 36045, 40632, 45220, 49807),
]


def read_integers(data, count):
    if count == 0:
        assert not data
        return []
    c = Cursor(data)
    first = c.byte()
    if count > 4096:
        return [level - (1 << first - 1) for level in read_levels(c.take(), count, first)]
    model, shift = first % 32, first // 32 % 4
    low = unpack(c.take(width(count, shift)), count, shift) if shift else [0] * count
    escapes = [c.v() for _ in range(c.v())] if first >= 128 else []
    out = []
    for symbol, rest in zip(_coded(c.take(), count, model), low, strict=True):
        further = escapes.pop(0) if abs(symbol) == 23 else 0
        out.append((symbol + (further if symbol > 0 else -further)) * 2**shift + rest)
    assert not escapes
    return out


def _coded(data, count, model):
    weights = [Fraction(MODELS[model], 1 << 16) ** (s * s if model < 16 else abs(s)) for s in range(-23, 24)]
    frequency = [1 + math.floor(w / sum(weights) * (2**14 - 47)) for w in weights]
    frequency[23] += 2**14 - sum(frequency)
    c, out = Cursor(data), []
    x = struct.unpack("<I", c.take(4))[0]
    for _ in range(count):
        t, s, before = x % 2**14, 0, 0
        while t >= before + frequency[s]:
            before, s = before + frequency[s], s + 1
        out.append(s - 23)
        x = frequency[s] * (x >> 14) + t - before
        if x < 2**16:
            x = x * 2**16 + struct.unpack("<H", c.take(2))[0]
    assert x == 2**16
    c.end()
    return out


def _read_lattice(codec, data, blocks, key):
    c = Cursor(data)
    exponents = struct.unpack(f"<{len(blocks)}b", c.take(len(blocks)))
    levels = read_integers(c.take(), count_of(blocks))
    if codec.get("dither"):
        words = philox64(fold(key[0], "quantise"), len(levels))
        levels = [_as("f4", q - ((w >> 8) / 2**24 - 0.5)) for q, w in zip(levels, words, strict=True)]
    values, out = iter(levels), {}
    for (name, shape, kind), exponent in zip(blocks, exponents, strict=True):
        assert -126 <= exponent <= 100
        out[name] = [_as(kind, next(values) * 2.0**exponent) for _ in range(math.prod(shape))]
    return out


def _read_lattice_sum(codec, data, blocks, key):
    return (_read_raw, _read_lattice, _read_sparse_lattice)[data[0]](codec, data[1:], blocks, key)


def _read_sparse_lattice(codec, data, blocks, key):
    c, n = Cursor(data), count_of(blocks)
    exponents, k = struct.unpack(f"<{len(blocks)}b", c.take(len(blocks))), c.v()
    at, levels = read_positions(c.take(c.v()), n, k), [0] * n
    for i, level in zip(at, read_integers(c.take(), k), strict=True):
        levels[i] = level + 1 if level >= 0 else level
    steps = [2.0**x for (_, shape, _), x in zip(blocks, exponents, strict=True) for _ in range(math.prod(shape))]
    return _split([level * step for level, step in zip(levels, steps, strict=True)], blocks)


def _read_binary(codec, data, blocks, key):
    c, n, given = Cursor(data), count_of(blocks), codec["levels"]
    groups, start = [], 0
    for _, shape, _ in blocks:
        groups.append(range(start, start := start + math.prod(shape)))
    if len(key) > 3:  # values that both ends know
        x = [value for name, _, _ in blocks for value in key[3][name]]
        of = [max(0, min(15, math.floor((x[i] - given[0]) * (16 / (given[1] - given[0]))))) for i in range(n)]
        groups = [[i for i in range(n) if of[i] == g] for g in range(16)]
    groups = [at for at in groups if at]
    counts = [(len(at), c.v()) for at in groups]
    bits = [0] * n
    for at, group in zip(groups, read_bits(c.take(), counts), strict=True):
        for i, bit in zip(at, group, strict=True):
            bits[i] = bit
    out, start = {}, 0
    for name, shape, kind in blocks:
        out[name] = [_as(kind, given[bit]) for bit in bits[start : start + math.prod(shape)]]
        start += math.prod(shape)
    return out


def read_bits(data, counts):
    """Groups of n bits, k of them ones."""
    sizes = [-(-n // 8) if 0 < k < n else 0 for n, k in counts]
    packed = Cursor(data if len(data) == sum(sizes) else _coded_bytes(data, counts, sizes))
    out = []
    for (n, k), size in zip(counts, sizes, strict=True):
        part = packed.take(size)
        bits = [part[i // 8] >> i % 8 & 1 for i in range(8 * size)] or [int(k > 0)] * n
        assert sum(bits) == sum(bits[:n]) == k
        out.append(bits[:n])
    packed.end()
    return out


def _coded_bytes(data, counts, sizes):
    size = sum(sizes)
    assert len(data) < size
    count, c, out = max(1, size // 8192), Cursor(data), bytearray()
    states = list(struct.unpack(f"<{count}Q", c.take(8 * count)))
    for (n, k), own in zip(counts, sizes, strict=True):
        q = max(1, min(65535, 65536 * k // n))
        weights = [q ** s.bit_count() * (65536 - q) ** (8 - s.bit_count()) for s in range(256)]
        frequency = [1 + weight * (2**20 - 256) // sum(weights) for weight in weights]
        frequency[frequency.index(max(frequency))] += 2**20 - sum(frequency)
        before = list(itertools.accumulate(frequency, initial=0))
        for _ in range(own):
            x = states[len(out) % count]
            t = x % 2**20
            s = next(s for s in range(256) if before[s] <= t < before[s + 1])
            x = frequency[s] * (x >> 20) + t - before[s]
            states[len(out) % count] = x if x >= 2**32 else x * 2**32 + struct.unpack("<I", c.take(4))[0]
            out.append(s)
    assert states == [2**32] * count
    c.end()
    return bytes(out)


def _read_eden(codec, data, blocks, key):
    n, bits, c, vector = count_of(blocks), codec.get("bits", 2.0), Cursor(data), []
    signs = philox(fold(key[0], "rotation"), -(-n // 32))
    while (left := n - (start := len(vector))) > 0:
        power = 1 << left.bit_length() - 1
        length = power if power == left or left >= 64 else 2 * power
        length = min(length, 1 << 16)
        (scale,) = struct.unpack("<f", c.take(4))
        assert 0 <= scale < math.inf
        levels = _eden_levels(c, bits, length, philox(fold(key[0], "eden", start), 2))
        if length <= 1 << 13:
            again = philox(fold(key[0], "rotation", start), -(-length // 32))
            turned = [(v if again[i // 32] >> i % 32 & 1 else -v) for i, v in enumerate(_hadamard(levels))]
            levels = [_as("f4", v / length) for v in turned]
        for i, value in enumerate(_hadamard(levels)[:left]):
            plus = signs[(start + i) // 32] >> (start + i) % 32 & 1
            vector.append(_as("f4", (value if plus else -value) * scale))
    c.end()
    return _split(vector, blocks)


def _eden_levels(c, bits, length, words):
    low = math.floor(bits)
    more = round((bits - low) * length)
    groups = [(more, low + 1), (length - more, low)] if low else [(max(1, more), 1)]
    order = [(i * (words[0] | 1) + words[1]) % length for i in range(length)]
    if not more and low:
        order = list(range(length))
    out = [0.0] * length
    for count, width_of in groups:
        planes = [c.take(-(-count // 8)) for _ in range(width_of)]
        for i in range(count):
            level = sum((plane[i // 8] >> 7 - i % 8 & 1) << bit for bit, plane in enumerate(planes))
            out[order.pop(0)] = normal_levels(width_of)[level]
    return out


@cache
def normal_levels(bits):
    """The levels that represent N(0, 1) with the least error: each is moved to its mean until nothing changes."""
    count = 1 << bits
    levels = [(2 * i + 1 - count) / count * 2 for i in range(count)]
    for _ in range(20_000):
        edges = [-40.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), 40.0]
        before, levels = levels, []
        for low, high in itertools.pairwise(edges):
            mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
            levels.append((math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi) / mass)
        if max(abs(a - b) for a, b in zip(before, levels, strict=True)) < 1e-13:
            break
    return [round(level * 2**20) / 2**20 for level in levels]


def _hadamard(x):
    k = len(x).bit_length() - 1
    for bit in (*range(k // 2, k), *range(k // 2)):
        x = [_as("f4", x[i ^ 1 << bit] - x[i] if i >> bit & 1 else x[i] + x[i ^ 1 << bit]) for i in range(len(x))]
    return x


def _read_power_sgd(codec, data, blocks, key):
    rank, sent, whole = codec.get("rank", 2), [], []
    for name, shape, kind in blocks:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 0)
        if rank * (rows + columns) < rows * columns:
            sent += [(name + " p", (rows, rank), kind), (name + " q", (columns, rank), kind)]
        else:
            sent.append((name, shape, kind))
            whole.append(name)
    got = read_codec(codec.get("inner", "raw"), data, sent, key)
    out = {}
    for name, shape, kind in blocks:
        if name in whole:
            out[name] = got[name]
            continue
        p, q, values = got[name + " p"], got[name + " q"], []
        for i in range(shape[0]):
            for j in range(math.prod(shape[1:])):
                total = 0.0
                for k in range(rank):
                    total = _as("f4", total + _as("f4", p[i * rank + k] * q[j * rank + k]))
                values.append(_as(kind, total))
        out[name] = values
    return out
