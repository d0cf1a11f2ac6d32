"""Records as bytes: what clients store, and what server and nodes send each other."""

from __future__ import annotations

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import WireError
from thinwire.runs.checkpoint import pack, tensor_bytes
from thinwire.runs.files import INVALID, unpack


def dump(record: Any) -> bytes:
    """A NamedTuple of numbers, texts, bytes, tensors and such records, as safetensors; the tensor `json` names them."""
    tensors: Tree = {}
    pack(json.dumps(pack(record, tensors)).encode(), tensors, "json")
    return tensor_bytes(tensors)


def read(kind: Any, data: bytes) -> Any:
    """The inverse of `dump` for bytes that are not trusted; a WireError if they are not a record of this kind.

    >>> from thinwire.protocol.round import Response
    >>> read(Response, dump(Response(b"upload", 0.5, 12)))
    Response(data=b'upload', loss=0.5, examples=12, error='', evaluation=None)
    """
    try:
        tensors = load(data)
        return unpack(kind, json.loads(bytes(tensors["json"].numpy())), tensors)
    except (*INVALID, RuntimeError, SafetensorError) as error:
        raise WireError(f"it is not a valid {kind.__name__}: {visible(str(error), 200)}") from error
