"""Local training by a function of the user: a loop of torch, a `transformers.Trainer`, or anything that trains modules.

    fit(model, records) -> model

`model` is a module whose trainable parameters are the coordinates of the method's space (`trainable_module.py`),
`records` has the client's examples (`records.py`). What comes back, the model or its state dict, is checked, and
everything after it is as ever: schedules, masks, sketches, privacy, codecs. Clients are trained one after another.

    fit(model, records, lr, seed, state)      further parameters are filled by name, those that it has
    return model, {"loss": 0.5, "state": {"0/momentum_buffer": tensor}}      loss and state are optional

`state` are tensors that stay at home, and come back in the client's next round where `opt_lifetime = "run"`.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.core.reference import failure, load_reference, short_name, source_file
from thinwire.core.state import State
from thinwire.core.tree import Tree, unstack
from thinwire.errors import ConfigError, Diverged, IncompatibleParts, ThinwireError
from thinwire.optimizers.base import Correction
from thinwire.optimizers.penalties import Penalty
from thinwire.spaces.base import Space
from thinwire.spaces.unmerged import Unmerged
from thinwire.training.functional import Functional
from thinwire.training.inputs import TrainingInputs, TrainingOutcome
from thinwire.training.loop import stack_outcomes
from thinwire.training.records import Records
from thinwire.training.returned import Returned, read_returned
from thinwire.training.step import of_client, seeded
from thinwire.training.trainable_module import trainable_module

KEPT = "own"  # the slot of a client's optimizer state that holds what `fit` keeps
FILLED = ("lr", "seed", "state")  # parameters of `fit` that are filled


@dataclass(frozen=True, eq=False)
class OwnTrainer:
    """Trains clients one after another by a function of the user.

    Args:
        fit: the function.
        label: its name for readers.
        model: the model and its loss.
    """

    fit: Callable[..., Any]
    label: str
    model: Functional

    @classmethod
    def of(cls, trainer: str | Callable[..., Any], model: Functional) -> OwnTrainer:
        """The trainer of a function or of a reference to one.

        Raises:
            ConfigError: if it is no function that can be called with a model and records.
        """
        fit = load_reference(trainer) if isinstance(trainer, str) else trainer
        label = short_name(trainer) if isinstance(trainer, str) else getattr(fit, "__name__", type(fit).__name__)
        if not callable(fit) or isinstance(fit, nn.Module):
            raise ConfigError(f"{label} is of type {type(fit).__name__}; a trainer is a function fit(model, records)")
        given = [name for name in _parameters(fit) if name in FILLED]
        try:
            inspect.signature(fit).bind(None, None, **dict.fromkeys(given))
        except TypeError as error:
            raise ConfigError(
                f"{label} cannot be called: {error}; a trainer is a function fit(model, records), with parameters "
                f"{', '.join(FILLED)} if it needs them"
            ) from error
        except ValueError:  # a function without a signature
            pass
        return cls(fit, label, model)

    def train(self, inputs: TrainingInputs) -> TrainingOutcome:
        """Train the clients in order."""
        return stack_outcomes([self._train_one(inputs, i) for i in range(len(inputs.work.samples))])

    def _train_one(self, inputs: TrainingInputs, i: int) -> TrainingOutcome:
        """Train client i; the trees of the outcome have no client axis."""
        one, kept = of_client(inputs, i), (inputs.opt_state or {}).get(KEPT)
        state = {name: block.cpu() for name, block in unstack(kept, i).items()} if kept else None
        space = _merged(one.space)
        given = trainable_module(self.model.module, space, one.base, one.basis, one.buffers, one.start)
        filled = {"lr": _lr(one), "seed": one.work.keys[0].value, "state": state}
        named = {name: filled[name] for name in _parameters(self.fit) if name in filled}
        with torch.enable_grad(), seeded(one.work), _seeded_libraries(one.work.keys[0].value):
            try:
                answer = self.fit(given.module, Records(one.work), **named)
            except ThinwireError:
                raise
            except Exception as error:
                raise failure(error, source_file(self.fit)) from error
            found = read_returned(answer, given, one.start, one.buffers, self.label)
            coords = {
                name: torch.where(one.trainable[name], block, one.start[name]) if name in one.trainable else block
                for name, block in found.coords.items()
            }
            loss = found.loss if found.loss is not None else self._loss(one, space, coords, found)
        opt: State = {KEPT: found.state} if found.state else {}
        return TrainingOutcome(coords, found.buffers, torch.tensor([loss]), one.work.steps, opt)

    @torch.no_grad()
    def _loss(self, one: TrainingInputs, space: Space, coords: Tree, found: Returned) -> float:
        """The loss of the trained model on the client's first batch, where `fit` does not say one."""
        x, y = one.work.gather(one.work.index[0, 0, : int(one.work.rows[0, 0])])
        value, _ = self.model.loss(space.expand(one.base, one.basis, coords), found.buffers, x, y, None)
        if not math.isfinite(value):
            raise Diverged(f"{self.label} returned a model with a loss of {float(value)}; try a smaller learning rate")
        return float(value)


def check_own_trainer(correction: Correction, penalty: Penalty) -> None:
    """Raise IncompatibleParts for parts that need every local step, which a trainer of one's own takes itself.

    >>> from thinwire.optimizers import FedProx, NoPenalty
    >>> check_own_trainer(FedProx(0.1), NoPenalty())
    Traceback (most recent call last):
    thinwire.errors.IncompatibleParts: FedProx(mu=0.1) corrects each local step, which local.trainer takes itself; ...
    """
    if correction.active:
        raise IncompatibleParts(
            f"{correction!r} corrects each local step, which local.trainer takes itself; write correction = 'none'"
        )
    if penalty.active:
        raise IncompatibleParts(
            f"{penalty!r} is added to the loss of each local step, which local.trainer takes itself; write penalty = "
            "'none', and add it to the loss there"
        )


def _merged(space: Space) -> Space:
    """The space whose `expand` returns the weights of the model: adapters merged, masks sampled from scores."""
    if isinstance(space, Unmerged) and not space.inner.reparametrized:
        return space.inner
    return space


def _lr(inputs: TrainingInputs) -> float:
    """The learning rate of the client optimizer in this round."""
    return float(inputs.optimizer.lr) * (1.0 if inputs.lr_factor is None else float(inputs.lr_factor))


def _parameters(fit: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(fit).parameters)[2:]
    except ValueError:
        return []


@contextmanager
def _seeded_libraries(seed: int) -> Iterator[None]:
    """Seed the generators of Python and numpy too; the caller's states are restored."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - what trainers draw from
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
