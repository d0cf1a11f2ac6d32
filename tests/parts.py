"""Small parts for tests: spaces, sketches, a schedule, codecs and a privacy mechanism."""

from dataclasses import dataclass

import torch

from thinwire.codecs import Codec, Peer, Raw
from thinwire.core.key import Key
from thinwire.core.tree import Block, Spec, Tree, flatten, scale, tmap, unflatten
from thinwire.errors import ConfigError
from thinwire.privacy import Privacy
from thinwire.schedules import Plan, Schedule
from thinwire.sketches import Sketch
from thinwire.spaces import Space


@dataclass(frozen=True)
class Drift(Space):
    """A space: each weight moves along k random directions."""

    k: int = 8
    redraw_every: int = 1

    def check(self, spec: Spec) -> None:
        if self.k < 1:
            raise ConfigError("k must be 1 or more")

    def basis(self, spec: Spec, key: Key, device) -> Tree:
        return {b.name: key.fold(b.name).normal(b.numel, self.k, device=device) / b.numel**0.5 for b in spec}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        return {f"{name}/b": block.new_zeros(self.k) for name, block in base.items()}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        return {name: w + (basis[name] @ coords[f"{name}/b"]).reshape(w.shape) for name, w in base.items()}


@dataclass(frozen=True)
class Product(Space):
    """A space of elementwise products with random initial factors: nonlinear, does not start at the base."""

    redraw_every: int = 0

    def basis(self, spec: Spec, key: Key, device) -> Tree:
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        out = {}
        for name, w in base.items():
            out[f"{name}/x"] = w.clone()
            out[f"{name}/y"] = 1 + 0.1 * key.fold(name).normal(*w.shape, device=w.device)
        return out

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        return {name: coords[f"{name}/x"] * coords[f"{name}/y"] for name in base}


@dataclass(frozen=True)
class Project(Sketch):
    """A sketch: a few random inner products of each block; encode and decode are linear."""

    share: float = 0.05

    def _rows(self, block: Block) -> int:
        return max(1, int(self.share * block.numel))

    def spec(self, coords: Spec) -> Spec:
        return Spec(tuple(Block(f"{b.name}/s", (self._rows(b),), b.dtype) for b in coords))

    def _matrix(self, block: Block, key: Key, like: torch.Tensor) -> torch.Tensor:
        rows = self._rows(block)
        return key.fold(block.name).normal(rows, block.numel, device=like.device) / rows**0.5

    def encode(self, delta: Tree, key: Key) -> Tree:
        blocks = Spec.of(delta)
        return {f"{b.name}/s": self._matrix(b, key, delta[b.name]) @ delta[b.name].reshape(-1) for b in blocks}

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        return {
            b.name: (self._matrix(b, key, code[f"{b.name}/s"]).T @ code[f"{b.name}/s"]).reshape(b.shape) for b in coords
        }


@dataclass(frozen=True)
class Pool(Sketch):
    """A sketch of all blocks together: the size of its code depends on the blocks of a round."""

    share: float = 0.1

    def spec(self, coords: Spec) -> Spec:
        return Spec((Block("code", (1 + int(self.share * coords.size),)),))

    def encode(self, delta: Tree, key: Key) -> Tree:
        rows = self.spec(Spec.of(delta)).size
        return {"code": key.normal(rows, Spec.of(delta).size) @ flatten(delta) / rows**0.5}

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        rows = len(code["code"])
        return unflatten(key.normal(rows, coords.size).T @ code["code"] / rows**0.5, coords.shapes())


@dataclass(frozen=True)
class Turns(Schedule):
    """A schedule: block i is synchronized in every `period`-th round; clients report squared norms."""

    period: int = 2
    private: tuple[str, ...] = ()

    def init(self, coords: Spec) -> Tree:
        return {"rounds": torch.zeros(()), **{f"size/{name}": torch.zeros(()) for name in coords.names}}

    def never(self, coords: Spec) -> frozenset[str]:
        return frozenset(name for name in coords.names if name in self.private)

    def plan(self, state: Tree, coords: Spec, version: int) -> Plan:
        names = [name for name in coords.names if name not in self.private]
        turn = version % self.period
        return Plan(frozenset(n for i, n in enumerate(names) if i % self.period == turn), self.resamples(version))

    def resamples(self, version: int) -> bool:
        return version % self.period == 0

    def report(self, delta: Tree, plan: Plan) -> Tree:
        return {name: block.square().sum() for name, block in delta.items()}

    def observe(self, state: Tree, plan: Plan, mean: Tree, report: Tree) -> Tree:
        sizes = {f"size/{name}": report[name] - mean[name].cpu().square().sum() for name in report}
        return {**state, "rounds": state["rounds"] + 1, **sizes}


@dataclass(frozen=True)
class Half(Codec):
    """A lossy codec: every value rounded to float16."""

    def init(self, spec: Spec) -> Tree:
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[bytes, Tree]:
        for block in Spec.of(tree):
            if not block.dtype.is_floating_point:
                raise ConfigError(f"Half encodes floating-point blocks only, {block.name!r} is of type {block.dtype}")
        return Raw().encode(tmap(torch.Tensor.half, tree), {}, peer)[0], state

    def decode(self, data: bytes, spec: Spec, peer: Peer) -> Tree:
        short = Spec(tuple(Block(b.name, b.shape, torch.float16) for b in spec))
        out = Raw().decode(data, short, peer)
        return {b.name: out[b.name].to(b.dtype) for b in spec}

    def size(self, spec: Spec) -> int:
        return 2 * spec.size


@dataclass(frozen=True)
class Remember(Codec):
    """A codec with state: rounding errors are sent with the next message."""

    inner: Half = Half()

    def init(self, spec: Spec) -> Tree:
        return {f"rest/{name}": block for name, block in spec.zeros().items()}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[bytes, Tree]:
        target = {name: block.cpu() + state[f"rest/{name}"] for name, block in tree.items()}
        data, _ = self.inner.encode(target, {}, peer)
        decoded = self.inner.decode(data, Spec.of(target), peer)
        return data, {**state, **{f"rest/{name}": target[name] - decoded[name] for name in target}}

    def decode(self, data: bytes, spec: Spec, peer: Peer) -> Tree:
        return self.inner.decode(data, spec, peer)

    def size(self, spec: Spec) -> int:
        return self.inner.size(spec)


@dataclass(frozen=True)
class Clip(Privacy):
    """A privacy mechanism: each client's update is clipped, noise is added to the mean."""

    norm: float = 1.0
    noise: float = 1e-3

    @property
    def bounds(self) -> bool:
        return False

    def bound(self, code: Tree, key: Key) -> Tree:
        size = sum(float(block.square().sum()) for block in code.values()) ** 0.5
        return scale(code, min(1.0, self.norm / size) if size else 1.0)

    def aggregate(self, codes, mean, clients: int, key: Key) -> Tree:
        return self.release(mean(codes), clients, key)

    def release(self, mean: Tree, clients: int, key: Key) -> Tree:
        std = self.noise * self.norm / clients
        return {n: b + std * key.fold(n).normal(*b.shape, device=b.device) for n, b in mean.items()}
