"""Compressed messages in a Flower app of one's own: a wrapper of its strategy, and a mod of its clients.

    app = ClientApp(mods=[compressed_mod])                                    # the client, as the first mod
    strategy = compressed(FedAvg(), up="topk+int4", down="int8")              # the server

It is for the message API (`flwr.serverapp`) and the classic one (`NumPyClient`, `flwr.server.strategy`), and for every
framework whose arrays are arrays of numpy. The server keeps each array as its clients have it, and sends steps; a
client that is new, or lost what it had, is sent everything in the same round. A client without the mod is sent
everything in every round. The metrics of each round have `bytes-up` and `bytes-down`, of the arrays that were really
sent, for evaluations too.

A workflow that masks what clients send (SecAgg+) sends messages itself, and needs uncoded arrays: it is refused after
the first round. So is a strategy whose clients clip for differential privacy: codecs change what noise must cover.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any

import numpy as np

from thinwire.codecs.base import Codec
from thinwire.core.reference import is_reference
from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError, ThinwireError, WireError
from thinwire.flower import need_flower
from thinwire.protocol.update import (
    Published,
    added,
    codec_of,
    decode_update,
    difference,
    encode_update,
    joined,
    upload_key,
)
from thinwire.runs.parts import build, describe

_RECORD = "thinwire"
_ARRAYS, _STATE = "thinwire.arrays", "thinwire.state"  # what a client keeps in its context
_BYTES = "bytes"  # the stype of an array that is a message of ours


def compressed(
    strategy: Any, up: str | Codec = "topk+int4", down: str | Codec = "int8", first: str | Codec = "int8"
) -> Any:
    """A copy of a strategy of Flower whose messages are compressed.

    Args:
        strategy: any strategy of `flwr.serverapp.strategy`, or a classic one of `flwr.server.strategy`.
        up: the codec of what clients send: the change of the arrays that they received.
        down: the codec of what they are sent, without error feedback.
        first: the codec of the first arrays, from which training goes on; `raw` keeps them exactly.
    """
    need_flower()
    if any("PrivacyClientSide" in one.__name__ for one in type(strategy).__mro__):
        raise ConfigError("codecs change what clients clipped, so its noise is too small; clip on the server instead")
    published = Published(codec_of(down), secrets.randbits(48), codec_of(first))
    link, strategy = _Link(codec_of(up), published), copy.copy(strategy)
    if hasattr(strategy, "aggregate_train"):
        start, aggregate = strategy.start, strategy.aggregate_train
        strategy.start = lambda grid, *args, **options: start(_Grid(grid, link), *args, **options)
        strategy.aggregate_train = lambda *args: _with_bytes(aggregate, args, link)
    elif hasattr(strategy, "aggregate_fit"):
        for name in ("configure_fit", "configure_evaluate"):
            setattr(strategy, name, _on_proxies(getattr(strategy, name), link))
        aggregate = strategy.aggregate_fit
        strategy.aggregate_fit = lambda *args: _with_bytes(aggregate, args, link)
    else:
        raise ConfigError(f"expected a strategy of Flower, such as FedAvg(), not {type(strategy).__name__}")
    return strategy


def _with_bytes(aggregate: Callable[..., tuple[Any, Any]], given: Any, link: _Link) -> tuple[Any, Any]:
    """The result of an aggregation, with the bytes since the last one; ConfigError if others sent the messages."""
    from flwr.app import MetricRecord

    if given[1] and link.source is None:
        raise ConfigError(
            "the messages are not compressed: a workflow (SecAgg+), or a strategy around this one, sends its own; "
            "make `compressed` the outermost; secure sums: thinwire app METHOD DIR --set method.secure_aggregation=true"
        )
    arrays, metrics = aggregate(*given)
    metrics = MetricRecord() if metrics is None else metrics
    metrics["bytes-up"], metrics["bytes-down"] = link.up_bytes, link.down_bytes
    link.up_bytes = link.down_bytes = 0
    return arrays, metrics


def _on_proxies(configure: Callable[..., Any], link: _Link) -> Callable[..., Any]:
    """A method of a classic strategy whose clients send their messages through the link."""

    def configured(*args: Any, **options: Any) -> Any:
        chosen = configure(*args, **options)
        for proxy, _ in chosen:
            if not isinstance(proxy.grid, _Grid):
                proxy.grid = _Grid(proxy.grid, link)
        return chosen

    return configured


class _Grid:
    """A grid whose messages go through a link; everything else is that of Flower."""

    def __init__(self, grid: Any, link: _Link) -> None:
        self._grid, self._link = grid, link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send messages and return the replies, with arrays as if nothing was compressed."""
        link, given, replies = self._link, list(messages), []
        for whole in (False, True):  # clients that lost their arrays are sent all of them
            found = list(self._grid.send_and_receive([link.sent(one, whole) for one in given], timeout=timeout))
            lost = set() if whole else {one.metadata.src_node_id for one in found if link.has_lost(one)}
            replies += [link.received(one) for one in found if one.metadata.src_node_id not in lost]
            given = [one for one in given if one.metadata.dst_node_id in lost]
            if not given:
                break
        return replies


class _Link:
    """The server's side of the messages of a run.

    Args:
        up: the codec of uploads.
        published: what is sent, at first nothing; its key names the session.
    """

    def __init__(self, up: Codec, published: Published) -> None:
        self.up, self.lock, self.session, self.published = up, Lock(), published.key, published
        self.source: Any = None  # the arrays that were published last
        self.known: dict[int, int] = {}  # the version that each client has
        self.up_bytes = self.down_bytes = 0
        codecs = {"up": up, "down": published.codec, "first": published.first}
        self.codecs = json.dumps({slot: describe("codec", one) for slot, one in codecs.items()})

    def sent(self, message: Any, whole: bool = False) -> Any:
        """The message to send instead of one with arrays; one without is sent as it is."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

        node, name = message.metadata.dst_node_id, _name_of_arrays(message.content)
        if name is None:
            return message
        record = message.content[name]
        with self.lock:
            if self.source is None or not _equal(record, self.source):
                self.published, self.source = self.published.after(_numpy(record)), record
            now = self.published
            about = {"session": self.session, "version": now.version, "codecs": self.codecs, "record": name}
            parts = now.parts(-1 if whole else self.known.get(node, -1))
            if parts is None:
                arrays = _record(now.sent)
            else:
                about["since"] = parts[0]
                arrays = ArrayRecord({str(i): _bytes(part) for i, part in enumerate(parts[1])})
            self.down_bytes += arrays.count_bytes()
        content = RecordDict({**message.content, name: arrays, _RECORD: ConfigRecord(about)})
        known = message.metadata
        return Message(content, node, known.message_type, ttl=known.ttl, group_id=known.group_id)

    def has_lost(self, reply: Any) -> bool:
        """Whether a client asks for all arrays."""
        about = None if reply.has_error() else reply.content.get(_RECORD)
        return about is not None and bool(about.get("lost"))

    def received(self, reply: Any) -> Any:
        """A reply with its arrays; with an error instead, if they cannot be read."""
        from flwr.app import Error, Message, RecordDict

        if reply.has_error() or (about := reply.content.get(_RECORD)) is None:
            return reply
        node = reply.metadata.src_node_id
        try:
            if (about.get("session"), about.get("version")) != (self.session, self.published.version):
                raise WireError("it answered another message")
            content = {name: one for name, one in reply.content.items() if name != _RECORD}
            if (name := about.get("record")) is not None:
                payload = content[name]["update"].data
                with self.lock:
                    self.up_bytes += content[name].count_bytes()
                key = upload_key(self.session, node, self.published.version)
                update = decode_update(payload, self.published.sent, self.up, key)
                content[name] = _record(added(self.published.sent, update))
            with self.lock:
                self.known[node] = self.published.version
            reply.content = RecordDict(content)
            return reply
        except (ThinwireError, KeyError, AttributeError, TypeError, ValueError) as error:
            line = f"thinwire: the reply of node {node} is refused: {visible(str(error), 200)}"
            print(line, flush=True)
            return Message(Error(0, line), metadata=reply.metadata)


# -- the client --------------------------------------------------------------------------------------------------------


def compressed_mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """The mod of a ClientApp: `ClientApp(mods=[compressed_mod, ...])`, before all others.

    Messages of a server without `compressed` pass unchanged.
    """
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    about = message.content.get(_RECORD)
    if about is None:
        return call_next(message, context)
    session, version, name = (about[key] for key in ("session", "version", "record"))
    tables = json.loads(about["codecs"], object_hook=_without_code)
    codecs = {slot: build("codec", table, slot) for slot, table in tables.items()}
    kept = context.state.get(_RECORD) or {}
    same = kept.get("session") == session
    if (since := about.get("since")) is None:
        arrays = _numpy(message.content[name])
    else:
        parts = [one.data for one in message.content[name].values()]
        old, at = (_numpy(context.state[_ARRAYS]), kept["version"]) if same else ({}, -1)
        found = joined(since, parts, at, old, codecs["down"], codecs["first"], session)
        if found is None:
            return Message(RecordDict({_RECORD: ConfigRecord({"lost": True})}), reply_to=message)
        arrays = found
    if not same:
        context.state.pop(_STATE, None)
    context.state[_ARRAYS] = _record(arrays)
    context.state[_RECORD] = ConfigRecord({"session": session, "version": version})
    message.content = RecordDict({**message.content, name: _record(arrays)})
    del message.content[_RECORD]
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    answer: dict[str, Any] = {"session": session, "version": version}
    content = dict(reply.content.items())
    if (name := _name_of_arrays(reply.content)) is not None:
        state, key = _state(context), upload_key(session, message.metadata.dst_node_id, version)
        data, state = encode_update(difference(_numpy(content[name]), arrays), codecs["up"], state, key)
        if state:
            context.state[_STATE] = _record({name: one.numpy() for name, one in state.items()})
        content[name], answer["record"] = ArrayRecord({"update": _bytes(data)}), name
    reply.content = RecordDict({**content, _RECORD: ConfigRecord(answer)})
    return reply


def _without_code(table: dict[str, Any]) -> dict[str, Any]:
    """A table of a codec; raises WireError if it names a file or module, which would be imported."""
    if is_reference(str(table.get("kind"))):
        raise WireError("the server names code as a codec; expected codecs of thinwire")
    return table


def _state(context: Any) -> Tree | None:
    import torch

    kept = context.state.get(_STATE)
    return {name: torch.from_numpy(one.copy()) for name, one in _numpy(kept).items()} if kept else None


# -- arrays of Flower --------------------------------------------------------------------------------------------------


def _name_of_arrays(content: Mapping[str, Any]) -> str | None:
    """The name of the only record of arrays; None if there are none, or several."""
    from flwr.app import ArrayRecord

    names = [name for name, one in content.items() if isinstance(one, ArrayRecord) and len(one)]
    return names[0] if len(names) == 1 else None


def _numpy(record: Any) -> dict[str, np.ndarray]:
    return {name: one.numpy() for name, one in record.items()}


def _record(arrays: Mapping[str, np.ndarray]) -> Any:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(np.asarray(one, order="C")) for name, one in arrays.items()})


def _bytes(data: bytes) -> Any:
    from flwr.app import Array

    return Array(dtype="uint8", shape=(len(data),), stype=_BYTES, data=data)


def _equal(a: Any, b: Any) -> bool:
    return a is b or (list(a) == list(b) and all(a[name].data == b[name].data for name in a))
