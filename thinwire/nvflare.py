"""Compressed messages in a job of NVFlare: a filter for tasks and results, at the server and at the clients.

    recipe = FedAvgRecipe(...)
    compressed(recipe, up="topk+int4", down="int8")              # adds `CompressedFilter` in all four places

The weights of a task are sent as steps from the version that a client has, which the client tells when it asks for a
task; one that is new or was restarted is sent all. A result is the coded change of the weights that the task had, with
error feedback. A result that is damaged is refused in one line of the log and counts as no change, of next to no
weight: an error would end the job, since FedAvg of NVFlare waits for as many results as it sent tasks. What an end
keeps is in the memory of its process, by job.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode

from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import ThinwireError, WireError
from thinwire.protocol.update import (
    Arrays,
    Published,
    added,
    codec_of,
    decode_update,
    difference,
    encode_update,
    joined,
    upload_key,
)

_MARK = "thinwire"  # in the data and meta of a DXO, and in the context of a client: what it has


@dataclass
class _End:
    """What the server, or a client, keeps of a job."""

    lock: Lock = field(default_factory=Lock)
    published: Published | None = None  # of the server
    source: Arrays = field(default_factory=dict)  # the weights that were published last
    tensors: bool = False  # whether weights are tensors of torch
    session: int = 0  # of a client, and all below
    version: int = -1
    arrays: Arrays = field(default_factory=dict)
    state: Tree | None = None

    def form(self, array: np.ndarray) -> Any:
        """An array as the program has it."""
        return torch.from_numpy(array.copy()) if self.tensors else array


_ENDS: dict[tuple[Any, str], _End] = {}


def compressed(recipe: Any, **codecs: str) -> None:
    """Add the filter to a recipe of NVFlare, for the task `train`; the arguments are those of `CompressedFilter`."""
    for end in ("server_output", "server_input", "client_output", "client_input"):
        getattr(recipe, f"add_{end}_filter")(CompressedFilter(**codecs), tasks=["train"])


class CompressedFilter(Filter):  # type: ignore[misc]
    """Codes weights that leave an end and decodes weights that arrive; all four have the same arguments.

    Args:
        up: the codec of results.
        down: the codec of tasks, without error feedback.
        first: the codec of the first weights, from which training goes on; `raw` keeps them exactly.
    """

    def __init__(self, up: str = "topk+int4", down: str = "int8", first: str = "int8") -> None:
        super().__init__()
        self.up, self.down, self.first = up, down, first

    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        """The message with other weights."""
        try:
            dxo = from_shareable(shareable)
        except ValueError:
            return shareable
        if shareable.get_return_code() != ReturnCode.OK or dxo.data_kind not in (
            DataKind.WEIGHTS,
            DataKind.WEIGHT_DIFF,
        ):
            return shareable
        result = self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_RESULT_CHAIN
        leaves = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT
        end = _ENDS.setdefault((fl_ctx.get_job_id(), fl_ctx.get_identity_name()), _End())
        with end.lock:
            if not result:
                (self._task if leaves else self._received)(dxo, end, fl_ctx)
            elif leaves:
                self._result(dxo, end, fl_ctx)
            else:
                try:
                    self._read(dxo, end, fl_ctx)
                except (ThinwireError, AttributeError, KeyError, TypeError, ValueError) as error:
                    name = fl_ctx.get_peer_context().get_identity_name()
                    self.log_error(fl_ctx, f"the result of {name} is refused: {visible(str(error), 200)}")
                    sent, zero = end.published.sent, dxo.data_kind == DataKind.WEIGHT_DIFF  # type: ignore[union-attr]
                    dxo.data = {name: end.form(np.zeros_like(one) if zero else one) for name, one in sent.items()}
                    dxo.meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 1e-9}
        return dxo.update_shareable(shareable)

    def _task(self, dxo: DXO, end: _End, fl_ctx: Any) -> None:
        """The server sends weights."""
        arrays = _numpy(dxo.data)
        now = end.published or Published(codec_of(self.down), secrets.randbits(48), codec_of(self.first))
        if arrays.keys() != end.source.keys() or any((one != end.source[name]).any() for name, one in arrays.items()):
            now, end.source = now.after(arrays), arrays
        end.published = now
        told = fl_ctx.get_peer_context().get_prop(_MARK)
        parts = now.parts(next((i for i in range(now.version + 1) if told == [now.key, i]), -1))
        end.tensors = any(isinstance(one, torch.Tensor) for one in dxo.data.values())
        about = {"session": now.key, "version": now.version, "tensors": end.tensors}
        dxo.meta[_MARK] = about if parts is None else about | {"since": parts[0]}
        dxo.data = now.sent if parts is None else {_MARK: parts[1]}

    def _received(self, dxo: DXO, end: _End, fl_ctx: Any) -> None:
        """A client receives weights."""
        if (about := dxo.meta.pop(_MARK, None)) is None:
            return
        session, same = about["session"], about["session"] == end.session
        found: Arrays | None = (
            _numpy(dxo.data)
            if "since" not in about
            else joined(
                about["since"],
                dxo.data[_MARK],
                end.version if same else -1,
                end.arrays,
                codec_of(self.down),
                codec_of(self.first),
                session,
            )
        )
        if found is None:
            raise WireError("the server sent steps from a version that this client does not have")
        end.session, end.version, end.arrays, end.tensors = session, about["version"], found, about["tensors"]
        if not same:
            end.state = None
        fl_ctx.set_prop(_MARK, [session, end.version], private=False, sticky=True)
        dxo.data = {name: end.form(one) for name, one in found.items()}

    def _result(self, dxo: DXO, end: _End, fl_ctx: Any) -> None:
        """A client sends weights, or their change."""
        if not end.session:
            return
        old = (
            end.arrays
            if dxo.data_kind == DataKind.WEIGHTS
            else {name: np.zeros_like(one) for name, one in end.arrays.items()}
        )
        update = difference(_numpy(dxo.data), old)
        key = upload_key(end.session, fl_ctx.get_identity_name(), end.version)
        data, end.state = encode_update(update, codec_of(self.up), end.state, key)
        dxo.meta[_MARK] = {"session": end.session, "version": end.version}
        dxo.data = {_MARK: data}

    def _read(self, dxo: DXO, end: _End, fl_ctx: Any) -> None:
        """The server receives what a client sent."""
        about, now = dxo.meta.pop(_MARK, None), end.published
        if now is None or (about is None and _MARK not in dxo.data):
            return
        if (about["session"], about["version"]) != (now.key, now.version):
            raise WireError("it answers another task")
        name = fl_ctx.get_peer_context().get_identity_name()
        key = upload_key(now.key, name, now.version)
        found = decode_update(dxo.data[_MARK], now.sent, codec_of(self.up), key)
        if dxo.data_kind == DataKind.WEIGHTS:
            found = added(now.sent, found)
        dxo.data = {name: end.form(one) for name, one in found.items()}


def _numpy(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(one) for name, one in data.items()}
