"""One local step of all clients of a chunk, recorded once as a CUDA graph and replayed in every step of every round.

A small model's step is a hundred short kernels, and starting them one by one from Python takes far longer than running
them. A graph starts all of them at once. What it reads and writes must always lie in the same place: coordinates,
optimiser state, buffers, the correction's memories, base and basis are copied there when a round begins, and so are the
numbers of the examples of all batches; a graph counts the steps, and fetches the examples of the next one.

There are two recordings of a step: one for batches that count in full, and one with a mask, for short batches and for
clients that are done before others. On the CPU nothing is recorded: the very same step is called instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from thinwire.core.pinned import sent
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree, repeat, tmap, unstack
from thinwire.optimizers.lr_schedules import ConstantLR
from thinwire.protocol.state import Public
from thinwire.training.local import (
    TrainingInputs,
    TrainingOutcome,
    UnsupportedModel,
    make_step,
    no_chance,
    together,
    where,
)

KEPT = 8  # recordings for so many different shapes of a chunk; the one that was not used for longest makes room
WARM = 3  # steps before a recording, in which libraries choose their kernels and take their memory


class CudaGraphCache:
    """The recordings of a simulation, kept from round to round."""

    def __init__(self) -> None:
        self._kept: dict[tuple, _Recording] = {}

    def train(self, lesson: TrainingInputs) -> TrainingOutcome:
        """As `local_train`, by replaying."""
        work = lesson.work
        clients, _, width = work.index.shape
        # all else that a step depends on follows from the method and the model, or is copied
        key = (
            *(id(lesson.method), id(lesson.learner), work.gather, clients, width),
            *(tuple(lesson.mine), tuple(lesson.only)),
        )
        recording = self._kept.pop(key, None)
        if recording is None:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            recording = _Recording(lesson)
        self._kept[key] = recording
        return recording.train(lesson)


class _Recording:
    """The places that a step reads and writes, and its recordings."""

    def __init__(self, lesson: TrainingInputs) -> None:
        method, public, basis, start, work = lesson.method, lesson.public, lesson.basis, lesson.start, lesson.work
        self.method, self.learner, self.gather = method, lesson.learner, work.gather  # held, so that ids stay theirs
        self.device = device = work.index.device
        clients, steps, width = work.index.shape
        if any(block.device != device for tree in (basis, public.base) for block in tree.values()):
            raise UnsupportedModel(f"{method.space!r} looks at numbers on the host in every step")
        changing = method.lr_schedule != ConstantLR()
        if changing and method.penalty.active:
            raise UnsupportedModel(f"{method.penalty!r} depends on a step size that changes from round to round")
        self.base, self.basis, self.shared, self.only = (
            _places(tree) for tree in (public.base, basis, public.shared, lesson.only)
        )
        self.first_opt = repeat(method.client_opt.init(unstack(start, 0)), clients)
        self.coords, self.start, self.mine, self.opt, self.buffers = (
            _places(tree) for tree in (start, start, lesson.mine, self.first_opt, repeat(public.buffers, clients))
        )
        self.batches = torch.zeros((steps, clients, width + 1), dtype=torch.int64, device=device)
        self.batches[..., -1] = width  # the last column says how many of the others count
        self.done = torch.zeros(1, dtype=torch.int64, device=device)  # steps, of those whose batches lie there
        self.loss = torch.zeros(clients, device=device)
        private = method.schedule.never(Spec.of(public.coords))
        known = Public(0, self.base, {}, self.shared, {})
        # what a rate does to a step is multiplied onto it, since a number of the program cannot change in a recording
        self.factor = torch.ones((), device=device) if changing else None
        steady = replace(method, lr_schedule=ConstantLR())
        self.step = together(make_step(steady, self.learner, known, self.basis, private, self.factor, self.only))
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.replay: dict[bool, Callable[[], None]] = {}
        self.loaded: dict[str, Tree] = {}

    def train(self, lesson: TrainingInputs) -> TrainingOutcome:
        """All steps of a workload."""
        public, start, work = lesson.public, lesson.start, lesson.work
        clients, steps, width = work.index.shape
        masked: list[bool] = np.any(work.rows < width, axis=0).tolist()
        for kind in sorted(set(masked)):  # before anything is loaded: recording moves what lies in the places
            if kind not in self.replay:
                self.replay[kind] = self._record(kind)
        self._load_once("base", self.base, public.base)
        self._load_once("basis", self.basis, lesson.basis)
        _copy(
            (self.shared, self.only, self.coords, self.start, self.mine, self.opt, self.buffers),
            (
                *(public.shared, lesson.only, start, start, lesson.mine, lesson.opt or self.first_opt),
                repeat(public.buffers, clients),
            ),
        )
        if self.factor is not None:
            self.factor.fill_(self.method.lr_schedule.factor(public.version))
        self.loss.zero_()
        rows = sent(work.rows, self.device)
        batches = torch.cat((work.index, rows[..., None]), -1).transpose(0, 1)
        for first in range(0, steps, len(self.batches)):  # more than once where there are more than in the first round
            part = batches[first : first + len(self.batches)]
            self.batches[: len(part)].copy_(part)
            self.done.zero_()
            for kind in masked[first : first + len(part)]:
                self.replay[kind]()
        coords, buffers, opt = (tmap(torch.clone, tree) for tree in (self.coords, self.buffers, self.opt))
        return TrainingOutcome(coords, buffers, self.loss / rows.sum(1), work.steps, opt)

    def _load_once(self, name: str, places: Tree, tree: Tree) -> None:
        """Copy a tree that seldom changes, unless it is the one that was copied last; blocks are never changed."""
        last = self.loaded.get(name)
        if last is None or any(last[key] is not block for key, block in tree.items()):
            _copy((places,), (tree,))
            self.loaded[name] = dict(tree)

    def _record(self, masked: bool) -> Callable[[], None]:
        """A function that does one step: on a GPU the replay of a graph, else the step itself."""

        def step() -> None:
            self._step(masked)

        self.done.zero_()
        if self.device.type != "cuda":
            with no_chance(self.device):
                step()
            return step
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM):  # a replay would draw random numbers from another place
                    with no_chance(self.device):
                        step()
                    self.done.zero_()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # recordings share memory for what lives within a step: nothing in it is read after the step is done
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                step()
        return graph.replay

    def _step(self, masked: bool) -> None:
        """One step from the places to the places."""
        batch = self.batches.index_select(0, self.done)[0]
        index, rows = batch[:, :-1], batch[:, -1]
        inputs, targets = self.gather(index)
        mask = None
        if masked:
            mask = (torch.arange(index.shape[1], device=self.device) < rows[:, None]).to(torch.float32)
        now = (self.coords, self.opt, self.buffers)
        *new, loss = self.step(*now, self.start, self.mine, inputs, targets, mask)
        if masked:
            new = [where(rows > 0, after, before) for after, before in zip(new, now, strict=True)]
        _copy(now, new)
        self.loss.add_(loss.detach() * rows)
        self.done.add_(1)


def _places(tree: Tree) -> Tree:
    """Room for a tree, filled with zeros."""
    return tmap(lambda block: torch.zeros(block.shape, dtype=block.dtype, device=block.device), tree)


def _copy(places: Sequence[Tree], trees: Sequence[Tree]) -> None:
    """Copy trees into their places, all blocks in one go."""
    into = [block for tree in places for block in tree.values()]
    blocks = [tree[name] for place, tree in zip(places, trees, strict=True) for name in place]
    if into:
        torch._foreach_copy_(into, blocks)
