"""What a client keeps from one message to the next, and its written form.

A client cannot know whether its answer arrived. It therefore keeps two places: the one that it trained from, and the
one where its answer left it. The next `Ask` says which answer the server last accepted, and so which of the two it
believes in; the other is dropped. Each answer counts exactly once on both sides, or on neither.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from thinwire.core.tree import Tree, same
from thinwire.errors import CheckpointError
from thinwire.protocol.state import ClientState, Public

_PUBLIC = ("base", "coords", "shared", "buffers")
_STATE = ("held", "correction", "codec", "opt")


class Ask(NamedTuple):
    """What goes to a client: a message, and which of its answers the server last accepted."""

    data: bytes
    heard: int = -1  # the version that it was trained from; -1 for none


class Answer(NamedTuple):
    """What goes back to the server: a message, and two numbers for the metrics; or an error in words."""

    data: bytes
    loss: float = 0.0
    examples: int = 0
    error: str = ""


class Place(NamedTuple):
    """Where a client is: the public state that it holds, and what is its own."""

    public: Public
    state: ClientState


class ClientStore(NamedTuple):
    """All that a client keeps.

    Args:
        places: where it is; or where it was before its last answer, and where it is since.
        said: that answer.
    """

    places: tuple[Place, ...]
    said: Answer | None = None

    def dump(self, first: Public) -> bytes:
        """As bytes: a SHA-256, then safetensors. A base that is still that of version 0 is left out.

        Args:
            first: the public state of version 0.
        """
        tensors: Tree = {}
        places = []
        for i, place in enumerate(self.places):
            for what, parts, tree in (("public", _PUBLIC, place.public), ("state", _STATE, place.state)):
                for part in parts:
                    if part == "base" and same(place.public.base, first.base):
                        continue
                    tensors |= {f"{i}/{what}/{part}/{name}": block for name, block in getattr(tree, part).items()}
            places.append([place.public.version, place.state.version])
        if self.said and self.said.data:
            tensors["said"] = torch.frombuffer(bytearray(self.said.data), dtype=torch.uint8)
        said = [self.said.loss, self.said.examples] if self.said else None
        meta = {"names": list(tensors), "places": places, "said": said}
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        data = save(own, {"thinwire": json.dumps(meta)})
        return hashlib.sha256(data).digest() + data

    @classmethod
    def load(cls, data: bytes, first: Public) -> ClientStore:
        """From bytes.

        Args:
            data: what `dump` gave.
            first: the public state of version 0.
        """
        try:
            body = data[32:]
            if hashlib.sha256(body).digest() != data[:32]:
                raise CheckpointError("what this client kept is damaged: its SHA-256 does not match")
            length = int.from_bytes(body[:8], "little")
            meta: dict[str, Any] = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["thinwire"])
            tensors = load(body)
            device = next(iter(first.base.values())).device

            def tree(prefix: str, place: Any) -> Tree:
                return {n.removeprefix(prefix): tensors[n].to(place) for n in meta["names"] if n.startswith(prefix)}

            places = []
            for i, (version, seen) in enumerate(meta["places"]):
                public = Public(version, *(tree(f"{i}/public/{part}/", device) for part in _PUBLIC))
                public = public._replace(base=public.base or first.base)
                state = ClientState(seen, *(tree(f"{i}/state/{part}/", "cpu") for part in _STATE))
                places.append(Place(public, state))
            said = None
            if meta["said"]:
                said = Answer(bytes(tensors["said"].numpy()), meta["said"][0], meta["said"][1])
            return cls(tuple(places), said)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError, SafetensorError) as error:
            raise CheckpointError(f"what this client kept cannot be read ({error})") from error
