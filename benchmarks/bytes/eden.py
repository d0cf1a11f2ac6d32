"""EDEN: error, bias, speed and the memory of its decoder, on normal values and on a real update.

    python benchmarks/bytes/eden.py --docs docs

Error: |decoded - x|^2 / |x|^2, of 1,000,000 normal values, and of the update of one client of CNN on CIFAR-10
(`codecs.py`), the mean of 20 keys. Bias: the mean over 200 keys of the sum of decoded values minus that of
x, for 4,096 values of the update, in standard errors. MB/s count 4 bytes a value, on one core, both ways including the
rotation: the shortest CPU time of several calls. Memory: the peak of a decoder of one piece (65,536 values, the worst
case) by tracemalloc, in units of these values. Exits with 1 if a limit does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tracemalloc
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.bytes.codecs import FAST, speed, update
from benchmarks.page import write_part
from thinwire.codecs import Eden, Peer
from thinwire.codecs.eden import LONGEST, TWICE, pieces
from thinwire.core.key import Key
from thinwire.core.tree import Spec, join

EXPECTED = {1: 0.571, 2: 0.133, 3: 0.0358, 4: 0.0096}  # D / (1 - D) of the best scalar quantizer of N(0, 1)
NEAR, ERRORS, MEMORY = 0.02, 4.0, 4.0  # limits: relative to the expected error; standard errors; times the values
COMMAND = "python benchmarks/bytes/eden.py --docs docs"


def sent(codec: Eden, x: torch.Tensor, seed: int) -> torch.Tensor:
    """What arrives of a vector."""
    tree, peer = {"x": x}, Peer(Key(seed))
    return codec.decode(codec.encode(tree, {}, peer)[0], Spec.of(tree), peer)["x"]


def error(codec: Eden, x: torch.Tensor) -> float:
    """The mean normalized error over 20 keys."""
    runs = ((sent(codec, x, seed).double() - x).square().sum() / x.double().square().sum() for seed in range(20))
    return statistics.fmean(map(float, runs))


def bias(codec: Eden, x: torch.Tensor, keys: int = 200) -> float:
    """The mean difference of sums over keys, in standard errors."""
    off = [float((sent(codec, x, seed).double() - x).sum()) for seed in range(keys)]
    return statistics.fmean(off) / (statistics.stdev(off) / keys**0.5)


def in_short_pieces(x: torch.Tensor) -> float:
    """The share of |x|^2 that is in pieces which are rotated twice."""
    short = [x[p.start : p.start + p.values] for p in pieces(len(x)) if p.length <= TWICE]
    return sum(float(own.double().square().sum()) for own in short) / float(x.double().square().sum())


def decoder_memory(codec: Eden) -> float:
    """The peak of a decoder of one piece, in units of its values."""
    tree, peer = {"x": Key(1).normal(LONGEST)}, Peer(Key(2))
    data, _ = codec.encode(tree, {}, peer)
    tracemalloc.start()
    codec.decode(data, Spec.of(tree), peer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (4 * LONGEST)


def main() -> None:
    """Measure, print, and with --docs write the table into the page on codecs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the documentation folder; its methods/codecs.md gets the table")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement of speed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    normal, real = Key(3).normal(1_000_000), join(update("cifar10", 20))
    lines = [("bits", "expected error", "normal values", "real update", "bias", "encode MB/s", "decode MB/s", "memory")]
    lines, missed = [*lines, ("---",) * len(lines[0])], []
    for bits, expected in EXPECTED.items():
        codec, spec, peer = Eden(bits), Spec.of({"x": real}), Peer(Key(0))
        data, _ = codec.encode({"x": real}, {}, peer)
        both = (error(codec, normal), error(codec, real))
        off, memory = bias(codec, real[:4096]), decoder_memory(codec)
        fast = (
            speed(lambda c=codec, p=peer: c.encode({"x": real}, {}, p), 4 * len(real), options.seconds),
            speed(lambda c=codec, d=data, s=spec, p=peer: c.decode(d, s, p), 4 * len(real), options.seconds),
        )
        for what, one in zip(("normal values", "the update"), both, strict=True):
            if abs(one / expected - 1) > NEAR:
                missed.append(f"the error of {what} at {bits} bits is {one / expected - 1:+.1%}")
        missed += [f"the bias at {bits} bits is {off:+.1f} standard errors"] if abs(off) > ERRORS else []
        missed += [f"{min(fast):.0f} MB/s at {bits} bits"] if min(fast) < FAST else []
        missed += [f"memory at {bits} bits is {memory:.1f} times the values"] if memory > MEMORY else []
        lines.append((str(bits), f"{expected:g}", *(f"{one:.4f}" for one in both), f"{off:+.1f}"))
        lines[-1] = (*lines[-1], *(f"{one:.0f}" for one in fast), f"{memory:.1f}")
    limits = (
        f"error within {NEAR:.0%} of the expected one, bias within {ERRORS:g} standard errors, {FAST:g} MB/s, memory"
    )
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text += f"\n\nLimits: {limits} {MEMORY:g} times the values. "
    text += f"Of the squared length of the update {in_short_pieces(real):.0%} is in pieces of up to {TWICE:,} values. "
    text += f"Missed: {'; '.join(missed)}." if missed else "They hold."
    print(text)
    if options.docs:
        write_part(options.docs / "methods/codecs.md", "eden", text, COMMAND)
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
