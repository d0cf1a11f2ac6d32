"""Memory of training and of evaluation, counted before a run starts.

A step of local training is run on tensors without values (`live_bytes.py`), with the real numbers of clients and
examples, and all tensors that are alive at the same time are counted: activations that autograd keeps, gradients,
logits and their softmax, matrices that are decoded, optimizer states.

    clients together      the peak of a step of all of them, and, from the second step on, values and states before it
    one after another     the same for one client, and the trained values of the others

>>> from thinwire.training.functional import Functional
>>> from thinwire.data.examples import Arrays
>>> model = Functional.of(nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 2)))
>>> tests = Arrays(torch.zeros(50, 100), torch.zeros(50, dtype=torch.int64))
>>> evaluation_bytes(model, model.weights(), {}, tests)  # inputs, labels, before and after the ReLU
420400
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from thinwire.core.state import State
from thinwire.core.tree import Tree, tmap
from thinwire.data.examples import Examples
from thinwire.training.evaluation import largest_batch
from thinwire.training.functional import Functional
from thinwire.training.inputs import Trainer, TrainingInputs, UnsupportedModel
from thinwire.training.live_bytes import Fake, Heap, LiveBytes
from thinwire.training.loop import LoopTrainer

AGAIN = 4  # further steps for which the heap is followed: its free pieces grow in the first few


class Peak(NamedTuple):
    """The most memory at any time, in bytes."""

    tensors: int
    heap: int = 0  # what the C library takes for them; 0 where that is not known


def training_peak(trainer: Trainer, model: Functional, inputs: TrainingInputs, held: Iterable[Tensor]) -> Peak:
    """The peak of local training of the clients of `inputs`, all together or one after another.

    A model whose program depends on values cannot run without them. One client then takes a step on real tensors, and
    for clients that are trained together its bytes count once for each.

    Args:
        trainer: the backend: clients together, or a `LoopTrainer`, one after another.
        model: the model of `inputs`.
        inputs: what it trains, with batches of the widest examples.
        held: tensors that are there before and do not count: weights, public values.
    """
    clients, alone = len(inputs.work.samples), isinstance(trainer, LoopTrainer)
    part = replace(inputs, work=inputs.work.first(1 if alone else clients, 1))
    heap = Heap()
    try:
        peak, kept = _without_values(trainer, model, part, held, heap)
    except UnsupportedModel:
        raise
    except Exception:  # whatever a model does with values that are not there
        peak, kept = _counted(trainer, _of_first(inputs), (), (*held, *_given(inputs)))
        peak, kept = (peak, kept) if alone else (clients * peak, clients * kept)
        heap.peak = 0
    # in later steps there are also the values that the step before has made; in a loop, those of other clients
    more = kept if inputs.work.rows.shape[1] > 1 else 0
    if alone:
        more = max(more + (clients - 1) * kept, 2 * clients * kept - peak)
    return Peak(peak + more, heap.peak and heap.peak + more)


@torch.no_grad()
def evaluation_bytes(model: Functional, weights: Tree, buffers: Tree, examples: Examples) -> int:
    """The peak of the evaluation of the largest batch, in bytes, without the weights."""
    index, fake = largest_batch(model, weights, buffers, examples), Fake()
    model.module.eval()

    def counted(model: Functional, weights: Tree, buffers: Tree) -> int:
        with LiveBytes((*weights.values(), *buffers.values(), *_of_module(model))) as live:
            inputs, targets = examples.gather(index)
            model.loss_sum(model.outputs(weights, buffers, inputs), targets)
        return int(live.peak)

    try:
        like = replace(model, module=fake.module(model.module))
        peak = counted(like, fake.tree(weights), fake.tree(buffers))
    except Exception:  # as in training
        peak = counted(model, weights, dict(buffers))
    return peak


def model_bytes(module: nn.Module, copies: int = 1) -> int:
    """The bytes of a model: of its weights and buffers in each copy, and of layers in few bits, which copies share.

    >>> model_bytes(nn.Linear(4, 2)), model_bytes(nn.Linear(4, 2), copies=2)
    (40, 80)
    """
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    seen: dict[int, int] = {}
    for part in module.modules():
        if hasattr(part, "blocks"):
            seen[id(part.blocks)] = int(getattr(part, "constant_bytes", 0))
    return copies * own + sum(seen.values())


def resident_bytes() -> int:
    """The memory of this process now: libraries, data, model; 0 where the system does not tell (it is Linux that does).

    >>> resident_bytes() >= 0
    True
    """
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.is_file() else 0


def _without_values(
    trainer: Trainer, model: Functional, inputs: TrainingInputs, held: Iterable[Tensor], heap: Heap
) -> tuple[int, int]:
    """As `_counted`, with fake tensors in place of all floating-point values; examples are real."""
    fake = Fake()
    like = replace(model, module=fake.module(model.module))
    made = replace(
        inputs,
        model=like,
        **{name: fake.tree(getattr(inputs, name)) for name in ("base", "basis", "shared", "buffers", "start")},
        **{name: fake.tree(getattr(inputs, name)) for name in ("correction_state", "trainable", "opt_state")},
    )
    return _counted(trainer, made, _given(inputs), (*held, *fake.made, *_of_module(like)), heap)


def _counted(
    trainer: Trainer, inputs: TrainingInputs, own: Iterable[Tensor], held: Iterable[Tensor], heap: Heap | None = None
) -> tuple[int, int]:
    """The peak of training, with `own` tensors that were made for it, and the bytes of its outcome."""
    with LiveBytes(held, heap) as live:
        live.add(own)
        outcome = trainer.train(inputs)
    live.closed = True
    if heap:
        heap.again(AGAIN)
        heap.close()
    trees = (outcome.coords, outcome.buffers, *outcome.opt_state.values())
    storages = {block.untyped_storage()._cdata: block.untyped_storage() for tree in trees for block in tree.values()}
    return live.peak, sum(storage.nbytes() for storage in storages.values())


def _given(inputs: TrainingInputs) -> list[Tensor]:
    """Everything that was made for the clients of a round before they train; views of public values among it."""
    trees = (inputs.start, inputs.correction_state, inputs.trainable, *(inputs.opt_state or {}).values())
    return [block for tree in trees for block in tree.values()]


def _of_module(model: Functional) -> list[Tensor]:
    return [*model.module.parameters(), *model.module.buffers()]


def _of_first(inputs: TrainingInputs) -> TrainingInputs:
    """The first client alone, still with a client axis."""

    def first(tree: Tree) -> Tree:
        return tmap(lambda block: block[:1], tree)

    opt: State | None = inputs.opt_state and {slot: first(tree) for slot, tree in inputs.opt_state.items()}
    return replace(
        inputs,
        start=first(inputs.start),
        correction_state=first(inputs.correction_state),
        opt_state=opt,
        work=inputs.work.first(1, 1),
    )
