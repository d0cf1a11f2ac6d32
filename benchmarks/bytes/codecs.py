"""Measure the codecs on real updates: size, ratio to the bound, speed, and the size of Flower's arrays.

    THINWIRE_DATA=data python benchmarks/bytes/codecs.py --docs docs --flower path/to/python/with/flwr

An update is the change of the weights after some local steps of one client: CNN-2 on Fashion-MNIST, a CNN on CIFAR-10
and the LSTM on Shakespeare, with the partition and the learning rate of the task preset. Without `--docs` the tables
are only printed. Exits with 1 if a check fails.

The bound is the zero-order entropy of the levels, plus log2 C(n, k) bits for the positions, plus the other bytes of the
message; an update with dependent levels or positions may be smaller. MB/s count 4 bytes for each value that is sent, on
one core: the shortest CPU time of several calls, for the whole codec: drawing positions and random words, and selecting
the k largest of all values, are included. Two more columns divide top-k's encoding: "after selection" in bytes of
what is sent, "select" in bytes of the whole update. The limit on speed applies to every codec. Lines without a limit
state the speed of top-k and random-k as compressors usually count it: 4 bytes for each value of the update, also for
those that are not sent.

Each kind of machine has its own section of the page.

Flower's bytes are computed by its own code: arrays through `np.save` into a RecordDict, as protobuf. The arrays are
those that a user would send for the same values: the smallest numpy type for each level (signs packed), the scales as
float32, and for sparse updates int32 positions with their values, or the dense update if that is smaller.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.page import write_part
from thinwire.codecs import ErrorFeedback, Peer, Quantize, RandomK, Raw, TopK
from thinwire.codecs.base import Codec
from thinwire.codecs.quantize import read_scales
from thinwire.codecs.sparse import pack_sparse
from thinwire.core.key import Key
from thinwire.core.selection import kept, largest_of, random_subset
from thinwire.core.tree import Spec, Tree, gather, parts, sub
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.wire import indices, symbols
from thinwire.wire.row_bits import Shapes

CODECS: tuple[Codec, ...] = (
    Raw(),
    Quantize(8),
    Quantize(4),
    Quantize(2),
    Quantize(8, "uniform"),
    Quantize(8, "qsgd"),
    Quantize(scheme="fp16"),
    Quantize(scheme="bf16"),
    Quantize(scheme="sign"),
    TopK(0.25),
    TopK(0.1),
    TopK(0.01),
    TopK(0.1, inner=Quantize(8)),
    TopK(0.1, inner=Quantize(4)),
    ErrorFeedback(TopK(0.01, inner=Quantize(4))),
    RandomK(0.1, inner=Quantize(8)),
)
TASKS = {"CNN-2, Fashion-MNIST": "fashion-mnist", "CNN, CIFAR-10": "cifar10", "LSTM, Shakespeare": "shakespeare"}
RANDOM_SETS = (
    (40_000, 4_000),
    (400_000, 4_000),
    (16_000, 8_000),
    (100_000, 10_000),
    (1_000_000, 10_000),
    (1_000_000, 100_000),
    (1_000_000, 125_000),
    (1_000_000, 250_000),
    (1_000_000, 500_000),
    (10_000_000, 100_000),
    (10_000_000, 1_000_000),
)
NEAR, FAST, MANY = 1.03, 100.0, 100_000  # limits: ratio to the bound; MB/s, for updates with at least this many values


def update(task: str, steps: int) -> Tree:
    """The change of the weights after some steps of SGD of client 0."""
    experiment = resolve("fedavg", on=task)
    data = build_job(experiment, None).task
    model, mine = data.model, data.clients.client(0)
    start = {name: block.detach().clone() for name, block in model.named_parameters()}
    opt = torch.optim.SGD(model.parameters(), lr=experiment.method.client_opt.lr)
    for i in range(steps):
        rows = Key(0).fold("batch", i).integers(experiment.local.batch, len(mine)).numpy()
        x, y = data.train.gather(torch.from_numpy(mine[rows]))
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return sub({name: block.detach() for name, block in model.named_parameters()}, start)


# -- bounds ------------------------------------------------------------------------------------------------------------


def position_bound(n: int, k: int) -> float:
    """log2 C(n, k) in bytes."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / 8


@contextmanager
def counted() -> Iterator[list[float]]:
    """Sum of bound and actual bytes over all levels and positions that are encoded within the context."""
    total = [0.0, 0.0]
    levels, positions = symbols.encode, indices.encode

    def count_levels(values: np.ndarray, bits: int) -> bytes:
        data = levels(values, bits)
        share = np.unique(values, return_counts=True)[1] / len(values)
        total[0] -= float((share * np.log2(share)).sum()) * len(values) / 8
        total[1] += len(data)
        return data

    def count_positions(at: np.ndarray, n: int, *more: Shapes) -> bytes:
        data = positions(at, n, *more)
        total[0] += position_bound(n, len(at))
        total[1] += len(data)
        return data

    symbols.encode, indices.encode = count_levels, count_positions
    try:
        yield total
    finally:
        symbols.encode, indices.encode = levels, positions


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(call: Callable[[], object], size: int, seconds: float) -> float:
    """MB/s by the shortest CPU time of a call, each measured over several calls."""
    start = time.thread_time()
    call()
    often = max(1, int(0.01 / max(1e-9, time.thread_time() - start)))  # the clock has overhead
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.thread_time()
        for _ in range(often):
            call()
        times.append((time.thread_time() - start) / often)
    return size / min(times) / 1e6


class Speeds(NamedTuple):
    """The number of values sent, and MB/s; the last two for top-k only."""

    sent: int
    encode: float
    decode: float
    pack: float | None = None  # encoding after the selection
    select: float | None = None  # of the whole update


def speeds(codec: Codec, tree: Tree, made: bytes, seconds: float) -> Speeds:
    """Measure a codec."""
    spec, peer = Spec.of(tree), Peer(Key(0))
    inner = codec.inner if isinstance(codec, ErrorFeedback) else codec
    sent = kept(inner.density, spec.size) if isinstance(inner, RandomK | TopK) else spec.size
    encode, decode = partial(inner.encode, tree, inner.init(spec), peer), partial(inner.decode, made, spec, peer)
    both = speed(encode, 4 * sent, seconds), speed(decode, 4 * sent, seconds)
    if not isinstance(inner, TopK):
        return Speeds(sent, *both)
    find = partial(largest_of, parts(tree), sent)
    pack = partial(pack_sparse, *find(), spec, inner.inner, peer)
    return Speeds(sent, *both, speed(pack, 4 * sent, seconds), speed(find, 4 * spec.size, seconds))


# -- tables and checks -------------------------------------------------------------------------------------------------


class Checks:
    """Checks against limits."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.missed = 0

    def hold(self, what: str, values: list[tuple[float, str]], limit: float, most: bool) -> None:
        """Check that all values are at most (or at least) the limit."""
        worst, where = max(values) if most else min(values)
        passed = worst <= limit if most else worst >= limit
        self.missed += not passed
        sign = "<=" if most else ">="
        self.lines.append(f"| {what} | {sign} {limit:g} | {worst:.4g} ({where}) | {'pass' if passed else 'FAIL'} |")

    def show(self, what: str, values: list[tuple[float, str]]) -> None:
        """List the smallest value, without a limit."""
        least, where = min(values)
        self.lines.append(f"| {what} | none | {least:.4g} ({where}) | |")

    def table(self) -> str:
        """The table of all checks."""
        return "\n".join(["| check | limit | worst | |", "|---|---|---|---|", *self.lines])


def _draws(codec: Codec) -> bool:
    """Whether it draws random numbers."""
    return isinstance(codec, RandomK) or (isinstance(codec, Quantize) and codec.scheme == "qsgd")


def words_speed(seconds: float) -> float:
    """MB/s of the random generator, 4 bytes per word: an upper bound for those codecs."""
    return speed(partial(Key(0).cpu_words, 1_000_000), 4_000_000, seconds)


def bounds(tree: Tree, seconds: float) -> tuple[float, float]:
    """MB/s of three steps alone of random-k and of top-k (density 0.1, int8), each one call of numpy or zlib.

    The search is among as many marks as each has. Its speed depends on their share: numpy has two ways.
    """
    spec, peer = Spec.of(tree), Peer(Key(0))
    n, k = spec.size, kept(0.1, spec.size)
    draws = k + k * k // n
    some, (at, values) = random_subset(peer.key, n, k), largest_of(parts(tree), k)
    different = random_subset(peer.key, n, draws - draws * draws // (2 * n))  # about as many as the draws have
    random_marks, marks = marked(different, n), marked(at, n)
    random_levels, levels = levels_of(gather(parts(tree), some)), levels_of(values)

    def drawn() -> None:
        peer.key.cpu_words(draws)
        np.flatnonzero(random_marks)
        symbols.encode(random_levels, 8)

    def selected() -> None:
        np.flatnonzero(marks)
        indices.encode(at, n)
        symbols.encode(levels, 8)

    return speed(drawn, 4 * k, seconds), speed(selected, 4 * k, seconds)


def marked(at: np.ndarray, n: int) -> np.ndarray:
    """n marks, set at these positions."""
    marks = np.zeros(n, bool)
    marks[at] = True
    return marks


def levels_of(values: torch.Tensor) -> np.ndarray:
    """The levels of int8 that these values have."""
    data, _ = Quantize(8).encode({"values": values}, {}, Peer(Key(0)))
    return symbols.decode(read_scales(data, -(-len(values) // 256))[1], len(values), 8)


def short(codec: Codec) -> str:
    """The repr of a codec without default settings."""
    out = repr(codec)
    for default in (
        ", block=256",
        ", stochastic=False",
        ", per='block'",
        ", scheme='block'",
        ", by='tree'",
        ", rounding='down'",
        ", inner=Raw()",
        ", unbiased=True",
        ", shared=False",
    ):
        out = out.replace(default, "")
    return out.replace("bits=8, scheme", "scheme")


def random_sets(seconds: float, near: list, fast: list) -> str:
    """Measure positions of random sets of k of n."""
    lines = ["| n | k | form | bytes | of bound | encode MB/s | decode MB/s |", "|---|---|---|---|---|---|---|"]
    for n, k in RANDOM_SETS:
        at = np.sort(np.random.default_rng(0).choice(n, k, replace=False))
        data = indices.encode(at, n)
        ratio = len(data) / position_bound(n, k)
        enc = speed(partial(indices.encode, at, n), 4 * k, seconds)
        dec = speed(partial(indices.decode, data, n, k), 4 * k, seconds)
        near.append((ratio, f"{k:,} of {n:,}"))
        if k >= MANY:
            fast += [(enc, f"encoding {k:,} of {n:,}"), (dec, f"decoding {k:,} of {n:,}")]
        form = ("gaps", "bitmap", "rice", "rows")[data[0]]
        lines.append(f"| {n:,} | {k:,} | {form} | {len(data):,} | {ratio:.4f} | {enc:.0f} | {dec:.0f} |")
    return "\n".join(lines)


def model_table(label: str, tree: Tree, steps: int, seconds: float, python: str, found: dict[str, list]) -> str:
    """Measure an update; one row per codec."""
    spec, peer = Spec.of(tree), Peer(Key(0))
    lines = [
        f"**{label}**: {spec.size:,} values, {steps} steps of one client.",
        "",
        "| codec | bytes | bound | ratio | encode MB/s | decode MB/s | Flower | times fewer "
        "| after selection | select |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    theirs, how = flower_bytes([flower_arrays(codec, spec) for codec in CODECS], python)
    found["backend"] = [how]
    for codec, flower in zip(CODECS, theirs, strict=True):
        with counted() as total:
            made, _ = codec.encode(tree, codec.init(spec), peer)
        bound = len(made) - total[1] + total[0]
        sent, enc, dec, pack, find = speeds(codec, tree, made, seconds)
        where = f"{short(codec)}, {label}"
        if codec in (Quantize(8), Quantize(4)):
            found["levels"].append((len(made) / bound, where))
        if isinstance(codec, TopK) and codec.inner == Raw() and sent >= 4000:
            found["real"].append((total[1] / total[0], where))
        if sent >= MANY:
            kind = "drawn" if _draws(codec) else "fast"
            found["selected" if pack else kind].append((enc, f"encoding {where}"))
            found[kind] += [(dec, f"decoding {where}")] + ([(pack, f"encoding {where}")] if pack else [])
            whole = spec.size / sent
            found["whole"] += [(whole * enc, f"encoding {where}"), (whole * dec, f"decoding {where}")]
        cells = [
            short(codec),
            f"{len(made):,}",
            f"{bound:,.0f}",
            f"{len(made) / bound:.3f}",
            f"{enc:.0f}",
            f"{dec:.0f}",
        ]
        cells += [f"{flower:,}", f"{flower / len(made):.2f}", *(f"{rate:.0f}" if rate else "" for rate in (pack, find))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# -- what a user of Flower would send: the size of its arrays for the values of a codec --------------------------------

Arrays = list[tuple[str, list[int]]]  # type and shape of each
IN_FLOWER = """
import json, sys
import numpy as np
from flwr.common import ArrayRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
def size(arrays):
    record = ArrayRecord([np.zeros(shape, kind) for kind, shape in arrays])
    return len(recorddict_to_proto(RecordDict({"update": record})).SerializeToString())
print(json.dumps([size(arrays) for arrays in json.load(sys.stdin)]))
"""


def flower_arrays(codec: Codec, spec: Spec) -> list[Arrays]:
    """Ways to send the same values as arrays; the smallest is used."""
    dense: Arrays = [("f4", list(block.shape)) for block in spec]
    inner = codec.inner if isinstance(codec, ErrorFeedback) else codec
    if isinstance(inner, TopK):
        k = kept(inner.density, spec.size)
        return [dense, [("i4", [k]), *_values(inner.inner, k)]]
    if isinstance(inner, RandomK):
        return [_values(inner.inner, kept(inner.density, spec.size))]
    if isinstance(inner, Quantize):
        kind, *scales = _values(inner, spec.size)
        packed = inner.scheme == "sign"
        return [[(kind[0], [-(-b.numel // 8)] if packed else list(b.shape)) for b in spec] + scales]
    return [dense]


def _values(codec: Codec, k: int) -> Arrays:
    if not isinstance(codec, Quantize):
        return [("f4", [k])]
    if codec.scheme in ("fp16", "bf16"):
        return [("u2", [k])]
    if codec.scheme == "uniform":
        return [("u1" if codec.bits <= 8 else "u2", [k]), ("f4", [2])]
    kind = ("u1", [-(-k // 8)]) if codec.scheme == "sign" else ("i1" if codec.bits <= 8 else "i2", [k])
    return [kind, ("f4", [1 if codec.per == "tree" else -(-k // codec.block)])]


def flower_bytes(sent: list[list[Arrays]], python: str) -> tuple[list[int], str]:
    """The size of Flower's message for each, and how it was computed."""
    flat = [arrays for ways in sent for arrays in ways]
    done = subprocess.run(
        [python, "-c", IN_FLOWER], input=json.dumps(flat), capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        sizes, how = json.loads(done.stdout), "Flower's bytes: a RecordDict as protobuf, serialized by flwr."
    else:
        sizes = [sum(_saved(kind, shape) for kind, shape in arrays) for arrays in flat]
        how = "Flower's bytes: `np.save` of each array only, because flwr is not installed."
    left = iter(sizes)
    return [min(next(left) for _ in ways) for ways in sent], how


def _saved(kind: str, shape: list[int]) -> int:
    out = io.BytesIO()
    np.save(out, np.zeros(shape, kind))
    return out.tell()


def main() -> None:
    """Print the tables and checks, and with --docs write them into benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="local steps of an update")
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each measurement")
    parser.add_argument("--docs", type=Path, help="the documentation folder; its benchmarks.md is updated")
    parser.add_argument("--flower", default=sys.executable, help="a Python interpreter with flwr")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list] = {"near": [], "fast": [], "levels": [], "real": [], "backend": [], "drawn": []}
    found |= {"selected": [], "whole": [], "words": [], "codes": []}
    parts = [
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, "
        "one core.",
        "Positions of random sets:",
        random_sets(options.seconds, found["near"], found["fast"]),
    ]
    for label, task in TASKS.items():
        tree = update(task, options.steps)
        parts.append(model_table(label, tree, options.steps, options.seconds, options.flower, found))
        if kept(0.1, Spec.of(tree).size) >= MANY:
            for name, rate in zip(("words", "codes"), bounds(tree, options.seconds), strict=True):
                found[name].append((rate, label))
    checks = Checks()
    checks.hold("positions of random sets, k >= 4,000: bytes of log2 C(n, k)", found["near"], NEAR, most=True)
    checks.hold("positions of real top-k sets, k >= 4,000: the same", found["real"], NEAR, most=True)
    checks.hold("int8 and int4 with block scales: bytes of entropy and scales", found["levels"], NEAR, most=True)
    checks.hold(
        f"MB/s of encoding and decoding, {MANY:,} values or more, without selection", found["fast"], FAST, most=False
    )
    for name, what in (("qsgd", "qsgd"), ("RandomK", "random-k")):
        rates = [v for v in found["drawn"] if name in v[1]]
        checks.hold(f"the same of {what}, including random numbers", rates, FAST, most=False)
    checks.hold("the same of encoding by top-k, including the selection", found["selected"], FAST, most=False)
    steps = "search for marked positions, int8 levels coded by zlib"
    checks.show(f"MB/s of three steps of random-k alone: random words, {steps}", found["words"])
    checks.show(f"MB/s of three steps of top-k alone: positions coded by zlib, {steps}", found["codes"])
    for name, what in (("RandomK", "random-k"), ("TopK", "top-k, including the selection")):
        rates = [v for v in found["whole"] if name in v[1]]
        checks.show(f"MB/s of {what}, counted as 4 bytes for each value of the update, sent or not", rates)
    checks.show(
        "MB/s of the random generator", [(words_speed(options.seconds), "4 bytes for each word of Philox4x64-10")]
    )
    parts[1:1] = [checks.table(), *found["backend"]]
    text = "\n\n".join(parts)
    print(text)
    if options.docs:
        name, command = f"codecs-{platform.machine()}", "python benchmarks/bytes/codecs.py --docs docs"
        write_part(options.docs / "benchmarks.md", name, text, command)
    sys.exit(1 if checks.missed else 0)


if __name__ == "__main__":
    main()
