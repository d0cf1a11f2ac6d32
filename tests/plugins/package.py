"""A plugin package for tests: a ternary codec, a dataset, a metric and a method, in files of a separate project."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

NAME = "thinwire-ternary"
MODULE = "thinwire_ternary"

_BACKENDS = {"hatchling": "hatchling.build", "setuptools": "setuptools.build_meta"}

_PYPROJECT = """\
[build-system]
requires = ["{requires}"]
build-backend = "{backend}"

[project]
name = "{name}"
version = "1.0"

[project.entry-points."thinwire.parts"]
{module} = "{module}.parts"
"""

PARTS = '''\
"""Parts for thinwire: a codec of two bits per value, a dataset of striped images, a metric, a method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import thinwire as tw
from thinwire.data.examples import Arrays, Source


@tw.register("codec", "ternary")
@dataclass(frozen=True)
class Ternary(tw.Codec):
    """Send the sign of large values, zero for small ones, and one scale per block."""

    threshold: float = 0.5

    def init(self, spec):
        return {}

    def encode(self, tree, state, peer):
        out = []
        for block in tree.values():
            flat = block.detach().cpu().float().flatten()
            scale = flat.abs().mean()
            signs = (flat.sign() * (flat.abs() > self.threshold * scale)).to(torch.int8).numpy() + 1
            signs = np.concatenate([signs, np.ones(-len(signs) % 4, np.int8)]).astype(np.uint8).reshape(-1, 4)
            out += [np.float32(scale).tobytes(), (signs << np.array([0, 2, 4, 6], np.uint8)).sum(1, np.uint8).tobytes()]
        return b"".join(out), state

    def decode(self, data, spec, peer):
        if len(data) != self.size(spec):
            raise tw.WireError(f"expected {self.size(spec)} bytes of ternary values, got {len(data)}")
        out, position = {}, 0
        for block in spec:
            scale = float(np.frombuffer(data[position : position + 4], "<f4")[0])
            packed = np.frombuffer(data[position + 4 : position + 4 + -(-block.numel // 4)], np.uint8)
            position += 4 + len(packed)
            signs = (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
            if (signs > 2).any():
                raise tw.WireError("a ternary value must be 0, 1 or 2, not 3")
            values = torch.from_numpy(signs.reshape(-1)[: block.numel].astype(np.float32) - 1)
            out[block.name] = (scale * values).reshape(block.shape).to(block.dtype)
        return out

    def size(self, spec):
        return sum(4 + -(-block.numel // 4) for block in spec)


@tw.register(
    "dataset",
    "stripes",
    doc="Images of 4x4 with horizontal or vertical stripes.",
    preset={
        "rounds": 3,
        "task": {"clients": 4, "partition": "iid", "model": "mlp"},
        "cohort": {"size": 2},
        "method": {"client_opt": {"kind": "sgd", "lr": 0.2}},
    },
)
def stripes(data_dir: Path | None = None, examples: int = 200) -> Source:
    draw = np.random.default_rng(0)
    labels = np.arange(examples) % 2
    stripe = np.indices((4, 4))[labels] % 2
    images = torch.from_numpy((stripe + 0.3 * draw.normal(size=stripe.shape)).astype(np.float32))[:, None]
    targets = torch.from_numpy(labels)
    train, test = Arrays(images[:-50], targets[:-50]), Arrays(images[-50:], targets[-50:])
    return Source(train, test, classes=2, model={"inputs": 16})


@tw.register("metric", "error-rate")
def error_rate(outputs, targets) -> float:
    """Fraction of wrong labels."""
    return float((outputs.argmax(1) != targets).float().mean())


@tw.register("method", "ternary", paper="A test")
def ternary(threshold: float = 0.5) -> tw.Method:
    """FedAvg with ternary uploads."""
    return tw.Method(up=Ternary(threshold))
'''


def write_package(folder: Path, parts: str = PARTS, name: str = NAME, module: str = MODULE) -> Path:
    """Write the project of a plugin; returns its folder."""
    requires = next(one for one in _BACKENDS if importlib.util.find_spec(one))
    text = _PYPROJECT.format(requires=requires, backend=_BACKENDS[requires], name=name, module=module)
    (folder / module).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(text)
    (folder / module / "__init__.py").write_text("")
    (folder / module / "parts.py").write_text(parts)
    return folder


def install(package: Path, target: Path) -> Path:
    """Install a project with pip into a folder, without network; returns the folder."""
    words = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    words += ["--disable-pip-version-check", "--quiet", "--target", str(target), str(package)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target
