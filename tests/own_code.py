"""Files of a user for tests: a task on random points, a model, a metric; and a process state that forgets them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from thinwire.core import plugins, reference, registry
from thinwire.runs import build, plugins as experiment_plugins

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
    """A state as in a new process, without the code of the user that was imported before; undone at the end."""
    state = [(reference, "_files"), (registry, "_REFERENCES"), (build, "_kept")]
    state += [(plugins, "_imported"), (experiment_plugins, "_loaded")]
    before = [getattr(module, name) for module, name in state]
    path, modules, parts, writes = list(sys.path), _modules(), registry.foreign(), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # a file that is changed within a second is compiled again
    for module, name in state:
        setattr(module, name, type(getattr(module, name))())
    for name in modules:
        del sys.modules[name]
    yield
    sys.dont_write_bytecode = writes
    for name in _modules():
        del sys.modules[name]
    sys.modules.update(modules)
    sys.path[:] = path
    registry.unregister(registry.foreign() - parts)
    for (module, name), value in zip(state, before, strict=True):
        setattr(module, name, value)


def _modules() -> dict[str, ModuleType]:
    """The modules of the folders from which files were imported."""
    folders = {str(file.parent) for file in reference._files}
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name: sys.modules[name] for name, file in files.items() if file and os.path.dirname(file) in folders}
