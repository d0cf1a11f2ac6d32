"""Measure the codecs on real updates: bytes, how near they are to the bound, and how fast they are.

    THINWIRE_DATA=data python benchmarks/codecs.py

An update is what some local steps on MNIST (the digits of scikit-learn where THINWIRE_DATA is not set) do to the
weights of CNN-2 and of a wide perceptron. The bound is the zero-order entropy of the levels that were sent, plus
log2 C(n, k) bits for which k of n, plus whatever else is in the message as it is; an update whose levels or positions
depend on each other may stay below. MB/s are of the update in float32, the best of several runs on one core.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import nn

from thinwire.codecs import ErrorFeedback, Peer, Quantise, RandomK, Raw, TopK, indices, symbols
from thinwire.codecs.base import Codec
from thinwire.core.rng import Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, sub
from thinwire.models.cnn import cnn2
from thinwire.tasks.digits import digits
from thinwire.tasks.idx import mnist

CODECS: tuple[Codec, ...] = (
    Raw(),
    Quantise(8),
    Quantise(4),
    Quantise(2),
    Quantise(8, "uniform"),
    Quantise(8, "qsgd"),
    Quantise(8, "qsgd", per="tree"),
    Quantise(scheme="fp16"),
    Quantise(scheme="bf16"),
    Quantise(scheme="sign"),
    TopK(0.25),
    TopK(0.1),
    TopK(0.01),
    TopK(0.1, inner=Quantise(8)),
    TopK(0.1, inner=Quantise(4)),
    ErrorFeedback(TopK(0.01, inner=Quantise(4))),
    RandomK(0.1, inner=Quantise(8)),
)


def update(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], steps: int) -> Tree:
    """What some steps of SGD do to the weights."""
    x, y = data
    start = {name: block.detach().clone() for name, block in model.named_parameters()}
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for i in range(steps):
        rows = Key(0).fold("batch", i).integers(32, len(x))
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
    return sub({name: block.detach() for name, block in model.named_parameters()}, start)


@contextmanager
def counted() -> Iterator[list[float]]:
    """Sums up, over all levels and positions that are encoded meanwhile: bound in bytes, bytes made."""
    total = [0.0, 0.0]
    levels, positions = symbols.encode, indices.encode

    def count_levels(values: np.ndarray, bits: int) -> bytes:
        data = levels(values, bits)
        share = np.unique(values, return_counts=True)[1] / len(values)
        total[0] -= float((share * np.log2(share)).sum()) * len(values) / 8
        total[1] += len(data)
        return data

    def count_positions(at: np.ndarray, n: int) -> bytes:
        data, k = positions(at, n), len(at)
        total[0] += (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / 8
        total[1] += len(data)
        return data

    symbols.encode, indices.encode = count_levels, count_positions
    try:
        yield total
    finally:
        symbols.encode, indices.encode = levels, positions


def best(call: Callable[[], object], seconds: float) -> float:
    """The shortest time of one call, over some seconds of calls."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def short(codec: Codec) -> str:
    """Its repr without what is as by default."""
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


def main() -> None:
    """Print one table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=40, help="local steps behind the update")
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each measurement")
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = mnist() if os.environ.get("THINWIRE_DATA") else digits()
    data = source.train.gather(torch.arange(600))
    side = data[0].shape[-1]
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(side**2, 800), nn.ReLU(), nn.Linear(800, 400), nn.ReLU())
    for name, model in (("CNN-2", cnn2(size=side)), ("perceptron", wide.append(nn.Linear(400, 10)))):
        tree = update(model, data, args.steps)
        spec, peer = Spec.of(tree), Peer(Key(0))
        print(f"\n{name}, {side}x{side}: {spec.size:,} numbers, {args.steps} steps\n")
        print("| codec | bytes | of raw | of bound | error | encode MB/s | decode MB/s |")
        print("|---|---|---|---|---|---|---|")
        for codec in CODECS:
            state = codec.init(spec)
            with counted() as total:
                made, _ = codec.encode(tree, state, peer)
            bound = len(made) - total[1] + total[0]
            ratio = f"{len(made) / bound:.3f}" if total[1] else "-"
            back = codec.decode(made, spec, peer)
            wrong = sum(float((back[b] - tree[b]).square().sum()) for b in tree)
            error = math.sqrt(wrong / sum(float(tree[b].square().sum()) for b in tree))
            enc = best(partial(codec.encode, tree, state, peer), args.seconds)
            dec = best(partial(codec.decode, made, spec, peer), args.seconds)
            print(
                f"| {short(codec)} | {len(made):,} | {len(made) / spec.nbytes:.4f} | {ratio} "
                f"| {error:.4f} | {spec.nbytes / enc / 1e6:.0f} | {spec.nbytes / dec / 1e6:.0f} |"
            )


if __name__ == "__main__":
    main()
