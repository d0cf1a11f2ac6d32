"""A fingerprint of a task: a hash of its initial weights, its examples and their division into clients.

A run on your own data stores it, so that the run is continued only with the same model and data. It does not depend
on the machine, and reads everything once.

>>> from torch import nn
>>> from thinwire.data.task import pool_clients
>>> def task(value):
...     model = nn.Linear(2, 2)
...     nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
...     return Task(model, *pool_clients([(torch.full((3, 2), value), torch.tensor([0, 1, 0]))]))
>>> fingerprint(task(1.0)) == fingerprint(task(1.0)), fingerprint(task(1.0)) == fingerprint(task(2.0))
(True, False)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.data.examples import Source
from thinwire.data.task import Task


def fingerprint(task: Task | Source) -> str:
    """The fingerprint of a task, or of a dataset that has no clients and no model yet: 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(task, Source):
        _add(digest, task)
        return digest.hexdigest()
    model = task.model.state_dict()
    for part in (model, task.train, task.clients, task.test, task.client_tests, task.loss):
        _add(digest, part)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add a value with its type, so that equal bytes of different values differ."""
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            digest.update(f"{name!r}:".encode())
            _add(digest, one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        digest.update(type(value).__name__.encode())
        _add(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, list | tuple):
        for one in value:
            _add(digest, one)
    elif callable(value):
        digest.update(getattr(value, "__qualname__", type(value).__qualname__).encode())
    else:
        digest.update(repr(value).encode())
    digest.update(b";")
