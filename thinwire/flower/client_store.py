"""What a client stores between messages, and its serialized form.

A client cannot know whether its upload arrived. It therefore stores two positions: the one that it trained from, and
the one after its upload. The next `Request` says which upload the server last accepted, and so which of the two is
valid; the other is dropped. Each upload counts exactly once on both sides, or on neither.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from thinwire.core.state import State
from thinwire.core.tree import Tree, same
from thinwire.errors import CheckpointError
from thinwire.protocol.state import ClientState, PublicState
from thinwire.training.evaluation import Evaluation

_PUBLIC = ("base", "coords", "shared", "buffers")
_STATE = ("unsent", "correction", "codec")

EVALUATE = "evaluate"  # phase of a request for an evaluation alone


class Request(NamedTuple):
    """What the server sends to a client: a download, and which of its uploads was last accepted."""

    data: bytes
    accepted: int = -1  # the version that it was trained from; -1 for none
    phase: str = ""  # "" to train and upload, EVALUATE, or a phase of secure aggregation (`flower/secure`)


class Response(NamedTuple):
    """What a client sends back: an upload and values for the metrics, an evaluation, or an error message."""

    data: bytes
    loss: float = 0.0
    examples: int = 0
    error: str = ""
    evaluation: Evaluation | None = None  # of the received model on the client's validation examples


class Position(NamedTuple):
    """The public state that a client has, and its own state."""

    public: PublicState
    state: ClientState


class ClientStore(NamedTuple):
    """Everything that a client stores.

    Args:
        positions: its position; or that before its last upload, and that after it.
        response: that upload.
        secure: what it stores of secure aggregation (`flower/secure/session.py`).
    """

    positions: tuple[Position, ...]
    response: Response | None = None
    secure: bytes = b""

    def dump(self, first: PublicState) -> bytes:
        """As bytes: a SHA-256, then safetensors. A base equal to that of version 0 is left out.

        Args:
            first: the public state of version 0.
        """
        tensors: Tree = {}
        for i, (public, state) in enumerate(self.positions):
            trees = {f"public/{part}": getattr(public, part) for part in _PUBLIC}
            if same(public.base, first.base):
                del trees["public/base"]
            trees |= {f"state/{part}": getattr(state, part) for part in _STATE}
            trees |= {f"opt/{slot}": tree for slot, tree in state.opt.items()}
            tensors |= {f"{i}/{part}/{name}": block for part, tree in trees.items() for name, block in tree.items()}
        if self.response and self.response.data:
            tensors["response"] = torch.frombuffer(bytearray(self.response.data), dtype=torch.uint8)
        if self.secure:
            tensors["secure"] = torch.frombuffer(bytearray(self.secure), dtype=torch.uint8)
        meta = {
            "names": list(tensors),
            "positions": [[at.public.version, at.state.version, list(at.state.opt)] for at in self.positions],
            "response": [*self.response[1:3], self.response.evaluation] if self.response else None,
        }
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        data = save(own, {"thinwire": json.dumps(meta)})
        return hashlib.sha256(data).digest() + data

    @classmethod
    def load(cls, data: bytes, first: PublicState) -> ClientStore:
        """From bytes.

        Args:
            data: the result of `dump`.
            first: the public state of version 0.
        """
        try:
            return cls._load(data, first)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, SafetensorError) as error:
            raise CheckpointError(f"what this client stored cannot be read ({error})") from error

    @classmethod
    def _load(cls, data: bytes, first: PublicState) -> ClientStore:
        body = data[32:]
        if hashlib.sha256(body).digest() != data[:32]:
            raise CheckpointError("what this client stored is damaged: its SHA-256 does not match")
        length = int.from_bytes(body[:8], "little")
        meta: dict[str, Any] = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["thinwire"])
        tensors = load(body)

        def tree(prefix: str, device: Any) -> Tree:
            return {n.removeprefix(prefix): tensors[n].to(device) for n in meta["names"] if n.startswith(prefix)}

        positions = []
        for i, (version, own_version, slots) in enumerate(meta["positions"]):
            public = PublicState(version, *(tree(f"{i}/public/{part}/", first.device) for part in _PUBLIC))
            public = public._replace(base=public.base or first.base)
            opt: State = {slot: tree(f"{i}/opt/{slot}/", "cpu") for slot in slots}
            own = {part: tree(f"{i}/state/{part}/", "cpu") for part in _STATE}
            state = ClientState(own_version, **own, opt=opt)
            positions.append(Position(public, state))
        response = None
        if meta["response"]:
            loss, examples, found = meta["response"]
            evaluation = None if found is None else Evaluation(*found)
            response = Response(bytes(tensors["response"].numpy()), loss, examples, evaluation=evaluation)
        secure = bytes(tensors["secure"].numpy()) if "secure" in tensors else b""
        return cls(tuple(positions), response, secure)
