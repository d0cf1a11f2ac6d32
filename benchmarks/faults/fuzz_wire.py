"""Fuzz every function that reads messages with damaged and forged messages, and count the outcomes.

    python benchmarks/faults/fuzz_wire.py --messages 1000000 --seed 0 --jobs 2

A *target* is one such function: the reader of a client (`receive`), of the server (`unpack_up`; with secure aggregation
a whole cohort; `closed_round` for the rest of a round; `repair` for lost clients), or a codec. Its seeds are real
messages, from rounds of a federation on the handwritten digits. Message i of a seed is a pure function of both (`--only
i` repeats one): one seed message, mutated once to four times on one of seven levels:

    wire       the raw bytes; most are rejected at the checksum
    sealed     the bytes after the schema, with a valid checksum
    fields     kind, version, bodies, plans and fields, packed again with valid lengths and checksum
    payload    the bytes of one field, packed again: only the codec can reject them
    stream     a field that ends with another deflate stream: too short, too long, or a zip bomb
    repaired   damaged bytes with corrected kind, plans, field ids, lengths and checksum
    built      bodies of other messages, bodies repeated up to thousands of times with matching versions, other plans,
               values at the limits of their range (also encoded by the codec), other lengths (`fuzz_build.py`)

Every message must decode to a valid tree (names, shapes and types of the contract, finite values) or be rejected with a
WireError (or Drifted by the drift check, or Diverged if a round cannot be closed), within 0.5 s of CPU time and with at
most 4 times the memory of the model, plus 128 KiB for small Python objects and what is computed for any message: bases,
random positions, the response of a server, an honest round. The model is the state of both sides: weights, buffers and
the state of the correction. With a sketch, the random draws for each entry of a message take additional time: EvoFed's
population is 32 times the model here, for each round that a client missed.

Memory is measured for every 8th message (`--trace-every 1`: for each, three times slower). tracemalloc records all
allocations of Python and numpy (the output of zlib is a Python object), but not those of torch, so every 64th message
runs under a dispatch mode that also counts live torch storages. All messages run in processes that may not grow by more
than 128 MiB (RLIMIT_AS; EvoFed's last draws are part of it), which catches allocations that are not measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import random
import re
import resource
import sys
import time
import tracemalloc
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the federation of the tests generates the seeds

from benchmarks.faults.fuzz_build import Encode, Parts, built, packed_body, repaired
from tests.federation import Federation, closed, digits_task, perceptron
from tests.parts import Turns
from thinwire.aggregators.base import Uniform
from thinwire.codecs import (
    Binary,
    ByBlock,
    Chain,
    ErrorFeedback,
    Lattice,
    LatticeSum,
    Masked,
    Peer,
    Quantize,
    RandomK,
    RankSlice,
    Raw,
    Threshold,
    TopK,
)
from thinwire.core.key import Key
from thinwire.core.selection import random_subset
from thinwire.core.tree import Spec, Tree, all_finite
from thinwire.errors import Diverged, Drifted, WireError
from thinwire.masks import PruneMask, TopKMask
from thinwire.optimizers.corrections import FedDyn, Scaffold
from thinwire.privacy import DP
from thinwire.protocol import Budget, Method, Tier
from thinwire.protocol.receive import receive, request_full_state
from thinwire.protocol.round import Round
from thinwire.protocol.upload import decode_upload
from thinwire.schedules import AllBlocks, FedLAMA
from thinwire.secure.masks import sum_masked
from thinwire.sketches import CountSketch, EvoFed, Identity, evofed
from thinwire.spaces import (
    MAPA,
    MAPAX,
    MAPO,
    FactorizedFL,
    FedMRN,
    FedPara,
    FedPM,
    Frozen,
    Full,
    LoRA,
    LoRAResidual,
    LoRASB,
    LoRAStack,
    LowRank,
    Route,
)
from thinwire.wire import message as wire
from thinwire.wire.message import FIELDS

SECONDS, TIMES, SMALL = 0.5, 4, 128 << 10  # the last for small objects and the rows of a drift check
KEPT_DRAWS = 9  # populations: EvoFed caches eight of them, at most 128 MiB, while it draws the next
GROWTH = 128 << 20  # bytes of a process
REFUSALS = (WireError, Drifted, Diverged)  # the exceptions that reject a message
TORCH_EVERY = 64
PART = 5_000  # messages per task of a process
HIDDEN = 220  # 16,730 weights: large enough for every form of positions and levels, and for a limit of 4x

BY_BLOCK = ByBlock((("*.weight", TopK(0.1)), ("*", Raw())))
ROUTE = Route(
    (("0.weight", MAPO(k=32, redraw_every=0)), ("2.weight", LoRA(rank=2)), ("2.bias", Frozen()), ("*", Full()))
)
METHODS = {
    "raw": Method(),
    "raw, buffers": Method(),
    "weights, uniform": Method(upload="weights", client_weight=Uniform()),
    "full download": Method(download="full", down=Quantize(8), up=TopK(0.05)),
    "private": Method(schedule=AllBlocks(private=("2.*",)), up=Quantize(8)),
    "private, full download": Method(schedule=AllBlocks(private=("2.*",)), download="full", up=Raw()),
    "turns": Method(schedule=Turns(2, private=("0.bias",)), up=TopK(0.3)),
    "scaffold": Method(correction=Scaffold()),
    "feddyn, int8": Method(correction=FedDyn(), up=Quantize(8), down=Quantize(8)),
    "top-k": Method(up=TopK(0.02), down=TopK(0.4)),
    "top-k by block": Method(up=TopK(0.05, "block", Quantize(4)), down=ErrorFeedback(TopK(0.1, inner=Quantize(8)))),
    "top-k, int4": Method(up=TopK(0.4, inner=Quantize(4))),
    "top-k, sums": Method(up=Lattice(0.1), down=TopK(0.4, inner=Lattice()), merge_codec=LatticeSum()),
    "threshold": Method(up=Threshold(1e-3, Quantize(8)), down=Threshold(1e-2)),
    "random-k": Method(up=RandomK(0.1, Quantize(4)), down=RandomK(0.5, unbiased=False)),
    "int2, uniform": Method(up=Quantize(2), down=Quantize(6, "uniform")),
    "int3, qsgd": Method(up=Quantize(3), down=Quantize(8, "qsgd")),
    "int11, int16": Method(up=Quantize(11), down=Quantize(16)),
    "fp16, bf16": Method(up=Quantize(scheme="fp16"), down=Quantize(scheme="bf16")),
    "sign": Method(up=Quantize(scheme="sign"), down=ErrorFeedback(Quantize(scheme="sign"))),
    "by block": Method(up=BY_BLOCK, down=ByBlock((("0*", Quantize(4)), ("*", Raw())))),
    "pruned": Method(mask=PruneMask(0.25), up=Masked(), down=Threshold(0.0), download="full"),
    "selected": Method(mask=TopKMask(0.25), up=Masked(Quantize(8)), down=TopK(0.25), download="full"),
    "chain": Method(up=Chain((ErrorFeedback(), TopK(0.1), Quantize(4)))),
    "mapo": Method(space=MAPO(k=64)),
    "mapo, merge codec": Method(MAPO(k=64, redraw_every=3), up=Quantize(4), down=Quantize(4), merge_codec=Quantize(4)),
    "mapo, 3 rounds per basis": Method(space=MAPO(k=64, redraw_every=3), up=Quantize(8), down=Quantize(8)),
    "mapa": Method(space=MAPA(p=16, redraw_every=0)),
    "mapax": Method(space=MAPAX(k=8, p=4, redraw_every=0)),
    "fedpara": Method(space=FedPara(gamma=0.3), up=TopK(0.2)),
    "low rank": Method(space=LowRank(rank=4)),
    "lora": Method(space=LoRA(rank=4), download="full"),
    "lora, residual": Method(space=LoRAResidual(rank=4), down=Quantize(8)),
    "lora, stacked": Method(space=LoRAStack(rank=2), up=TopK(0.3)),
    "lora, squares": Method(space=LoRASB(rank=8), up=Quantize(4), down=Quantize(8)),
    "factorized": Method(space=FactorizedFL(), up=TopK(0.1)),
    "route": Method(space=ROUTE),
    "no drift check": Method(drift_check=False, down=Quantize(8)),
    "fedlama": Method(schedule=FedLAMA(phi=2)),
    "evofed": Method(sketch=EvoFed(32, partitions=2)),
    "evofed, int8": Method(sketch=EvoFed(32, paired=True), up=Quantize(8), down=Quantize(8)),
    "masks": Method(FedPM(), up=Binary((0.0, 1.0)), upload="weights"),
    "masks of noise": Method(FedMRN(), up=Binary((-1.0, 1.0)), upload="weights"),
    "count sketch": Method(sketch=CountSketch(), down=Threshold(0.0)),
    "secure": Method(secure_aggregation=True),
    "secure, private": Method(secure_aggregation=True, privacy=DP(), client_weight=Uniform()),
    "secure, random-k": Method(secure_aggregation=True, up=RandomK(0.2, shared=True), client_weight=Uniform()),
    "tiers": Method(budget=Budget((Tier(up=TopK(0.05)), Tier(up=Quantize(4))), (0, 1, 0))),
    "tiers, full download": Method(
        download="full", budget=Budget((Tier(up=TopK(0.05), down=Quantize(8)), Tier(down=TopK(0.4))), (0, 1, 0))
    ),
    "ranks": Method(
        space=LoRA(rank=4),
        download="full",
        budget=Budget((Tier(up=RankSlice(1), down=RankSlice(2)), Tier()), (0, 1, 0)),
    ),
}  # fmt: skip
MIXED = {
    "h": Key(1).normal(40).half(),
    "w": Key(2).normal(90, 60),
    "b": Key(4).normal(30).bfloat16(),
    "none": torch.zeros(0, 3),
    "one": torch.tensor(2.0),
}


def _narrow() -> Tree:
    """Factors whose rows have similar signs, which top-k guesses, and a vector."""
    out = {"b": Key(13).normal(100)}
    for i, (r, c) in enumerate(((16, 400), (400, 16), (16, 400), (8, 200))):
        row, column, noise = (Key(14).fold(part, i) for part in ("row", "column", "noise"))
        out[f"w{i}"] = row.normal(r, 1) * column.normal(1, c) + noise.normal(r, c) / 4
    return out


IN_ROWS = {  # values larger in some rows or columns: positions are sent by rows, levels by regions; and signs apart
    TopK(0.3): {
        "down": Key(7).normal(16, 2000) * Key(8).normal(2000).exp(),
        "up": Key(9).normal(2000, 16) * Key(10).normal(2000, 1).exp(),
    },
    **dict.fromkeys((TopK(0.3, inner=Quantize(4)), TopK(0.9, "block", Quantize(8))), _narrow()),
    Quantize(4, per="tree"): {"w": Key(11).normal(100, 512) * (Key(12).normal(100, 1) / 2).exp()},
}
DOUBLE = {"d": Key(3).normal(3000).double(), "e": Key(6).normal(50).double()}
CODECS = (
    Binary((-1.0, 3.0)),
    TopK(0.01),
    TopK(0.15, "block"),
    TopK(0.4, inner=Quantize(5)),
    Threshold(1.5, inner=Quantize(scheme="fp16")),
    RandomK(0.5, inner=RandomK(0.5)),
    RankSlice(20, rows=("w",), columns=(), inner=Quantize(8)),
    *(Quantize(bits) for bits in (2, 3, 4, 7, 8, 9, 13, 32)),
    *(Quantize(bits, "uniform") for bits in (1, 5, 8, 20)),
    *(Quantize(bits, "qsgd", per=per) for bits in (4, 12) for per in ("block", "tree")),
    *(Quantize(scheme=scheme) for scheme in ("fp16", "bf16", "sign")),
    ByBlock((("w", ErrorFeedback(TopK(0.1))), ("?", Quantize(4)), ("*", Raw()))),
)


@dataclass(frozen=True)
class Target:
    """A function that reads messages.

    Args:
        name: its name in reports.
        model: the size of the state of both sides in bytes.
        seeds: real messages.
        read: decodes bytes; returns whether the result is a valid tree.
        schema: the schema of the messages; None for codecs, which get the bytes of a field.
        draws: bytes of random draws (or of a response) that are needed for any message.
        drawing: makes the random draws of one entry and returns the seconds; only with a sketch.
        encode: encodes values with the codec of its messages.
    """

    name: str
    model: int
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], bool] = field(repr=False)
    schema: wire.Schema | None = None
    draws: int = 0
    drawing: Callable[[], float] | None = field(default=None, repr=False)
    encode: Encode | None = field(default=None, repr=False)


def targets(names: Iterable[str] = METHODS) -> list[Target]:
    """The targets of these methods and of all codecs, with new seeds."""
    out = []
    for name in names:
        out += _federation_targets(name, METHODS[name])
    whole = {**MIXED, "i": torch.arange(9), "t": torch.tensor([True, False])}
    out += [_codec_target(codec, DOUBLE) for codec in (TopK(0.2), Quantize(8), Quantize(16), Quantize(8, "uniform"))]
    out += [_codec_target(codec, tree) for codec, tree in IN_ROWS.items()]
    return out + [_codec_target(Raw(), whole), *(_codec_target(codec, MIXED) for codec in CODECS)]


def _federation_targets(name: str, method: Method) -> Iterator[Target]:
    """The targets of a method: the server in one round, and clients at three versions."""
    federation = Federation(method, digits_task(perceptron(norm="buffers" in name, hidden=HIDDEN), sizes=(40, 17, 33)))
    seen = []
    for cohort in ((0, 1), (0, 2), (0, 1), (0, 1) if method.secure_aggregation else (0,)):
        seen.append(federation.server.public)
        federation.round(cohort)
    contract, server = federation.contract, federation.server
    version, plan = server.public.version, Round.open(federation.contract, server).plan
    code = method.sketch.spec(contract.coords.restrict(plan.names))
    for client in (0, 1):
        federation.download(client)
    federation.cohort = (0, 1)
    ups = tuple(federation.upload(client) for client in (0, 1))
    opened = Round(contract, server, plan)
    hints = {client: opened.hints(client) for client in (0, 1)}

    def read_up(data: bytes, client: int) -> bool:
        if method.secure_aggregation:
            messages = {0: ups[0], 1: ups[1], client: data}
            payloads = [decode_upload(contract, plan, version, i, message).masked for i, message in messages.items()]
            mean = sum_masked(contract, plan, version, payloads, contract.key)
            return Spec.of(mean) == code and all_finite(mean)
        upload = decode_upload(contract, plan, version, client, data, hints[client])
        trees = (upload.code, upload.buffers, upload.report, upload.schedule_report)
        return Spec.of(upload.code) == code and all(map(all_finite, trees))

    model = contract.weights.nbytes + contract.shared.nbytes + contract.buffers.nbytes
    draws = most_memory(lambda: _draw(contract, version))
    drawing = None if isinstance(method.sketch, Identity) else partial(_drawing_seconds, contract)
    for client in (0, 1):  # they differ between tiers
        who = f"{name}, client {client}"
        read = partial(read_up, client=client)
        peer = contract.peer(version, client, hints[client])
        encode = partial(_encode, contract, contract.up(client), peer, "up")
        yield Target(f"{who}: up", model, (ups[client],), read, contract.schema.sent_by(client), draws, encode=encode)
        read = partial(_read_closed, opened, dict(enumerate(ups)), client)
        # the draws of this round are cached; a scaled-down upload exists three times
        closes = draws + most_memory(partial(read, ups[client])) + 2 * contract.code.nbytes
        schema = contract.schema.sent_by(client)
        yield Target(f"{who}: closed round", model, (ups[client],), read, schema, closes, encode=encode)
        lost = request_full_state(contract, seen[2].version, client)
        downs = [
            (held, opened.downloads.messages({client: held.version})[client]) for held in (seen[0], seen[2], seen[3])
        ]
        for held, data in (*downs, (seen[2], opened.downloads.full_state(lost, client))):
            kind = wire.KINDS[data[0] & 15]
            read = partial(_read_down, contract, held, client=client)
            name_of = f"{who}: {kind} from {held.version}"
            encode = partial(_encode, contract, contract.down(client), contract.peer(version, -1), method.download)
            yield Target(name_of, model, (data,), read, contract.schema, draws, drawing, encode)
    lost, read = request_full_state(contract, seen[2].version, 0), partial(_read_lost, contract, server)
    yield Target(f"{name}: lost", model, (lost,), read, contract.schema.sent_by(0), most_memory(lambda: read(lost)))


def _read_closed(opened: Round, ups: dict[int, bytes], client: int, data: bytes) -> bool:
    """Whether a round with this message of a client ends in a finite state."""
    after = closed(opened.contract, opened.server, opened.plan, {**ups, client: data}, 3).server
    trees = (*after.public[1:], *after.opt.values(), after.correction, after.schedule, after.codec)
    return all(map(all_finite, trees))


def _encode(contract, codec, peer: Peer, direction: str, plan: frozenset[str], value: float) -> bytes:
    """Encode this value for the blocks of a plan, as a sender does."""
    spec = contract.sendable
    if direction != "full":
        spec = contract.method.sketch.spec(contract.coords.restrict(plan & spec.named))
    tree = {block.name: torch.full(block.shape, value, dtype=block.dtype) for block in spec}
    return bytes(codec.encode(tree, codec.init(contract.code), peer)[0])


def _drawing_seconds(contract) -> float:
    """The seconds of the random draws of one entry, measured now, under the current load."""
    start = time.process_time()
    for i in range(20):  # more than are cached
        contract.method.sketch.decode(contract.code.zeros(), contract.sendable, contract.key.fold("drawing", i))
    return (time.process_time() - start) / 20


def _read_lost(contract, server, data: bytes) -> bool:
    return wire.unpack(Round.open(contract, server).downloads.full_state(data, 0), contract.schema).kind == wire.STATE


def _draw(contract, version: int) -> object:
    """The draws of a returning client: a basis, the positions of random-k, the populations of EvoFed (cached)."""
    basis = contract.basis(version, "cpu") if contract.method.space.redraw_every else {}
    drawn = "RandomK" in repr(contract.method) and random_subset(
        contract.key, contract.coords.size, contract.coords.size // 2
    )
    sketch = contract.method.sketch
    for missed in range(KEPT_DRAWS if not isinstance(sketch, Identity) else 0):
        sketch.decode(contract.code.zeros(), contract.sendable, contract.key.fold("draw", missed))
    return basis, drawn


def most_memory(call: Callable[[], object]) -> int:
    """The peak of live bytes of Python, numpy and torch during a call."""
    evofed._drawn.cache_clear()  # otherwise it would depend on earlier messages
    tracemalloc.start()
    try:
        with LiveStorages() as live:
            call()
            return live.look()
    finally:
        tracemalloc.stop()


def _read_down(contract, held, data: bytes, client: int) -> bool:
    public, synced, plan = receive(contract, held, data, client)
    specs = (contract.weights, contract.coords, contract.shared, contract.buffers)
    return (
        public.version >= held.version
        and synced | plan.names <= frozenset(contract.sendable.names)
        and all(Spec.of(tree) == spec for tree, spec in zip(public[1:], specs, strict=True))
        and all(new is old or all_finite(new) for new, old in zip(public[1:], held[1:], strict=True))
    )


def _codec_target(codec, tree: Tree) -> Target:
    spec, peer = Spec.of(tree), Peer(Key(5))
    data, _ = codec.encode(tree, codec.init(spec), peer)

    def read(data: bytes) -> bool:
        return Spec.of(codec.decode(data, spec, peer)) == spec

    draws = most_memory(lambda: random_subset(peer.key, spec.size, spec.size // 2)) if isinstance(codec, RandomK) else 0
    return Target(f"codec {codec!r}", spec.nbytes, (data,), read, draws=draws)


# -- mutations ---------------------------------------------------------------------------------------------------------


def damaged(rng: random.Random, data: bytes, others: list[bytes], front: int = 0) -> bytes:
    """Apply one of eleven mutations to some bytes; half of the time near their start, where lengths are."""
    n = len(data)
    near = min(n, 16) if n and rng.random() < 0.5 else n
    at = rng.randrange(min(front, max(0, near - 1)), max(near, 1)) if n else 0
    some = rng.choice((1, 1, 2, 4, rng.randrange(1, 64), rng.randrange(1, n + 2)))
    match rng.randrange(11):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if n else b"\0"
        case 1:
            return data[:at] + rng.choice((b"\0", b"\1", b"\x7f", b"\x80", b"\xfe", b"\xff")) + data[at + 1 :]
        case 2:
            return data[:at] + bytes([(data[at] + rng.choice((1, 255))) & 255]) + data[at + 1 :] if n else b"\1"
        case 3:
            return data[: rng.randrange(n + 1)]
        case 4:
            return data[:at] + data[at + some :]
        case 5:
            return data[:at] + rng.randbytes(some) + data[at:]
        case 6:
            return data[:at] + rng.randbytes(some) + data[at + some :]
        case 7:
            return data[: at + some] + data[at:]
        case 8:
            other = rng.choice(others)
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case 9:
            return data + rng.randbytes(some)
        case _:
            return rng.randbytes(rng.choice((some, n)))


def sealed(data: bytes, schema: wire.Schema) -> bytes:
    """The bytes with a valid checksum."""
    return data + zlib.crc32(data, zlib.crc32(schema.digest + schema.sender)).to_bytes(4, "little")


def forged(rng: random.Random, target: Target, data: bytes, others: list[bytes], level: str) -> bytes:
    """A message for this target on one of the levels above `wire`."""
    schema = target.schema
    if schema is None:
        return _stream(rng, data) if level == "stream" else damaged(rng, data, others)
    if level == "sealed":
        return sealed(damaged(rng, data[:-4], others, front=2), schema)
    if level == "repaired":
        kind = data[0] & 15
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = damaged(rng, data, others, front=2)
        return repaired(data, schema, kind)
    if level == "built":
        return built(rng, _parsed(data, schema), schema, [_parsed(other, schema) for other in others], target.encode)
    kind, version, behind, bodies = _parsed(data, schema)
    which = rng.randrange(max(1, len(bodies)))
    body = next((b for b in bodies[which:] + bodies if b.fields), wire.Body())
    if level == "fields":
        for _ in range(rng.choice((1, 1, 2, 3))):
            kind, version, behind, bodies = _other_fields(rng, kind, version, behind, bodies, schema, others)
    elif body.fields:
        field = wire.COORDS if rng.random() < 0.7 else rng.choice(sorted(body.fields))
        payload = body.fields.get(field, b"")
        payload = (
            _stream(rng, payload) if level == "stream" else damaged(rng, payload, [*body.fields.values(), payload])
        )
        changed = wire.Body(body.plan, {**body.fields, field: payload})
        bodies = [changed if b is body else b for b in bodies]
    return bytes(wire.pack(kind, version, [packed_body(b, schema) for b in bodies], schema, behind))


def _parsed(data: bytes, schema: wire.Schema) -> Parts:
    """The parts of a message. Seeds are cached, with their sender."""
    if data in _SEEDS:
        return _SEEDS[data]
    message = wire.unpack(data, schema)
    read = [wire.unpack_body(body, schema) for body in message.bodies]
    bodies = [wire.Body(body.plan, {field: bytes(part) for field, part in body.fields.items()}) for body in read]
    return Parts(message.kind, message.version, message.behind, bodies)


_SEEDS: dict[bytes, Parts] = {}


def _other_fields(rng, kind, version, behind, bodies, schema, others):
    at = rng.randrange(len(bodies)) if bodies else 0
    body = bodies[at] if bodies else wire.Body()
    match rng.randrange(10):
        case 0:
            kind = rng.choice((1, 2, 3, 3, 2, 4, rng.randrange(16)))
        case 1:
            version = rng.choice((version + 1, max(0, version - 1), 0, rng.randrange(1 << 35), (1 << 35) - 1))
        case 9:
            behind = rng.choice((behind + 1, max(0, behind - 1), 0, version, rng.randrange(1 << 35)))
        case 2:
            bodies = bodies[:at] + bodies[at + 1 :]
        case 3:
            bodies = bodies[:at] + [body] * rng.choice((2, 2, 3, 9)) + bodies[at + 1 :]
        case 4:
            bodies = rng.sample(bodies, len(bodies))
        case 5:
            plan = frozenset(name for name in schema.blocks if rng.random() < rng.choice((0.1, 0.5, 0.9)))
            bodies = [*bodies[:at], wire.Body(rng.choice((None, frozenset(), plan)), body.fields), *bodies[at + 1 :]]
        case 6:
            gone = rng.choice([*body.fields, 0])
            fields = {field: payload for field, payload in body.fields.items() if field != gone}
            bodies = [*bodies[:at], wire.Body(body.plan, fields), *bodies[at + 1 :]]
        case 7:
            payload = rng.choice((b"", rng.randbytes(4), *body.fields.values()))
            fields = {**body.fields, rng.choice((*FIELDS, rng.randrange(1, 34))): payload}
            bodies = [*bodies[:at], wire.Body(body.plan, fields), *bodies[at + 1 :]]
        case _:
            _, their_version, behind, theirs = _parsed(rng.choice(others), schema)
            bodies = [*bodies[:at], *rng.sample(theirs, min(1, len(theirs))), *bodies[at + 1 :]]
            version = rng.choice((version, their_version, version + 1))
    return kind, min(version, (1 << 35) - 1), min(behind, (1 << 35) - 1), bodies


def _stream(rng: random.Random, data: bytes) -> bytes:
    """The bytes with another deflate stream at their end."""
    size = rng.choice((1, 300, len(data), 4 * len(data), 16_730, 16_729, len(BOMB)))
    if size == len(BOMB):
        stream = BOMB
    else:
        at = rng.randrange(1000)
        deflate = zlib.compressobj(rng.choice((0, 1, 9)), zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        stream = deflate.compress(SKEWED[at : at + size]) + deflate.flush()
    return data[: rng.choice((0, 1, 2, 3, rng.randrange(len(data) + 1)))] + stream


def _bomb() -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(bytes(20_000_000)) + deflate.flush()


BOMB = _bomb()
SKEWED = bytes(random.Random(0).choices(range(256), weights=[256 >> min(i, 8) for i in range(256)], k=21_000))
LEVELS = {"wire": 6, "sealed": 12, "fields": 20, "payload": 32, "stream": 6, "repaired": 8, "built": 16}


def message(i: int, seed: int, through: list[Target], kin: dict[int, list[bytes]]) -> tuple[Target, str, bytes]:
    """Message i: its target, its level and its bytes."""
    rng = random.Random(f"{seed}/{i}")
    which = rng.randrange(len(through))
    target = through[which]
    level = rng.choices(list(LEVELS), list(LEVELS.values()))[0]
    data = rng.choice(target.seeds)
    others = kin[which]
    if level == "wire":
        return target, level, damaged(rng, data, others)
    data = forged(rng, target, data, others, level)
    for _ in range(rng.choice((0, 0, 0, 1, 3)) if level in ("payload", "sealed") and target.schema else 0):
        try:
            data = forged(rng, target, data, others, "payload")
        except WireError:  # not a message any more: sent unchanged
            break
    return target, level, data


# -- outcomes ----------------------------------------------------------------------------------------------------------


class LiveStorages(TorchDispatchMode):
    """The peak of live bytes: torch storages created within the context, and tracemalloc's count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, object] = {}
        self._before = tracemalloc.get_traced_memory()[0]

    def look(self) -> int:
        """Update the peak."""
        self.peak = max(self.peak, self.now + tracemalloc.get_traced_memory()[1] - self._before)
        tracemalloc.reset_peak()
        return self.peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look()
        for storage in _storages(args):
            self._meet(storage, 0)  # created before, or owned by numpy
        out = func(*args, **(kwargs or {}))
        for storage in _storages((out,)):
            self._meet(storage, storage.nbytes())
        return out

    def _meet(self, storage: torch.UntypedStorage, size: int) -> None:
        which = id(storage)
        if which not in self._seen:
            # not weakref.finalize: its registry keeps an entry for each storage that outlives the context, and when the
            # registry grows, its memory would be attributed to the current message
            self._seen[which] = weakref.ref(storage, lambda _: self._gone(which, size))
            self.now += size

    def _gone(self, which: int, size: int) -> None:
        self.now -= size
        self._seen.pop(which, None)


def _storages(values) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu":
                yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


@dataclass
class Outcomes:
    """Outcome counts of many messages."""

    counts: Counter = field(default_factory=Counter)  # (level, outcome)
    targets: Counter = field(default_factory=Counter)  # (target, decoded or refused)
    traced: int = 0
    slowest: float = 0.0
    peak_memory: tuple[float, str] = (0.0, "")  # times the model
    torch_peak: tuple[float, str] = (0.0, "")
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcomes) -> None:
        """Add the counts of another."""
        self.counts += other.counts
        self.targets += other.targets
        self.traced += other.traced
        self.slowest = max(self.slowest, other.slowest)
        self.peak_memory = max(self.peak_memory, other.peak_memory)
        self.torch_peak = max(self.torch_peak, other.torch_peak)
        self.failures += other.failures


def reason(error: Exception) -> str:
    """The message of an error without values."""
    text = re.sub(r"-?\d[\d.e+-]*|\bnan\b|\binf\b|-inf", "N", str(error))
    text = re.sub(r"first byte is \w+", "first byte is N", re.sub(r"schema \w+, ours \w+", "schema N, ours N", text))
    return re.sub(r"'[^']*'", "'...'", re.sub(r"\[.*?\]", "[...]", text))


@contextmanager
def bounded(more: int) -> Iterator[None]:
    """Limit the growth of this process in bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@cache
def ready(names: tuple[str, ...] = tuple(METHODS)) -> tuple[list[Target], dict[int, list[bytes]]]:
    """The targets, each checked with its seeds, and for each the messages to splice; once per process."""
    import torch._dynamo  # torch would import it under tracemalloc, which takes ten seconds

    torch.set_num_threads(1)
    through = targets(names)
    for target in through:
        for data in target.seeds:
            if not target.read(data):
                raise SystemExit(f"{target.name}: a real message was not decoded")
            if target.schema:
                _SEEDS[data] = _parsed(data, target.schema)
    return through, _kin(through)


def fuzz(
    numbers: range,
    seed: int,
    trace_every: int = 8,
    names: tuple[str, ...] = tuple(METHODS),
    seconds: float = SECONDS,
) -> Outcomes:
    """Send the messages with these indices; `seconds` is the most CPU time that one of them may take."""
    through, kin = ready(names)
    outcomes = Outcomes()
    try:
        with bounded(GROWTH):
            for done, i in enumerate(numbers):
                if done % 1000 == 0:
                    faulthandler.dump_traceback_later(300, exit=True)  # a hang ends here with a traceback
                _send(i, seed, through, kin, outcomes, i % trace_every == 0, seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return outcomes


def _kin(through: list[Target]) -> dict[int, list[bytes]]:
    """For each target the messages of the same schema, which can be spliced into its own."""
    by: dict[object, list[bytes]] = {}
    for target in through:
        by.setdefault(target.schema and target.schema.digest, []).extend(target.seeds)
    return {i: by[target.schema and target.schema.digest] for i, target in enumerate(through)}


def _send(
    i: int,
    seed: int,
    through: list[Target],
    kin: dict[int, list[bytes]],
    outcomes: Outcomes,
    traced: bool,
    limit: float = SECONDS,
) -> None:
    target, level, data = message(i, seed, through, kin)
    if traced:
        tracemalloc.start()
    live = LiveStorages() if traced and i % TORCH_EVERY == 0 else None
    if live:
        evofed._drawn.cache_clear()
    start = time.perf_counter()
    wrong = ""
    try:
        with live or nullcontext():
            valid = target.read(data)
        outcome = "decoded"
        wrong = "" if valid else "the result is not a valid tree"
    except REFUSALS as error:
        outcome = reason(error)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
        wrong = outcome
    seconds = time.perf_counter() - start
    peak = live.look() if live else tracemalloc.get_traced_memory()[1]
    if traced:
        tracemalloc.stop()
    if seconds > limit:  # wall-clock time; repeated by CPU time below
        seconds = _processor_seconds(target, data)
        wrong = wrong or (f"took {seconds:.2f} s" if seconds > limit else "")
    if peak > TIMES * target.model + target.draws + SMALL:
        wrong = wrong or f"{peak:,} bytes of memory for a model of {target.model:,}"
    outcomes.counts[level, outcome] += 1
    outcomes.targets[target.name, "decoded" if outcome == "decoded" else "refused"] += 1
    outcomes.slowest = max(outcomes.slowest, seconds)
    times = ((peak - target.draws - SMALL) / target.model, f"message {i}, {target.name}")
    if live:
        outcomes.torch_peak = max(outcomes.torch_peak, times)
    elif traced:
        outcomes.traced += 1
        outcomes.peak_memory = max(outcomes.peak_memory, times)
    if wrong:
        outcomes.failures.append(f"message {i} ({level}, {len(data):,} bytes) to {target.name}: {wrong}")


def _processor_seconds(target: Target, data: bytes) -> float:
    """CPU seconds of a message, without the random draws for its entries."""
    start = time.process_time()
    with suppress(*REFUSALS):
        target.read(data)
    seconds = time.process_time() - start
    if not target.drawing:
        return seconds
    with suppress(WireError):
        seconds -= 1.2 * target.drawing() * len(wire.unpack(data, target.schema).bodies)
    return max(0.0, seconds)


def report(outcomes: Outcomes, by_target: bool) -> str:
    """The counts as tables."""
    levels = list(LEVELS)
    total = sum(outcomes.counts.values())
    rows: dict[str, Counter] = {}
    for (level, outcome), count in outcomes.counts.items():
        rows.setdefault(outcome, Counter())[level] += count
    lines = ["| outcome | all | " + " | ".join(levels) + " |", "|---|" + "---:|" * (1 + len(levels))]
    for outcome, counts in sorted(rows.items(), key=lambda row: -sum(row[1].values())):
        cells = " | ".join(f"{counts[level]:,}" for level in levels)
        lines.append(f"| {outcome} | {sum(counts.values()):,} | {cells} |")
    if by_target:
        names = sorted({name for name, _ in outcomes.targets})
        lines += ["", "| target | decoded | refused |", "|---|---:|---:|"]
        lines += [f"| {n} | {outcomes.targets[n, 'decoded']:,} | {outcomes.targets[n, 'refused']:,} |" for n in names]
    decoded = sum(rows["decoded"].values()) if "decoded" in rows else 0
    lines += [
        "",
        f"{total:,} messages: {decoded:,} decoded to valid trees, {total - decoded:,} refused for {len(rows) - 1} "
        f"reasons, {len(outcomes.failures):,} failures.",
        f"Slowest {outcomes.slowest:.3f} s. Peak memory of Python and numpy, in {outcomes.traced:,} messages: "
        f"{max(0.0, outcomes.peak_memory[0]):.2f} x the model ({outcomes.peak_memory[1]}); with torch, every "
        f"{TORCH_EVERY}th message: {max(0.0, outcomes.torch_peak[0]):.2f} x ({outcomes.torch_peak[1]}); "
        f"{SMALL >> 10} KiB for small objects "
        "and random draws are not included.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Fuzz, print the outcomes, and exit with 1 if there was a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this many seconds")
    parser.add_argument("--trace-every", type=int, default=8, help="measure the memory of every Nth message")
    parser.add_argument("--targets", action="store_true", help="also print a table by target")
    parser.add_argument("--only", type=int, help="send only this message, and show the outcome")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.only is not None:
        through, kin = ready()
        target, level, data = message(options.only, options.seed, through, kin)
        print(f"{target.name}, {level}, {len(data)} bytes: {data[:64].hex()}")
        with suppress(*REFUSALS):
            most = most_memory(lambda: target.read(data))
            print(
                f"{most:,} bytes of memory for a model of {target.model:,}, {target.draws:,} of them for random draws"
            )
        print(target.read(data))
        return
    parts = [range(first, min(first + PART, options.messages)) for first in range(0, options.messages, PART)]
    outcomes = Outcomes()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for part in pool.imap_unordered(partial(fuzz, seed=options.seed, trace_every=options.trace_every), parts):
            outcomes.add(part)
            done, wrong = sum(outcomes.counts.values()), "".join(f"\n{line}" for line in part.failures[:5])
            print(f"{done:,} of {options.messages:,}{wrong}", file=sys.stderr, flush=True)
            if time.perf_counter() - start > 60 * options.minutes:
                break
    print(report(outcomes, options.targets))
    print(f"Seed {options.seed}, {time.perf_counter() - start:.0f} s with {options.jobs} job(s).")
    for line in outcomes.failures[:40]:
        print(f"FAILED {line}")
    sys.exit(1 if outcomes.failures else 0)


if __name__ == "__main__":
    main()
