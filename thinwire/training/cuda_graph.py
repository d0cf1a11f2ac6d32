"""Training backend that records the vectorized step once as a CUDA graph and replays it in every step of every round.

A step of a small model is about a hundred short kernels, and launching them one by one from Python takes far longer
than running them. A graph launches all of them at once. Its inputs and outputs must always be at the same addresses:
coordinates, optimizer states, buffers, the states of the correction, base and basis are copied there when a round
begins, and so are the indices of all batches; the graph counts the steps and gathers the examples of the next one.

There are two recordings of a step: one for full batches, and one with a mask, for short batches and for clients that
finish before others. For a chain of layers (`cuda_chain.py`), whose steps are few kernels, all steps of a round are one
recording. On a CPU nothing is recorded: the same step is called instead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from thinwire.core.parallel import sent
from thinwire.core.recording import rehearsed
from thinwire.core.tree import Tree, repeat, smap, tmap, unstack
from thinwire.training.backends import can_fold, step_of_all
from thinwire.training.cuda_chain import by_strides, chain_step, copy_trees
from thinwire.training.inputs import TrainingInputs, TrainingOutcome, UnsupportedModel
from thinwire.training.step import keep_finished, make_descent, no_randomness

KEPT = 8  # recordings for different shapes of a cohort; the least recently used one is dropped
ROUNDS = 4  # recordings of a whole round; where clients differ in their numbers of steps, rounds differ, too
LONGEST = 64  # steps of such a recording
WARM = 3  # steps before a recording, in which libraries choose their kernels and allocate memory


class CudaGraphCache:
    """Trains by replaying recordings that are kept from round to round."""

    def __init__(self) -> None:
        self._kept: dict[tuple, _Recording] = {}

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train all clients at once, with a recording made for parts, model and shapes like these."""
        work = inputs.work
        clients, _, width = work.index.shape
        parts = (inputs.space, inputs.optimizer, inputs.correction, inputs.penalty, inputs.model)
        # everything else that a step depends on follows from these, or is copied
        key = (
            *(*map(id, parts), work.gather, clients, width, inputs.lr_factor is None, inputs.private),
            *(tuple(inputs.correction_state), tuple(inputs.trainable)),
        )
        recording = self._kept.pop(key, None)
        if recording is None:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            recording = _Recording(inputs)
        self._kept[key] = recording
        return recording.train(inputs)


class _Recording:
    """The tensors that a step reads and writes, and its recordings."""

    def __init__(self, inputs: TrainingInputs) -> None:
        work, start = inputs.work, inputs.start
        self.parts = (inputs.space, inputs.optimizer, inputs.correction, inputs.penalty, inputs.model)
        self.gather = work.gather  # referenced, like the parts, so that the ids in the key stay theirs
        self.device = device = work.index.device
        clients, steps, width = work.index.shape
        if any(block.device != device for tree in (inputs.basis, inputs.base) for block in tree.values()):
            raise UnsupportedModel(f"{inputs.space!r} reads tensors on the host in every step")
        self.base, self.basis, self.shared, self.trainable = (
            _zeros(tree) for tree in (inputs.base, inputs.basis, inputs.shared, inputs.trainable)
        )
        last = _reads_channels_last(inputs)
        self.coords, self.start, self.own = (_zeros(tree, last) for tree in (start, start, inputs.correction_state))
        self.buffers = _zeros(repeat(inputs.buffers, clients))
        self.opt = {slot: _zeros(tree, last) for slot, tree in inputs.opt_state.items()}
        self.batches = torch.zeros((steps, clients, width + 1), dtype=torch.int64, device=device)
        self.batches[..., -1] = width  # the last column is the number of examples that count
        self.done = torch.zeros(1, dtype=torch.int64, device=device)  # steps done of those in `batches`
        self.loss = torch.zeros(clients, device=device)
        # a constant cannot change in a recording, so the learning-rate factor is multiplied onto the step
        self.factor = None if inputs.lr_factor is None else torch.ones((), device=device)
        fixed = replace(
            inputs,
            base=self.base,
            basis=self.basis,
            shared=self.shared,
            trainable=self.trainable,
            # without the trees of this round, which would stay in memory
            start={},
            correction_state={},
            buffers={},
            opt_state={},
            lr_factor=None,
            common_start=None,
        )
        self.step = step_of_all(inputs, fixed, self.factor)
        self.chain = chain_step(inputs, self.factor)
        self.descent = None if can_fold(inputs) else make_descent(fixed)
        self.lr = inputs.optimizer.lr
        if self.chain is not None:
            self.coords, self.opt = self.chain.coords, self.chain.opt
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.replay: dict[tuple[bool, ...], Callable[[], None]] = {}  # by which of its steps are masked
        self.loaded: dict[str, Tree] = {}

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """All steps of a workload."""
        work = inputs.work
        clients, steps, width = work.index.shape
        masked: list[bool] = np.any(work.rows < width, axis=0).tolist()
        most = len(self.batches)
        # before anything is loaded: recording changes the tensors
        replays = [self._replays(tuple(masked[first : first + most])) for first in range(0, steps, most)]
        self._load(inputs, clients)
        rows = sent(work.rows, self.device)
        batches = torch.cat((work.index, rows[..., None]), -1).transpose(0, 1)
        # several parts where there are more steps than in the first round
        for part, steps_of_part in zip(torch.split(batches, most), replays, strict=True):
            self.batches[: len(part)].copy_(part)
            self.done.zero_()
            for replay in steps_of_part:
                replay()
        coords = tmap(_copied, self.coords) if self.chain is None else self.chain.copied()
        buffers = tmap(_copied, self.buffers)
        return TrainingOutcome(coords, buffers, self.loss / rows.sum(1), smap(_copied, self.opt))

    def _load(self, inputs: TrainingInputs, clients: int) -> None:
        """Copy the inputs of a round to the tensors of the recording."""
        opt = inputs.opt_state
        if self.factor is not None:
            self.factor.fill_(inputs.lr_factor or 0.0)
        self.loss.zero_()
        if self.chain is not None:  # it reads nothing else
            self.chain.load(inputs, opt)
            return
        self._load_once("base", self.base, inputs.base)
        self._load_once("basis", self.basis, inputs.basis)
        given = (inputs.shared, inputs.trainable, inputs.start, inputs.start, inputs.correction_state)
        copy_trees(
            (self.shared, self.trainable, self.coords, self.start, self.own, self.buffers, *self.opt.values()),
            (*given, repeat(inputs.buffers, clients), *(opt[slot] for slot in self.opt)),
        )

    def _load_once(self, name: str, places: Tree, tree: Tree) -> None:
        """Copy a tree that rarely changes, unless it is the one that was copied last; blocks are never modified."""
        last = self.loaded.get(name)
        if last is None or any(last[key] is not block for key, block in tree.items()):
            copy_trees((places,), (tree,))
            self.loaded[name] = dict(tree)

    def _replays(self, masked: tuple[bool, ...]) -> list[Callable[[], None]]:
        """The recordings whose replay does these steps, made where there are none: one of all, or one for each."""
        whole = self.chain is not None and self.device.type == "cuda" and 1 < len(masked) <= LONGEST
        if whole and (masked in self.replay or sum(len(known) > 1 for known in self.replay) < ROUNDS):
            kinds = [masked]
        else:
            kinds = [(one,) for one in masked]
        for kind in sorted(set(kinds)):
            if kind not in self.replay:
                self.replay[kind] = self._record(kind)
        return [self.replay[kind] for kind in kinds]

    def _record(self, masked: tuple[bool, ...]) -> Callable[[], None]:
        """A function that does these steps: on a GPU the replay of a graph, else the steps themselves."""

        def run(kinds: Iterable[bool] = masked) -> None:
            for kind in kinds:
                self._step(kind)

        self.done.zero_()
        if self.device.type != "cuda":
            with no_randomness(self.device):
                run()
            return run
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM):  # a replay would draw other random numbers
                    for kind in sorted(set(masked)):
                        with no_randomness(self.device), rehearsed():
                            run((kind,))
                        self.done.zero_()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            gc.disable()  # a recording that is freed during another one spoils it
            try:
                # recordings share the memory of temporaries: none is read after its step
                with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                    run()
            finally:
                if collects:
                    gc.enable()
        return graph.replay

    def _step(self, masked: bool) -> None:
        """One step; reads and writes the tensors of the recording."""
        if self.chain is not None:
            self.chain(self.batches, self.done, self.loss, masked)
            return
        batch = self.batches.index_select(0, self.done)[0]
        index, rows = batch[:, :-1], batch[:, -1]
        x, y = self.gather(index)
        mask = None
        if self.descent is not None and not masked:
            grads, buffers, loss = self.descent(self.coords, self.buffers, x, y)
            self._descend(grads)
            copy_trees((self.buffers,), (buffers,))
            self._count(loss, rows)
            return
        if masked:
            mask = (torch.arange(index.shape[1], device=self.device) < rows[:, None]).to(torch.float32)
        now = (self.coords, self.opt, self.buffers)
        coords, opt, buffers, loss = self.step(*now, self.start, self.own, x, y, mask)
        if masked:
            coords, opt, buffers = keep_finished(rows > 0, (coords, opt, buffers), now)
        copy_trees(
            (self.coords, self.buffers, *self.opt.values()), (coords, buffers, *(opt[slot] for slot in self.opt))
        )
        self._count(loss, rows)

    def _descend(self, grads: Tree) -> None:
        """A step of plain gradient descent, in place."""
        if self.factor is not None:
            grads = tmap(lambda block: block * self.factor, grads)
        (coords, slopes), others = by_strides([(block, grads[name]) for name, block in self.coords.items()])
        if coords:
            torch._foreach_add_(coords, slopes, alpha=-self.lr)
        for block, slope in others:
            block.add_(slope, alpha=-self.lr)

    def _count(self, loss: Tensor, rows: Tensor) -> None:
        """Add the losses of a step, which is done."""
        self.loss.add_(loss.detach() * rows)
        self.done.add_(1)


def _reads_channels_last(inputs: TrainingInputs) -> bool:
    """Whether the steps read the coordinates as kernels of convolutions with their channels last (`conv.py`).

    With coordinates, gradients and optimizer states in that order in memory, no step has to reorder them.
    """
    if getattr(inputs.model, "products", None) != "fused" or inputs.optimizer.forward_only:
        return False
    one = unstack(inputs.start, 0)
    return inputs.space.expand(inputs.base, inputs.basis, one) is one


def _zeros(tree: Tree, last: bool = False) -> Tree:
    """A tree of zeros of the same shapes; with `last`, kernels (c, o, i, kh, kw) have channels last in memory."""

    def zeros(block: Tensor) -> Tensor:
        out = torch.zeros(block.shape, dtype=block.dtype, device=block.device)
        if not last or block.dim() != 5:
            return out
        return out.view(*block.shape[:2], *block.shape[3:], block.shape[2]).movedim(-1, 2)

    return tmap(zeros, tree)


def _copied(block: Tensor) -> Tensor:
    """A contiguous copy."""
    return block.clone(memory_format=torch.contiguous_format)
