"""Checkpoints: the state of a run on disk, tensors in safetensors and the rest in JSON, each with a checksum.

A checkpoint is two files, `round-000010.safetensors` and `round-000010.json`. The second is written last and holds the
SHA-256 of the first: a checkpoint exists when its JSON exists, so a kill at any moment leaves the previous one. The
newest are kept: two, or `checkpoint.keep`. Each holds the best model so far, so that a run that is resumed, or goes
back, has the best model of an uninterrupted run; and the lines of `metrics.jsonl` up to its round, to restore that file
if it is damaged. Nothing is pickled. `pack` writes any record of tensors, bytes, numbers and other records by its
annotations, and `unpack` checks each value against them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from thinwire.core.key import Device
from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError
from thinwire.federation.job import RunState
from thinwire.federation.settings import KEEP
from thinwire.runs.files import INVALID, read_checked, read_lines, unpack, with_checksum, write_atomically
from thinwire.runs.records import checkpoint_file, parse_record, remove_checkpoint, rounds_in

FORMAT = 3
ON_DEVICE = ("/server/public/", "/average/")  # the tensors that are not on the CPU


class Checkpoint(NamedTuple):
    """What a run continues from.

    Args:
        state: the state after a round.
        best: the best model so far, if it is kept.
        metrics: the lines of `metrics.jsonl` up to that round.
    """

    state: RunState
    best: Mapping[str, Tensor] = {}
    metrics: str = ""

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The records of its rounds, as plain values."""
        return read_lines(self.metrics.encode(), parse_record)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, config: str, keep: int = KEEP) -> None:
    """Write a checkpoint.

    Args:
        folder: the folder of checkpoints.
        checkpoint: the checkpoint.
        config: the digest of the experiment.
        keep: number of checkpoints in the folder that are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state, best, metrics = checkpoint
    file, tensors = checkpoint_file(folder, state.round), dict[str, Tensor]()
    packed = {"state": pack(state, tensors), "best": pack(best, tensors, "/best")}
    data = tensor_bytes(tensors)
    write_atomically(file.with_suffix(".safetensors"), data)
    meta = {
        "format": FORMAT,
        "config": config,
        **packed,
        "sha256": hashlib.sha256(data).hexdigest(),
        "metrics": metrics,
    }
    write_atomically(file, with_checksum(meta))
    for old in rounds_in(folder)[:-keep]:
        remove_checkpoint(folder, old)


def tensor_bytes(tensors: Tree, **metadata: str) -> bytes:
    """The contents of a safetensors file; of metadata one key at most, since the order of several is random."""
    blocks = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    return bytes(save(blocks, metadata=metadata or None))


def load_checkpoint(
    folder: Path, configs: Sequence[str], device: Device = None, number: int | None = None
) -> Checkpoint | None:
    """A checkpoint, by default the newest; None if there is none.

    Args:
        folder: the folder of checkpoints.
        configs: digests of the experiment, now and before it was given more rounds; one must match.
        device: the device of the public state and the averaged model; server and client states are on the CPU.
        number: the round of the checkpoint.
    """
    rounds = [one for one in rounds_in(folder) if number is None or one <= number]
    if not rounds or number not in (None, rounds[-1]):
        return None
    path = checkpoint_file(folder, rounds[-1])
    weights = path.with_suffix(".safetensors")
    older = f"; remove it to continue from round {rounds[-2]}" if len(rounds) > 1 else ""
    meta = read_checked(path, older)
    try:
        if meta["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {meta['format']}, this version reads {FORMAT}")
        if meta["config"] not in configs:
            raise CheckpointError(f"{path} belongs to another configuration ({meta['config']}, this run: {configs[0]})")
        data = weights.read_bytes()
        if hashlib.sha256(data).hexdigest() != meta["sha256"]:
            raise CheckpointError(f"{weights} is damaged: its SHA-256 does not match{older}")
        tensors = {
            name: one.to(device or "cpu") if name.startswith(ON_DEVICE) else one for name, one in load(data).items()
        }
        found: Checkpoint = unpack(Checkpoint, {key: meta[key] for key in Checkpoint._fields}, tensors)
        return found
    except (OSError, *INVALID, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({visible(str(error), 200)}){older}") from error


def pack(value: Any, tensors: Tree, path: str = "") -> Any:
    """A record as a value of JSON; its tensors and bytes are added to `tensors`, by path.

    >>> found = {}
    >>> pack({"w": torch.ones(1), "n": (1, 2)}, found), found
    ({'w': '/w', 'n': [1, 2]}, {'/w': tensor([1.])})
    """
    if isinstance(value, bytes | memoryview):
        value = torch.from_numpy(np.array(memoryview(value), dtype=np.uint8))
    if isinstance(value, Tensor):
        tensors[path] = value
        return path
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):  # a Vector is both
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): pack(one, tensors, f"{path}/{key}") for key, one in value.items()}
    if isinstance(value, tuple):
        return [pack(one, tensors, f"{path}/{i}") for i, one in enumerate(value)]
    return value
