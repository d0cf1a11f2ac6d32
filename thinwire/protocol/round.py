"""The round, as simulation and deployment call it. Both ends compute `advance` alike.

    server                                    client
    open_round   ── steps or state ──►        receive            the public state of version v, bit for bit
                                              training_inputs    -> train -> begin_updates
    decode_uploads  ◄── upload ───────        make_uploads       correction, codec, masking, packing
    close_round                               aggregate, server optimizer, broadcast codec, ledger
    advance: public(v) -> public(v + 1)       (the client does the same with its next download)

The server applies the *decoded* broadcast to itself, so that a lossy download codec cannot make it drift from its
clients. All functions are pure: states go in and come out.
"""

from __future__ import annotations

from typing import NamedTuple

from thinwire.protocol.advance import advance as advance
from thinwire.protocol.client import (
    Group as Group,
    begin_updates as begin_updates,
    drop_stale as drop_stale,
    initial_client_state as initial_client_state,
    make_uploads as make_uploads,
    training_inputs as training_inputs,
)
from thinwire.protocol.receive import receive as receive
from thinwire.protocol.server import close_round as close_round, open_round as open_round
from thinwire.protocol.setup import (
    initial_server_state as initial_server_state,
    make_contract as make_contract,
    plan_round as plan_round,
)
from thinwire.protocol.upload import decode_uploads as decode_uploads
from thinwire.training.evaluation import Evaluation

EVALUATE = "evaluate"  # phase of a request for an evaluation alone


class Request(NamedTuple):
    """What a server sends to a client: a download, and which of its uploads was last accepted."""

    data: bytes
    accepted: int = -1  # the version that it was trained from; -1 for none
    phase: str = ""  # "" to train and upload, EVALUATE, or a phase of secure aggregation (`secure/frames.py`)


class Response(NamedTuple):
    """What a client sends back: an upload and values for the metrics, an evaluation, or an error message."""

    data: bytes
    loss: float = 0.0
    examples: int = 0
    error: str = ""
    evaluation: Evaluation | None = None  # of the received model on the client's validation examples
