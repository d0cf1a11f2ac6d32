"""Files of a user for tests: a task on random points, a model, a metric; and a process state that forgets them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.core import plugins, reference, registry
from thinwire.experiments import own_task
from thinwire.experiments import plugins as experiment_plugins

TASK = '''\
"""Points in a plane of three classes."""

import torch
from torch import nn

import thinwire as tw
from my_net import Net


def points(rows, shift=0.0):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 4, generator=generator) + shift
    return inputs, (inputs @ torch.randn(4, 3, generator=generator)).argmax(1)


def task(rows: int = 20, members: int = 5, shift: float = 0.0):
    inputs, targets = points(rows * members + 50, shift)
    parts = [(inputs[i : i + rows], targets[i : i + rows]) for i in range(0, rows * members, rows)]
    train, clients = tw.data.pool_clients(parts)
    return tw.Task(Net(4, 3), train, clients, tw.data.as_examples((inputs[-50:], targets[-50:])))


def by_user(seed, data_dir):
    """A dataset with users."""
    inputs, targets = points(90)
    train, test = tw.data.Arrays(inputs[:60], targets[:60]), tw.data.Arrays(inputs[60:], targets[60:])
    model = {"features": 4, "note": f"{seed} {data_dir}"}
    return tw.data.Source(train, test, 3, users=torch.arange(60) % 6, model=model)


def missed(outputs, targets):
    return float((outputs.argmax(1) != targets).float().mean())


fixed = task()
'''

NET = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, features, classes, hidden: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, x):
        return self.layers(x)
"""


def write_project(folder: Path) -> Path:
    """Write my_task.py and my_net.py; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "my_task.py").write_text(TASK)
    (folder / "my_net.py").write_text(NET)
    return folder


@contextmanager
def forgotten() -> Iterator[None]:
    """Forget the code and the parts that are imported in this block, as a new process does."""
    kept = [(reference, "_files"), (registry, "_REFERENCES"), (own_task, "_kept")]
    before = [(module, name, dict(getattr(module, name))) for module, name in kept]
    lists = [(module, name, list(getattr(module, name))) for module, name in LISTS]
    parts, modules, path = registry.foreign(), set(sys.modules), list(sys.path)
    yield
    for module, name, value in (*before, *lists):
        setattr(module, name, value)
    registry.unregister(registry.foreign() - parts)
    folders = [Path(one).resolve() for one in sys.path if one not in path]
    sys.path[:] = path
    for name in set(sys.modules) - modules:  # only files of the user: other modules must not be imported twice
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).resolve().parent in folders:
            del sys.modules[name]


LISTS = [(plugins, "_imported"), (experiment_plugins, "_loaded")]
