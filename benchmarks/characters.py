"""A small task of next characters, for searches that take minutes on a CPU.

    THINWIRE_DATA=data thinwire run sparseloco --on benchmarks/characters.py:task --rounds 30 --cohort 4

The ten longest roles of Shakespeare, 1,000 windows of 20 characters each, drawn by the seed, and 1,000 windows of the
test set; an LSTM of two layers with 64 units.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire import Key, Task
from thinwire.data.datasets.shakespeare import ALPHABET, LENGTH, shakespeare
from thinwire.data.task import pool_clients
from thinwire.models import build

ROLES, EACH, TESTS, WINDOW = 10, 1000, 1000, 20


def task(seed: int = 0) -> Task:
    """The task of a seed."""
    source, key = shakespeare(), Key(seed).fold("characters")
    assert source.users is not None
    longest = np.argsort(-np.bincount(source.users.numpy()), kind="stable")[:ROLES]
    clients = []
    for role in longest:
        own = torch.from_numpy(np.flatnonzero(source.users.numpy() == role))
        x, y = source.train.gather(own[key.fold("role", int(role)).permutation(len(own))[:EACH]])
        clients.append((x[:, LENGTH - WINDOW :], y))  # type: ignore[index]
    x, y = source.test.gather(key.fold("test").permutation(len(source.test))[:TESTS])
    torch.manual_seed(seed)
    model = build("lstm80", classes=len(ALPHABET), hidden=64)
    return Task(model, *pool_clients(clients), test=pool_clients([(x[:, LENGTH - WINDOW :], y)])[0])  # type: ignore[index]
