"""A communication hook of `DistributedDataParallel`: gradients as messages of a codec.

    model = DistributedDataParallel(model)
    model.register_comm_hook(CodecState("topk+int4"), codec_hook)

    gradient = mean of D(C(g_i + e_i)),      e_i: what earlier messages of worker i left out, if C has error feedback

Each worker sends its message to all others and takes the same mean, so models stay equal. The first step sends whole
gradients: afterwards torch groups the parameters again.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.codecs.base import Codec
from thinwire.core.tree import Tree
from thinwire.errors import Diverged
from thinwire.protocol.update import codec_of, decode_update, encode_update


@dataclass
class CodecState:
    """What a worker keeps between steps.

    Args:
        codec: the codec, or its name; several with +.
        group: the process group of the model; None for all processes.
        sent: bytes of the messages of this worker.
        steps: steps that are complete.
        left: by bucket, the state of the codec.
    """

    codec: str | Codec = "topk+int4"
    group: Any = None
    sent: int = 0
    steps: int = 0
    left: dict[int, Tree] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.codec = codec_of(self.codec)


def codec_hook(state: CodecState, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """The mean gradient of a bucket. A gradient that is not finite makes it NaN, which `GradScaler` skips."""
    buffer, done = bucket.buffer(), Future[Tensor]()
    if state.steps == 0:
        dist.all_reduce(buffer.div_(dist.get_world_size(state.group)), group=state.group)
        state.sent += buffer.nbytes
    else:
        _exchange(state, bucket)
    state.steps += bucket.is_last()
    done.set_result(buffer)
    return done


def _exchange(state: CodecState, bucket: Any) -> None:
    """Replace the gradients of a bucket by the mean of those that all workers can decode."""
    codec, index, workers = codec_of(state.codec), bucket.index(), dist.get_world_size(state.group)
    gradients = bucket.gradients()
    own = {str(i): one.float().cpu().numpy() for i, one in enumerate(gradients)}
    keys = [(state.steps << 32) + (index << 16) + rank for rank in range(workers)]
    try:
        data, state.left[index] = encode_update(own, codec, state.left.get(index), keys[dist.get_rank(state.group)])
    except Diverged:
        data = b""
    state.sent += len(data)
    messages = _gathered(data, bucket.buffer().device, state.group)
    means = {name: np.zeros_like(one) for name, one in own.items()}
    for key, message in zip(keys, messages, strict=True):
        update = decode_update(message, own, codec, key) if message else dict.fromkeys(own, np.float32("nan"))
        means = {name: mean + update[name] / workers for name, mean in means.items()}
    for gradient, mean in zip(gradients, means.values(), strict=True):
        gradient.copy_(torch.from_numpy(mean))


def _gathered(data: bytes, device: torch.device, group: Any) -> list[bytes]:
    """The messages of all workers, which differ in length."""
    workers = dist.get_world_size(group)
    own = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(own) for _ in range(workers)]
    dist.all_gather(sizes, own, group=group)
    longest = max(int(one) for one in sizes)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")) or bytearray(1), dtype=torch.uint8).to(device)
    got = [torch.empty_like(padded) for _ in range(workers)]
    dist.all_gather(got, padded, group=group)
    return [bytes(one[: int(size)].cpu().numpy()) for one, size in zip(got, sizes, strict=True)]
