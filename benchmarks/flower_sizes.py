"""What a user of Flower would send: the size of its arrays for the values of a codec."""

from __future__ import annotations

import io
import json
import subprocess

import numpy as np

from thinwire.codecs import ErrorFeedback, Quantize, RandomK, TopK
from thinwire.codecs.base import Codec
from thinwire.core.selection import kept
from thinwire.core.spec import Spec

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
