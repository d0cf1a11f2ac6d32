"""Write the golden files: bytes that pin the wire format, and the values that they decode to.

    python -m tests.golden.make

One file for each kind of section, codec and message. All values are drawn from keys or are multiples of 1/8, so that
every machine writes the same bytes. Write them again only when the format is meant to change, with a note in the
CHANGELOG; `git diff tests/golden` shows the changes.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tests.federation import closed
from thinwire import models
from thinwire.codecs import (
    Binary,
    ByBlock,
    Chain,
    Eden,
    ErrorFeedback,
    Lattice,
    LatticeSum,
    Masked,
    Peer,
    PowerSGD,
    Quantize,
    RandomK,
    RankSlice,
    Raw,
    Threshold,
    TopK,
)
from thinwire.core.key import Key
from thinwire.core.tree import DTYPES, Block, Spec, Tree
from thinwire.models.exact_init import exact_init
from thinwire.optimizers.corrections import Scaffold
from thinwire.protocol import Method
from thinwire.protocol.contract import Contract
from thinwire.protocol.download import read_snapshot, read_step, read_sum
from thinwire.protocol.drift_check import project
from thinwire.protocol.method import Budget, Tier
from thinwire.protocol.receive import receive, request_full_state
from thinwire.protocol.round import Round
from thinwire.protocol.setup import initial_server_state, make_contract
from thinwire.protocol.state import PublicState, ServerState
from thinwire.protocol.upload import decode_upload, planned_names, raw
from thinwire.runs.parts import describe
from thinwire.schedules.base import AllBlocks, Plan
from thinwire.spaces import MAPO, LoRAStack
from thinwire.wire import indices, message as wire, regions, row_bits, row_signs, symbols
from thinwire.wire.bits import pack
from thinwire.wire.message import pack_weight

HERE = Path(__file__).parent
KEY, EVERYONE = Key(20), Key(27)
TREE = {
    "conv.weight": Key(21).normal(6, 20),
    "conv.bias": Key(22).normal(6) * 0.01,
    "half": Key(23).normal(20).half(),
    "half.b": Key(25).normal(3, 5).half(),
    "zeros": torch.where(torch.arange(30) % 4 == 0, Key(26).normal(30), torch.zeros(30)),
    "none": torch.zeros(0, 2),
    "one": torch.tensor(-0.75),
}
MASK = {name: TREE[name] > 0 for name in ("conv.weight", "half", "zeros")}
ALL_TYPES = {DTYPES[kind][0]: torch.tensor([[0, 1, 1]]).to(kind) for kind in DTYPES} | {"f4": Key(24).normal(3)}


# -- sections ----------------------------------------------------------------------------------------------------------

CLUSTER = np.concatenate((np.arange(40, 240), np.arange(700, 760), [3990]))
POSITIONS = {  # n, positions, the form in which they are encoded
    "rice": (1000, np.array([3, 17, 900]), 2),
    "gaps": (4000, CLUSTER, 0),
    "gaps-long": (20_000, np.concatenate((np.arange(200), np.arange(19_000, 19_100))), 0),
    "bitmap-packed": (24, np.array([0, 1, 4, 7, 9, 10, 12, 15, 17, 20, 21, 23]), 1),
    "bitmap-squeezed": (800, np.arange(150, 470), 1),
    "all": (5, np.arange(5), None),
}
SKEWED = np.minimum(KEY.fold("levels").words_numpy(300) // (1 << 26), 70) % 7  # 0 to 6
LEVELS = {  # bits, levels
    "1": (1, np.array([1, 0, 1, 1, 0, 0, 0, 1, 1, 0])),
    "2-squeezed": (2, np.where(np.arange(300) % 17 == 0, 3, 1)),
    "3-packed": (3, np.arange(10) % 8),
    "3-squeezed": (3, np.where(SKEWED > 4, SKEWED, 3)),
    "4-packed": (4, np.arange(16)[::-1].copy()),
    "5-squeezed": (5, SKEWED % 3),
    "6-packed": (6, np.arange(0, 64, 5)),
    "8-squeezed": (8, 100 + SKEWED),
    "11-squeezed-top": (11, 1024 + np.arange(200)),
    "32": (32, np.array([0, 1, (1 << 32) - 1, 123_456_789])),
}


SHAPES = ((80, 8), (10, 1), (8, 70), (5, 4), (0, 3))  # the columns of the first and the third are ordered
BITS = KEY.fold("rows").words_numpy(1230) % 5 // 4


NARROW = ((18, 140), (1, 9), (140, 18), (3, 5), (0, 3), (2, 33))  # all but the vector, (3, 5) and (0, 3) are narrow


def drawn_signs() -> tuple[np.ndarray, np.ndarray]:
    """Which entries are sent, and which are negative: in each matrix mostly those of a product of two vectors."""
    n = sum(r * c for r, c in NARROW)
    sent, negative = KEY.fold("sent").words_numpy(n) % 2 == 0, KEY.fold("noise").words_numpy(n) % 6 == 0
    start = 0
    for r, c in NARROW:
        signs = KEY.fold("signs", r, c).words_numpy(r + c) % 2 == 0
        negative[start : start + r * c] ^= (signs[:r, None] ^ signs[None, r:]).reshape(-1)
        start += r * c
    return sent, negative


def forced() -> Iterator[tuple[str, dict]]:
    """Positions and levels in forms that only many of them take."""
    data = bytes([indices.ROWS]) + row_bits.encode(BITS.astype(np.uint8), SHAPES, np.inf)
    at = np.flatnonzero(BITS)
    yield "positions-rows", {"n": 1230, "k": len(at), "shapes": SHAPES, "positions": at.tolist(), "bytes": data.hex()}
    sent, negative = drawn_signs()
    data = row_signs.encode(negative, sent, NARROW)
    at = np.flatnonzero(sent)
    signs = {"positions": at.tolist(), "negative": negative[at].astype(int).tolist()}
    yield "signs-narrow", {"shapes": NARROW, **signs, "bytes": data.hex()}
    levels = np.where(np.arange(1400) // 256 % 2, 7 + SKEWED[0], 7).repeat(2)[:2801]
    packed = np.frombuffer(pack(levels, 4), np.uint8)
    data = b"\7" + regions.squeeze(packed, regions.classes(packed))
    yield "levels-4-regions", {"bits": 4, "levels": levels.tolist(), "bytes": data.hex()}


def sections() -> Iterator[tuple[str, dict]]:
    """Positions and levels alone."""
    yield from forced()
    for name, (n, at, form) in POSITIONS.items():
        data = indices.encode(at, n)
        assert form is None or data[0] == form, f"positions {name!r} took form {data[0]}"
        yield f"positions-{name}", {"n": n, "k": len(at), "positions": at.tolist(), "bytes": data.hex()}
    for name, (bits, levels) in LEVELS.items():
        data = symbols.encode(levels, bits)
        assert ("squeezed" in name) == (len(data) < -(-len(levels) * bits // 8)), f"levels {name!r}"
        yield f"levels-{name}", {"bits": bits, "levels": levels.tolist(), "bytes": data.hex()}


# -- codecs ------------------------------------------------------------------------------------------------------------

CODECS = {
    "raw": Raw(),
    "topk": TopK(0.1),
    "topk-by-block-int4": TopK(0.2, "block", Quantize(4)),
    "threshold-int8": Threshold(1.2, Quantize(8)),
    "threshold-nothing": Threshold(100.0),
    "randomk": RandomK(0.1),
    "topk-up": TopK(0.1, rounding="up"),
    "randomk-shared": RandomK(0.1, shared=True),
    "masked": Masked(),
    "masked-int8": Masked(Quantize(8)),
    "rank-slice": RankSlice(2, rows=("conv.weight",), columns=("half.*",), inner=Quantize(8)),
    "randomk-as-is-uniform": RandomK(0.3, Quantize(8, "uniform"), unbiased=False),
    "quantize-2": Quantize(2),
    "quantize-3": Quantize(3, block=50),
    "quantize-4": Quantize(4),
    "quantize-8": Quantize(8),
    "quantize-12": Quantize(12),
    "quantize-16-tree": Quantize(16, per="tree"),
    "quantize-stochastic": Quantize(4, stochastic=True),
    "quantize-uniform": Quantize(5, "uniform"),
    "quantize-qsgd": Quantize(8, "qsgd", block=64),
    "quantize-fp16": Quantize(scheme="fp16"),
    "quantize-bf16": Quantize(scheme="bf16"),
    "quantize-sign": Quantize(scheme="sign", block=100),
    "quantize-sign-magnitude": Quantize(scheme="sign-magnitude", block=100),
    "lattice": Lattice(0.7),
    "lattice-stochastic": Lattice(1.0, stochastic=True),
    "lattice-dither": Lattice(3.0, dither=True),
    "lattice-fine": Lattice(0.01),
    "lattice-sum": LatticeSum(),
    "lattice-sum-raw": LatticeSum(),
    "lattice-sum-sparse": LatticeSum(),
    "eden-1": Eden(1),
    "eden-3": Eden(3, unbiased=False),
    "eden-fraction": Eden(1.25),
    "eden-below-one": Eden(0.3),
    "power-sgd": PowerSGD(2),
    "binary-levels": Binary((-1.5, 1.5)),
    "binary-rare": Binary((-1.0, 20.0)),
    "binary-known": Binary((-1.0, 2.0)),
    "topk-by-chunk": TopK(0.1, "chunk", chunk=50),
    "chain": Chain((ErrorFeedback(), TopK(0.5), RandomK(0.5, unbiased=False), Quantize(8))),
    "by-block": ByBlock((("conv.*", TopK(0.2)), (("*", "!one"), RandomK(0.5)), ("*", Raw()))),
}


def codecs() -> Iterator[tuple[str, dict]]:
    """One tree, encoded by each codec."""
    for name, codec in CODECS.items():
        tree = ALL_TYPES if name == "raw" else TREE
        if name == "lattice-sum":  # of float32 alone, on a lattice
            spec = Spec.of({block: TREE[block].float() for block in TREE})
            tree = eighths(spec, KEY.fold("lattice"))
        if name == "lattice-sum-sparse":  # many values, most of them 0
            drawn = eighths(Spec((Block("w", (5000,)),)), KEY.fold("sparse"))["w"]
            tree = {"w": torch.where(torch.arange(5000) % 9 == 4, drawn, 0), "v": torch.zeros(3)}
        mask = MASK if isinstance(codec, Masked) else {}
        known = TREE if name == "binary-known" else {}
        spec, peer = Spec.of(tree), Peer(KEY, EVERYONE, mask, known)
        data, _ = codec.encode(tree, codec.init(spec), peer)
        keys = {"key": KEY.value, "everyone": EVERYONE.value}
        keys |= {"mask": {name: block.flatten().tolist() for name, block in mask.items()}} if mask else {}
        keys |= {"known": {name: block.double().flatten().tolist() for name, block in known.items()}} if known else {}
        out = {"codec": describe("codec", codec), **keys, "blocks": blocks_of(spec), "bytes": data.hex()}
        yield f"codec-{name}", out | {"values": as_hex(codec.decode(data, spec, peer))}


def blocks_of(spec: Spec) -> list:
    """Name, shape and type of each block."""
    return [[block.name, list(block.shape), DTYPES[block.dtype][0]] for block in spec]


def as_hex(tree: Tree) -> dict[str, str]:
    """Each block as its raw bytes."""
    return {name: raw({name: block}).hex() for name, block in tree.items()}


# -- messages ----------------------------------------------------------------------------------------------------------


def eighths(spec: Spec, key: Key) -> Tree:
    """Multiples of 1/8 from -1 to 7/8: their sums are exact everywhere."""
    return {b.name: ((key.fold(b.name).words(b.numel) >> 28) / 8 - 1).reshape(b.shape).to(b.dtype) for b in spec}


MODEL = {"fc.weight": torch.zeros(4, 3), "fc.bias": torch.zeros(4), "head": torch.zeros(2, 4)}
BUFFERS = {"norm.mean": torch.tensor([0.5, -0.25])}
METHODS = {
    "fedavg": (Method(), BUFFERS),
    "sparse": (Method(up=TopK(0.25, inner=Quantize(8)), down=Quantize(4)), {}),
    "private": (Method(schedule=AllBlocks(private=("head",)), download="full", down=Quantize(8)), {}),
    "scaffold": (Method(correction=Scaffold()), {}),
    "tiers": (Method(download="full", budget=Budget((Tier(up=TopK(0.5), down=Quantize(8)), Tier()), (0, 1))), {}),
    "windows": (Method(space=MAPO(k=4, layout="contiguous", redraw_every=2), drift_check=False), BUFFERS),
    "merge": (
        Method(space=MAPO(k=4, layout="contiguous", redraw_every=2), down=Quantize(8), merge_codec=Quantize(4)),
        {},
    ),
    "sums": (Method(down=TopK(0.3, inner=Lattice(0.5)), merge_codec=LatticeSum()), {}),
    "mapo": (Method(space=MAPO(k=4, layout="contiguous"), up=Quantize(scheme="fp16")), {}),
    "stacks": (Method(space=LoRAStack(1, 2.0, ("fc.weight", "head"), ("fc.bias",)), down=Quantize(scheme="bf16")), {}),
}


WEIGHTS = {"fedavg": 600.0, "sparse": 0.75}  # of the client; 1 in other methods


def upload(contract: Contract, plan: Plan, version: int, weight: float) -> bytes:
    """An upload of client 0, with drawn values instead of trained ones."""
    method, key = contract.method, KEY.fold("answer", version)
    code = method.sketch.spec(contract.coords.restrict(plan.names))
    up = contract.up(0)
    payload, _ = up.encode(eighths(code, key), up.init(code), contract.peer(version, 0))
    fields = {wire.COORDS: payload, wire.WEIGHT: pack_weight(weight)}
    if contract.buffers.blocks:
        fields[wire.BUFFERS] = raw(eighths(contract.buffers, key))
    if contract.shared.blocks:
        fields[wire.SHARED] = raw(eighths(contract.shared, key))
    body = wire.pack_body(wire.Body(plan.names, fields), contract.schema)
    return wire.pack(wire.UP, version, [body], contract.schema.sent_by(0))


def history(name: str, rounds: int = 3) -> tuple[Contract, list[ServerState], list[bytes]]:
    """Some rounds with one client: the server's states, and the client's uploads."""
    method, buffers = METHODS[name]
    weights = eighths(Spec.of(MODEL), KEY)
    contract, public = make_contract(method, weights, buffers, KEY)
    servers, uploads = [initial_server_state(contract, public)], []
    for version in range(rounds):
        plan = Round.open(contract, servers[-1]).plan
        uploads.append(upload(contract, plan, version, WEIGHTS.get(name, 1.0)))
        servers.append(closed(contract, servers[-1], plan, {0: uploads[-1]}, 1).server)
    return contract, servers, uploads


def messages() -> Iterator[tuple[str, dict]]:
    """An upload, and downloads to clients of several versions."""
    for name, (method, _) in METHODS.items():
        contract, servers, uploads = history(name)
        about = {
            "up": describe("codec", contract.up(0)),
            "down": describe("codec", contract.down(0)),
            "merge_codec": describe("codec", method.merge_codec),
            "download": method.download,
            "drift_check": method.drift_check and method.download == "incremental",
            "window": method.space.redraw_every,
            "key": KEY.value,
            "digest": contract.schema.digest.hex(),
            **({"rank": method.space.rank} if isinstance(method.space, LoRAStack) else {}),
            **{
                part: blocks_of(getattr(contract, part))
                for part in ("weights", "coords", "sendable", "shared", "buffers")
            },
        }
        plan = Round.open(contract, servers[1]).plan
        decoded = decode_upload(contract, plan, 1, 0, uploads[1])
        up = {"version": 1, "client": 0, "plan": in_order(contract, plan.names), "weight": decoded.weight}
        up |= {
            "values": as_hex(decoded.code),
            "sent_buffers": as_hex(decoded.buffers),
            "sent_report": as_hex(decoded.report),
        }
        yield f"message-up-{name}", about | {"bytes": uploads[1].hex()} | up
        for version in (3, 2, 0):
            data = Round.open(contract, servers[3]).downloads.messages({0: version})[0]
            yield (
                f"message-{wire.KINDS[data[0] & 15]}-{name}-from-{version}",
                about | received(contract, servers, data),
            )
        lost = request_full_state(contract, 1, 0)
        if name == "fedavg":
            yield f"message-lost-{name}", about | {"version": 1, "bytes": lost.hex()}
        if method.download == "incremental":
            data = Round.open(contract, servers[3]).downloads.full_state(lost, 0)
            yield f"message-state-{name}-from-1", about | received(contract, servers, data)


def received(contract: Contract, servers: list[ServerState], data: bytes) -> dict:
    """A download and its result on client 0."""
    message = wire.unpack(data, contract.schema)
    version = message.version - message.behind
    before = servers[version].public
    after, synced, plan = receive(contract, before, data, 0)
    out = {"version": message.version, "from": version, "plan": in_order(contract, plan.names)}
    out |= {"synced": in_order(contract, synced), "bytes": data.hex(), "steps": []}
    if message.kind == wire.STEPS:
        at = version
        for one in message.bodies[:-1]:
            body = wire.unpack_body(one, contract.schema)
            kind, stack = "entry", None
            if wire.SUM in body.fields:
                values = read_sum(contract, body, torch.device("cpu")).code
                kind, until = "sum", message.version
            elif wire.VALUES in body.fields:
                kind = "snapshot"
                end = contract.window_end(at)
                until = min(message.version, end or message.version)
                values = read_snapshot(contract, body, torch.device("cpu"), end if until == end else None)
            else:
                _, values, stack = read_step(contract, body, at, torch.device("cpu"))
                until = at + 1
            step = {
                "kind": kind,
                "from": at,
                "until": until,
                "plan": in_order(contract, planned_names(contract, body, body.fields.keys())),
            }
            step |= {"values": as_hex(values)}
            step |= {"stacked": stack.adapters, "stack": as_hex(stack.blocks)} if stack else {}
            out["steps"].append(step)
            at = until
    return out | {"before": public_hex(before), "after": public_hex(after)}


def in_order(contract: Contract, names: frozenset[str]) -> list[str]:
    """Names in the order of the model."""
    return [name for name in contract.coords.names if name in names]


def public_hex(public: PublicState) -> dict:
    """A public state as raw bytes."""
    return {"version": public.version} | {part: as_hex(getattr(public, part)) for part in public._fields[1:]}


def as_text(content: dict) -> str:
    """JSON with one line for each key."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "\n}\n"


def cases() -> dict[str, dict]:
    """All golden files by name."""
    return dict([*sections(), *codecs(), *messages()])


def digest() -> str:
    """The SHA-256 of all cases, of drift checks of a state for several threads, and of initial weights of networks."""
    drawn = {"w": Key(1).normal(300_000) * torch.logspace(-30, 6, 300_000), "b": Key(2).normal(7)}
    made = [project(drawn, Key(version).signs).hex() for version in range(5)]
    for name in ("mlp", "cnn2", "resnet20", "lstm-shakespeare", "transformer-sent140"):
        with exact_init(Key(3)):
            made.append(as_hex(dict(models.build(name).named_parameters())))
    made += [as_text(content) for _, content in sorted(cases().items())]
    return hashlib.sha256(str(made).encode()).hexdigest()


def main() -> None:
    """Write all files, and remove old ones."""
    made = cases()
    for old in HERE.glob("*.json"):
        if old.stem not in made:
            old.unlink()
    for name, content in made.items():
        (HERE / f"{name}.json").write_text(as_text(content))
    print(f"{len(made)} files, {sum(file.stat().st_size for file in HERE.glob('*.json')):,} bytes")


if __name__ == "__main__":
    main()
